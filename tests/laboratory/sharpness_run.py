"""How sharp the loss is around a model's logits, and one run of its measurement.

Lee et al., To FP8 and Back Again (arXiv 2405.18710), equations 1 and 2: Keskar et al.'s sharpness (arXiv 1609.04836) of
the logits of the last token, in place of the weights. A run trains the small GPT-2 in one format from one seed, and
then goes on twice from the same state: in its format and in another.
"""

import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tiebreak.cases.gpt2.data import Batches, Tokens, corpus
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration
from tiebreak.cases.gpt2.optimizers import Schedule
from tiebreak.kernels.formats import FP32
from tiebreak.laboratory.progress import Progress
from tiebreak.laboratory.ranks import Ranks
from tiebreak.laboratory.reduced import Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import emulated_gpt2, parse_attention, reduced_gpt2
from tiebreak.laboratory.training import CHECKPOINT, Recipe, Steps, Training
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
    """One run, on one thread: trained in its format, then on in it, and from the same state on in the other."""
    torch.set_num_threads(1)
    keep_memory()
    started, settings = time.monotonic(), task.settings
    own, other = parse_reduction(task.reduction), parse_reduction(settings.back)
    # A run in the other format already has nothing to go back to.
    phases = ((ON, own), *(((BACK, other),) if own != other else ())) if settings.more else ()
    with tempfile.TemporaryDirectory() as name:
        trained, exploded = _stretch(task, Path(name), TRAINED, own)
        points = list(trained)
        for phase, reduction in phases if exploded is None else ():
            folder = Path(name, phase)
            folder.mkdir()
            shutil.copy(Path(name, CHECKPOINT), folder)  # the end of a stretch writes another
            more, at = _stretch(task, folder, phase, reduction)
            points += more
            exploded = at if phase == ON else exploded
    seconds = round(time.monotonic() - started, 1)
    return Run(asdict(settings), task.reduction, task.seed, seconds, exploded, [asdict(point) for point in points])


def _stretch(task: Task, folder: Path, phase: str, reduction: Reduction) -> tuple[list[Point], int | None]:
    """Train from the folder's checkpoint to the end, or to where a run's own format ends: points, and an explosion."""
    settings = task.settings
    sizes = replace(PRESETS["tiny"], vocabulary=len(corpus().vocabulary))
    model = emulated_gpt2(settings.kernel, sizes, task.seed)
    learnt, kept_apart = texts(corpus().tokens, sizes, settings.held_out)
    schedule = Schedule(settings.steps + settings.more, settings.rate, _WARM_UP)
    batches = Batches(learnt, settings.sequences, sizes.context, task.seed)
    steps = Steps(model, batches, Recipe(schedule), Ranks())
    training = Training(steps, {"seed": task.seed}, folder)
    if phase != TRAINED:
        training.resume()
    end = settings.steps if phase == TRAINED else schedule.steps
    reports = training.reports(settings.every, schedule.steps, lambda: training.done + 1 == end)
    points: list[Point] = []
    while True:
        with reduced_gpt2(model, reduction, attention=parse_attention(settings.attention)):
            progress = next(reports, None)
        if progress is None or training.exploded:
            return points, training.done if training.exploded else None
        points.append(_point(model, kept_apart, reduction, settings, phase, progress))


def texts(tokens: Tokens, sizes: Configuration, sequences: int) -> tuple[Tokens, Tensor]:
    """What is trained on, and sequences of the rest with their target: int64 (sequences, context + 1)."""
    end = len(tokens) - len(tokens) // _HELD_OUT
    starts = np.linspace(end, len(tokens) - sizes.context - 1, sequences).astype(int)
    return tokens[:end], torch.from_numpy(
        np.stack([tokens[at : at + sizes.context + 1] for at in starts]).astype(np.int64)
    )


def _point(
    model: GPT2, text: Tensor, reduction: Reduction, settings: Settings, phase: str, progress: Progress
) -> Point:
    with torch.no_grad(), reduced_gpt2(model, reduction, attention=parse_attention(settings.attention)):
        masked = model(text[:, :-1], 0)
    with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
        unmasked = model(text[:, :-1], 0)[:, -1]
    norms = [model.block(layer).wq.weight.norm().item() for layer in range(model.configuration.layers)]
    sharp = [
        {f"{epsilon:g}": sharpness(logits, text[:, -1], epsilon) for epsilon in settings.epsilons}
        for logits in (masked[:, -1], unmasked)
    ]
    return Point(
        phase,
        progress.step,
        progress.loss,
        functional.cross_entropy(masked.flatten(0, 1), text[:, 1:].flatten()).item(),
        statistics.fmean(norms),
        masked[:, -1].abs().mean().item(),
        *sharp,
    )


def sharpness(logits: Tensor, targets: Tensor, epsilon: float = EPSILON) -> float:
    """The rise of the mean loss f over one plus the loss, in per cent: 100 (max f(y + z) - f(y)) / (1 + f(y)).

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
