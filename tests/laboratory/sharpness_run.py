"""How sharp the loss is around a model's logits, and one run of its measurement.

Lee et al., To FP8 and Back Again (arXiv 2405.18710), equations 1 and 2: Keskar et al.'s sharpness (arXiv 1609.04836) of
the logits of the last token, in place of the weights. A run trains the small GPT-2 in one format from one seed, and
then goes on twice from the same state: in its format and in another.
"""

import math
import statistics
import time
from copy import deepcopy
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tiebreak.cases.gpt2.data import Batches, Tokens, corpus
from tiebreak.cases.gpt2.model import PRESETS, Configuration
from tiebreak.cases.gpt2.optimizers import Schedule
from tiebreak.kernels.formats import FP32
from tiebreak.laboratory.progress import Divergence
from tiebreak.laboratory.ranks import Ranks
from tiebreak.laboratory.reduced import Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import emulated_gpt2, parse_attention, reduced_gpt2
from tiebreak.laboratory.training import Recipe, Steps
from tiebreak.matrix.memory import keep_memory

EPSILON = 5e-4  # of the box: the paper's
TRAINED, ON, BACK = "trained", "on", "back"  # a run's phases
_HELD_OUT = 10  # one part in this many of the text, its end, is not trained on
_WARM_UP = 100
_Array = NDArray[np.float64]


@dataclass(frozen=True)
class Settings:
    """What all runs of a file have in common."""

    kernel: str  # of attention
    attention: str  # what it rounds to, or SAME: as the products
    steps: int  # in a run's own format
    more: int  # steps that follow, once in its format and once in the other
    back: str  # the other format
    every: int  # steps between two measurements
    rate: float  # AdamW's highest
    sequences: int  # of a batch
    held_out: int  # sequences that are measured on
    epsilons: list[float]  # sizes of the box


@dataclass(frozen=True)
class Task:
    """One run to do."""

    settings: Settings
    reduction: str  # its format, as `parse_reduction` takes it
    seed: int  # of weights and batches


@dataclass(frozen=True)
class Point:
    """What was measured of a run at one step."""

    phase: str  # TRAINED, or how it goes on: ON or BACK
    step: int  # steps done in all
    loss: float  # of the step's batch, in nats
    held_out: float  # mean loss of all tokens of text that was not trained on, computed as it was trained
    w_q: float  # Frobenius norm of W_Q, mean over the layers
    logit: float  # mean magnitude of the logits
    masked: dict[str, float]  # sharpness by epsilon, the logits computed as it was trained
    unmasked: dict[str, float]  # sharpness by epsilon, the logits computed in fp32


@dataclass(frozen=True)
class Run:
    """A line of the file."""

    settings: dict[str, Any]  # fields of `Settings`
    reduction: str
    seed: int
    seconds: float  # it took
    exploded: int | None  # the step at which its loss did; None: it did not
    points: list[dict[str, Any]]  # fields of `Point`

    @property
    def measured(self) -> list[Point]:
        """The points."""
        return [Point(**point) for point in self.points]


def run_one(task: Task) -> Run:
    """Do one run on one thread: trained in its format, then on in it, and from the same state on in the other."""
    torch.set_num_threads(1)
    keep_memory()
    started, settings = time.monotonic(), task.settings
    own, other = parse_reduction(task.reduction), parse_reduction(settings.back)
    sizes = replace(PRESETS["tiny"], vocabulary=len(corpus().vocabulary))
    learnt, kept_apart = texts(corpus().tokens, sizes, settings.held_out)
    model = emulated_gpt2(settings.kernel, sizes, task.seed)
    recipe = Recipe(Schedule(settings.steps + settings.more, settings.rate, _WARM_UP))
    steps = Steps(model, Batches(learnt, settings.sequences, sizes.context, task.seed), recipe, Ranks())
    trained = _Stretch(settings, steps, kept_apart, TRAINED, own, Divergence())
    trained.take(range(settings.steps))
    points, exploded = trained.points, trained.exploded
    state = deepcopy((model.state_dict(), steps.optimizers[0].state_dict(), trained.divergence))
    # A run in the other format already has nothing to go back to.
    phases = ((ON, own), *(((BACK, other),) if own != other else ())) if settings.more and exploded is None else ()
    for phase, reduction in phases:
        weights, moments, divergence = deepcopy(state)
        model.load_state_dict(weights)
        steps.optimizers[0].load_state_dict(moments)
        more = _Stretch(settings, steps, kept_apart, phase, reduction, divergence)
        more.take(range(settings.steps, settings.steps + settings.more))
        points += more.points
        exploded = more.exploded if phase == ON else exploded
    seconds = round(time.monotonic() - started, 1)
    return Run(asdict(settings), task.reduction, task.seed, seconds, exploded, [asdict(point) for point in points])


