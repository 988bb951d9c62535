"""A real run: its processes, its optimiser steps over the parts of a batch, what its monitors read, its checkpoints.

Gradients are added up by `Ranks.add`, not by DistributedDataParallel. The latter regroups its buckets after a process'
first step, which changes the order of the sums: with 3 ranks or more a resumed run would leave the uninterrupted one.
"""

import itertools
import json
import math
import os
import pickle
import zipfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tiebreak.cases import runner
from tiebreak.cases.gpt2.attention import Observation, Observer
from tiebreak.cases.gpt2.data import Batches
from tiebreak.cases.gpt2.model import CLIP, GPT2, adamw
from tiebreak.cases.gpt2.monitors import MEASURES, MeasureRecorder

OPTIMIZERS, PRECISIONS = ("adamw", "muon"), ("bf16", "fp32")
LOG, CHECKPOINT = "log.jsonl", "checkpoint.pt"
EXPLOSION_NATS = 2.0  # a loss this far above the lowest so far ...
EXPLOSION_STEPS = 5  # ... in this many steps in a row has exploded
# A score S is a product of q and k. In bf16 each has a relative error of up to 2^-9, so S has one of up to |S| 2^-8: at
# 1,024 that is 4, and one rounding can make a weight of the softmax 50 times as large.
LARGEST_LOGIT = 1024.0
NOT_FINITE, EXPLODED, LOGITS = "not finite", "loss", "logits"  # how a run can diverge
KEPT_STEPS = 8  # more than an explosion takes to be one: some of the steps that led to it are among them
# Heads are the samples of what the matrix measures: of a small model more sequences are kept than of a large one.
_KEPT_ELEMENTS = 2**20  # of each tensor, about
_CAPTURED = ("kernel", "preset", "seed")  # what kept attention inputs say of their run
RunSettings = dict[str, str | int | float]  # what a run was told
_Value = TypeVar("_Value")


class CheckpointError(ValueError):
    """A checkpoint that can't be resumed from; the message names the file and the field, in one line."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of its run; each computes its part of every batch."""

    rank: int = 0
    size: int = 1

    @property
    def first(self) -> bool:
        """Return whether this process writes the files and talks."""
        return self.rank == 0

    def share(self, parts: int) -> range:
        """Return which parts of a batch are this process'; `parts` is a multiple of the processes."""
        mine = parts // self.size
        return range(self.rank * mine, (self.rank + 1) * mine)

    def add(self, tensor: Tensor) -> None:
        if self.size > 1:
            dist.all_reduce(tensor)

    def gather(self, value: _Value) -> list[_Value]:
        """Return the values of all processes, in the order of their ranks."""
        if self.size == 1:
            return [value]
        values: list[_Value | None] = [None] * self.size
        dist.all_gather_object(values, value)
        return values  # type: ignore[return-value]


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other processes of the run, if torchrun started any; ValueError: not by torchrun's environment."""
    if "WORLD_SIZE" not in os.environ:
        yield ALONE
        return
    dist.init_process_group()
    try:
        yield Ranks(dist.get_rank(), dist.get_world_size())
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True)
class Schedule:
    """The learning rate: linear warm-up, then a cosine down to a hundredth (arXiv 2510.04212, section 3.1)."""

    steps: int  # of the whole run
    rate: float  # the highest
    warm_up: int  # steps

    def at(self, step: int) -> float:
        """Return the rate of a step, from 0."""
        if step < self.warm_up:
            return self.rate * (step + 1) / self.warm_up
        done = (step - self.warm_up) / max(1, self.steps - self.warm_up)
        return self.rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done)))


@dataclass(frozen=True)
class Recipe:
    schedule: Schedule  # of the learning rate, and the length of the run
    optimizer: str = "adamw"  # a name of `OPTIMIZERS`
    precision: str = "fp32"  # of the linear layers: a name of PRECISIONS
    parts: int = 1  # of a batch, equal; one forward and backward pass each, their gradients added up


@dataclass(frozen=True)
class StepResult:
    """What a step came to, of all processes together."""

    loss: float  # of the whole batch, in nats
    rate: float  # learning rate
    stop: bool  # whether a process was asked to stop