@dataclass
class _Stretch:
    """Steps of a run that are taken in one format."""

    settings: Settings
    steps: Steps
    text: Tensor  # that is measured on
    phase: str
    reduction: Reduction
    divergence: Divergence
    points: list[Point] = field(default_factory=list)
    exploded: int | None = None  # the step at which the loss did

    def take(self, span: range) -> None:
        """Take the steps, and measure every so many of them; an explosion ends it."""
        attention = parse_attention(self.settings.attention)
        for start in span[:: self.settings.every]:
            loss = math.nan
            with reduced_gpt2(self.steps.model, self.reduction, attention=attention):
                for step in range(start, start + self.settings.every):
                    loss = self.steps.take(step, []).loss
                    if self.divergence.after(loss) is not None:
                        self.exploded = step + 1
                        return
            self.points.append(self._point(start + self.settings.every, loss))

    def _point(self, done: int, loss: float) -> Point:
        model, text = self.steps.model, self.text
        with torch.no_grad(), reduced_gpt2(model, self.reduction, attention=parse_attention(self.settings.attention)):
            masked = model(text[:, :-1], 0)
        with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
            unmasked = model(text[:, :-1], 0)[:, -1]
        norms = [model.block(layer).wq.weight.norm().item() for layer in range(model.configuration.layers)]
        sharp = [
            {f"{epsilon:g}": sharpness(logits, text[:, -1], epsilon) for epsilon in self.settings.epsilons}
            for logits in (masked[:, -1], unmasked)
        ]
        held_out = functional.cross_entropy(masked.flatten(0, 1), text[:, 1:].flatten()).item()
        logit = masked[:, -1].abs().mean().item()
        return Point(self.phase, done, loss, held_out, statistics.fmean(norms), logit, *sharp)


def texts(tokens: Tokens, sizes: Configuration, sequences: int) -> tuple[Tokens, Tensor]:
    """Return what is trained on, and sequences of the rest with their target: int64 (sequences, context + 1)."""
    end = len(tokens) - len(tokens) // _HELD_OUT
    starts = np.linspace(end, len(tokens) - sizes.context - 1, sequences).astype(int)
    return tokens[:end], torch.from_numpy(
        np.stack([tokens[at : at + sizes.context + 1] for at in starts]).astype(np.int64)
    )


def sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> float:
    """Return the rise of the mean loss f over one plus the loss, in per cent: 100 (max f(y + z) - f(y)) / (1 + f(y)).

    z runs over the box ``|z_i| <= epsilon (|y_i| + 1)`` and L-BFGS-B finds the maximum, from z = 0 with scipy's own
    settings. One z for every sequence: their maxima don't depend on each other, and are searched for at once.

    Args:
        logits: y, of the last token of every sequence, (sequences, vocabulary), finite.
        targets: the tokens that follow, int64 (sequences,).
        epsilon: size of the box, above 0.

    Returns:
        Per cent; 0 where the loss can't rise.

    Raises:
        ImportError: no scipy.
        ValueError: logits that are not finite, or a box without size.
    """
    y, rows = logits.detach().double().cpu().numpy(), np.arange(len(logits))
    if not np.isfinite(y).all():
        raise ValueError("the logits have NaN or Inf: there is no loss to rise")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, not {epsilon}")
    answers = targets.cpu().numpy()

    def fallen(z: _Array) -> tuple[float, _Array]:
        """What the minimiser takes: the loss, summed, times -1, and its gradient."""
        moved = y + z.reshape(y.shape)
        highest = moved.max(-1, keepdims=True)
        exponentials = np.exp(moved - highest)
        sums = exponentials.sum(-1, keepdims=True)
        loss = np.log(sums[:, 0]) + highest[:, 0] - moved[rows, answers]
        gradient = exponentials / sums
        gradient[rows, answers] -= 1.0
        return -float(loss.sum()), -gradient.ravel()

    start = np.zeros(y.size)
    before = -fallen(start)[0] / len(y)
    after = -_minimum(fallen, start, epsilon * (np.abs(y) + 1.0).ravel()) / len(y)
    return 100.0 * (after - before) / (1.0 + before)


def _minimum(function: Any, start: _Array, box: _Array) -> float:
    optimize = import_module("scipy.optimize")  # an extra, and slow to import
    minimum = optimize.minimize(function, start, jac=True, method="L-BFGS-B", bounds=optimize.Bounds(-box, box))
    return float(minimum.fun)