class Steps:
    """Takes a run's steps: the forward and backward pass of every part of a batch, then the optimisers.

    Batches are divisible into the recipe's parts, and their number by that of the ranks, which share them.
    """

    def __init__(self, model: GPT2, batches: Batches, recipe: Recipe, ranks: Ranks = ALONE) -> None:
        self.model, self._batches, self.recipe, self.ranks = model, batches, recipe, ranks
        self.weights = list(model.parameters())
        self._device = self.weights[0].device
        self.optimizers = optimizers(recipe.optimizer, model)

    def take(
        self,
        step: int,
        observers: Sequence[Observer],
        of_first: Sequence[Observer] = (),
        stop: Callable[[], bool] = bool,
    ) -> StepResult:
        """Take a step of the run, from 0: observers see all calls of attention, `of_first` those of the first part."""
        rate, parts = self.recipe.schedule.at(step), self.recipe.parts
        for optimizer in self.optimizers:
            optimizer.zero_grad()
            for group in optimizer.param_groups:
                group["lr"] = rate
        sums = torch.zeros(2, device=self._device)  # the loss, who was asked to stop
        for part in self.ranks.share(parts):
            self.model.observers = [*observers, *(of_first if part == 0 else ())]
            tokens, targets = (tensor.to(self._device) for tensor in self._batches.batch(step, part, parts))
            with torch.autocast(self._device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16"):
                # Parts are numbered like steps: each has noise of its own.
                loss = self.model.loss(tokens, targets, step * parts + part) / parts
            loss.backward()  # type: ignore[no-untyped-call]
            sums[0] += loss.detach()
        sums[1] = float(stop())
        self.ranks.add(sums)
        for weight in self.weights:
            assert weight.grad is not None
            self.ranks.add(weight.grad)
        nn.utils.clip_grad_norm_(self.weights, CLIP)
        for optimizer in self.optimizers:
            optimizer.step()
        return StepResult(sums[0].item(), rate, sums[1].item() > 0)


@dataclass(frozen=True)
class Progress:
    """One report of a run. Monitors are NaN in a report that no step was planned for: that of an explosion."""

    step: int  # steps done
    loss: float  # in nats, of the step's batch
    rate: float  # learning rate
    max_logit: float = math.nan  # of all layers, heads and sequences
    drift: float = math.nan  # sum of delta_lp - delta_hp over all rows of the batch, of the head with the largest size
    sign_diversity: float = math.nan  # lowest of all layers, of the input to W_Q: toward 0 is the early warning


class Readings:
    """Reads the monitors of one step, part by part of its batch; one of a model's observers."""

    def __init__(self, model: GPT2) -> None:
        sizes, self._model = model.configuration, model
        self._places = list(itertools.product(range(sizes.layers), range(sizes.heads)))
        self._recorder = MeasureRecorder(
            {name: MEASURES[name] for name in ("delta_error", "max_logit")}, range(sizes.layers)
        )
        self._diversity: dict[int, float] = {}  # by layer, of the first part: thousands of tokens say enough

    def __call__(self, observation: Observation) -> None:
        self._recorder(observation)
        if (layer := observation.layer) not in self._diversity:
            self._diversity[layer] = sign_diversity(self._model.block(layer).wq.weight, observation.x)

    def report(self, step: int, loss: float, rate: float, ranks: Ranks) -> Progress:
        """Return what the monitors of all processes read together; the drift is that of the head with the largest."""
        series = self._recorder.series
        drift = torch.tensor([sum(series("delta_error", *place)) for place in self._places], dtype=torch.float64)
        logits = torch.tensor([series("max_logit", *place) for place in self._places], dtype=torch.float64)
        readings = ranks.gather((drift, logits.max(), min([math.inf, *self._diversity.values()])))
        drift = torch.stack([each[0] for each in readings]).sum(0)
        largest, logit = drift[drift.abs().argmax()].item(), torch.stack([each[1] for each in readings]).max().item()
        return Progress(step, loss, rate, logit, largest, readings[0][2])


@dataclass
class Divergence:
    """Notices that a run has diverged: the one definition, of a run that is ended and of a sweep's rates.

    Its loss is NaN or Inf; or it is in `EXPLOSION_STEPS` steps in a row `EXPLOSION_NATS` above the lowest so far, a
    perplexity 7 times as large; or the largest logit is beyond a limit. The margin and the span are this suite's own:
    of ten sound runs (2 layers, width 32, learning rates 4e-4 to 0.1, 200 steps) none stayed 0.5 above its lowest for
    as long.
    """

    lowest: float = math.inf  # loss so far, in nats
    above: int = 0  # steps in a row far above it
    limit: float = math.inf  # of the largest logit; infinite: none

    def after(self, loss: float, max_logit: float = math.nan) -> str | None:
        """Return how the run has diverged, given one more step; None: it has not. NaN: nobody looked at the logits."""
        if not math.isfinite(loss):
            return NOT_FINITE
        self.above = self.above + 1 if loss > self.lowest + EXPLOSION_NATS else 0
        self.lowest = min(self.lowest, loss)
        if self.above >= EXPLOSION_STEPS:
            return EXPLODED
        return LOGITS if max_logit > self.limit else None


class Captures:
    """Keeps q, k, v and dO of the first sequences of the last steps' batches: `pytest --captured DIR` runs them."""

    def __init__(self) -> None:
        # By step: by layer and name, by heads (those that share a kernel come together), (sequences, heads, tokens, d).
        self.kept: deque[tuple[int, dict[str, dict[tuple[int, ...], Tensor]]]] = deque(maxlen=KEPT_STEPS)

    def begin(self, step: int) -> None:
        """Start with a step, from 1; the oldest is forgotten."""
        self.kept.append((step, {}))

    def __call__(self, observation: Observation) -> None:
        """Keep one call of attention; one of a model's observers."""
        tensors, inputs = self.kept[-1][1], observation.inputs
        for name, tensor in (("q", inputs.q), ("k", inputs.k), ("v", inputs.v), ("do", inputs.do)):
            sequences = max(1, _KEPT_ELEMENTS // tensor[0].numel())
            layer = tensors.setdefault(f"layer{observation.layer}.{name}", {})
            layer[observation.heads] = tensor[:sequences].clone()

    def write(self, folder: Path, metadata: Mapping[str, str]) -> list[Path]:
        """Write one file a step, `inputs-STEP.safetensors`, its keys `layer0.q`, `layer0.k`, `layer0.v`, `layer0.do`.

        Tensors are (sequences, heads, tokens, d), in bf16 if that holds all their values, else in fp32. Steps with an
        element that is not finite are left out: after the explosion there is nothing to learn from them. The files say
        `metadata` beside step, layers and causal.
        """
        paths: list[Path] = []
        for step, layers in self.kept:
            tensors: dict[str, Tensor] = {}
            for name, parts in layers.items():
                order = torch.tensor([head for heads in parts for head in heads]).argsort()
                wide = torch.cat(list(parts.values()), 1)[:, order]
                narrow = wide.bfloat16()
                tensors[name] = narrow if torch.equal(narrow.float(), wide) else wide
            if all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values()):
                paths.append(folder / f"inputs-{step:06d}.safetensors")
                labels = {**metadata, "step": str(step), "layers": str(len(tensors) // 4), "causal": "true"}
                runner.write(paths[-1], tensors, labels)
        return paths


class Training:
    """A run that can be stopped at any step and resumed to the bit: batches and noise follow from the step.

    What it was told, `run`, is kept in its checkpoints, and `folder` has all that it leaves.
    """

    def __init__(self, steps: Steps, run: RunSettings, folder: Path) -> None:
        self._steps, self._run, self._folder = steps, run, folder
        self._divergence, self._captures = Divergence(), Captures()
        self.done = 0  # steps
        self.exploded = self.interrupted = False
        self.captured: list[Path] = []  # attention inputs, after an explosion

    def resume(self) -> None:
        """Go on where the folder's checkpoint was taken, as `load` has it; the log forgets later steps."""
        checkpoint = load(self._folder, self._run)
        self._steps.model.load_state_dict(checkpoint["model"])
        for optimizer, state in zip(self._steps.optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self._divergence, self.done = Divergence(*checkpoint["watch"]), checkpoint["step"]
        if self._steps.ranks.first and (self._folder / LOG).is_file():
            os.truncate(self._folder / LOG, checkpoint["log"])

    def reports(self, every: int, checkpoint_every: int, stop: Callable[[], bool]) -> Iterator[Progress]:
        """Train to the end or to an explosion, telling of every `every`-th step and of the last.

        The last step has a checkpoint too, and so has one in which any process says that it is to `stop`. ValueError:
        the very first loss is NaN or Inf; CheckpointError: no checkpoint can be written.
        """
        steps, first = self._steps.recipe.schedule.steps, self._steps.ranks.first
        while self.done < steps and not self.exploded and not self.interrupted:
            last = self.done + 1 == steps
            readings = Readings(self._steps.model) if (self.done + 1) % every == 0 or last else None
            self._captures.begin(self.done + 1)
            result = self._steps.take(self.done, [] if readings is None else [readings], [self._captures], stop)
            self.done, self.interrupted = self.done + 1, result.stop
            if self.done == 1 and not math.isfinite(result.loss):
                raise ValueError(f"the loss of the first step is {result.loss}: check the kernel and data")
            self.exploded = self._divergence.after(result.loss) is not None
            progress = None
            if readings is not None:
                progress = readings.report(self.done, result.loss, result.rate, self._steps.ranks)
            elif self.exploded:
                progress = Progress(self.done, result.loss, result.rate)
            if first:
                self._keep(progress, checkpoint=self.done % checkpoint_every == 0 or last or self.interrupted)
            if progress is not None:
                yield progress

    def _keep(self, progress: Progress | None, *, checkpoint: bool) -> None:
        """Write what a step leaves in the folder; the log first, a kill in between leaves it no gap."""
        with (self._folder / LOG).open("a") as log:
            if progress is not None:  # JSON has no NaN and no Inf
                numbers = {name: value if math.isfinite(value) else None for name, value in asdict(progress).items()}
                log.write(json.dumps(numbers) + "\n")
        if self.exploded:
            settings = {name: str(self._run[name]) for name in _CAPTURED if name in self._run}
            self.captured = self._captures.write(self._folder, settings)
        elif checkpoint:
            self._save()

    def _save(self) -> None:
        """Replace the folder's checkpoint; a kill in between leaves the former, and so does a full disk."""
        state = {
            "step": self.done,
            "log": (self._folder / LOG).stat().st_size,  # its length then
            "run": self._run,
            "model": self._steps.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._steps.optimizers],
            "watch": (self._divergence.lowest, self._divergence.above),
        }
        partial = self._folder / f"{CHECKPOINT}.partial"
        try:
            torch.save(state, partial)
        except (RuntimeError, OSError) as error:  # torch's writer raises the former on a full disk
            partial.unlink(missing_ok=True)
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise CheckpointError(f"{partial}: can't be written ({reason}); the last checkpoint is kept") from error
        os.replace(partial, self._folder / CHECKPOINT)


def load(folder: Path, run: RunSettings) -> dict[str, Any]:
    """Return the folder's checkpoint, for a run that is told the same; CheckpointError: there is none."""
    path = folder / CHECKPOINT
    if not path.is_file():
        raise CheckpointError(f"{path}: no such file; start without --resume")
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        there = {name: state["run"].get(name) for name in run}
    except (RuntimeError, EOFError, OSError, TypeError, KeyError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise CheckpointError(
            f"{path}: not a whole checkpoint ({type(error).__name__}); start without --resume"
        ) from error
    for name, value in run.items():
        if there[name] != value:
            raise CheckpointError(f"{path}: was written with {name} = {there[name]}, not {value}")
    return state


def optimizers(name: str, model: GPT2) -> list[Optimizer]:
    """Return the optimisers of a model's weights; their rate is set step by step.

    `adamw` is the paper's. `muon` is Muon with the root mean square of its updates matched to AdamW's (arXiv
    2502.16982, section 2.2) and decay 0.01 on the blocks' matrices, and AdamW on embeddings, head and vectors.
    ValueError: no such optimiser, or a torch without Muon.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"unknown optimizer {name!r}: known are {', '.join(OPTIMIZERS)}")
    if name == "adamw":
        return [adamw(list(model.parameters()))]
    if not hasattr(torch.optim, "Muon"):
        raise ValueError(f"torch {torch.__version__} has no Muon: 2.9 and newer do; or train with adamw")
    matrices = [weight for weight in model.blocks.parameters() if weight.dim() == 2]
    chosen = set(map(id, matrices))
    rest = [weight for weight in model.parameters() if id(weight) not in chosen]
    return [torch.optim.Muon(matrices, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"), adamw(rest)]


def sign_diversity(weight: Tensor, x: Tensor) -> float:
    """Whether tokens point both ways: 1, or all one way along the weight's main direction: 0 (arXiv 2510.04202).

    It is twice the share of the rarer sign of x, (..., in), times the principal right singular vector of the weight,
    (out, in). Its collapse is the paper's early warning. NaN where the weight or a token has no direction.
    """
    if not torch.isfinite(weight).all():
        return math.nan
    with torch.no_grad():
        cosines = (x @ torch.linalg.svd(weight, full_matrices=False)[2][0]) / x.norm(dim=-1)
    if not torch.isfinite(cosines).all():
        return math.nan
    positive: float = int((cosines > 0).sum()) / cosines.numel()
    return 2 * min(positive, 1 - positive)
