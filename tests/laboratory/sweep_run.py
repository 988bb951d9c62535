"""One run of a sweep: a small GPT-2 trained from its first weights with masked products, until it ends or diverges."""

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from types import MappingProxyType

import torch
from msgspec.structs import asdict

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.platform import describe
from tiebreak.cases.gpt2.attention import HeadKernel, Observation, Observer
from tiebreak.cases.gpt2.data import DataError
from tiebreak.cases.gpt2.mitigations import GATED, NO_MITIGATION, QK_CLIP, QK_NORM, Mitigation
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.cases.gpt2.monitors import View, max_logit
from tiebreak.cases.gpt2.optimizers import Schedule
from tiebreak.kernels.formats import FP32, TF32
from tiebreak.laboratory.divergence import LARGEST_LOGIT, Watch
from tiebreak.laboratory.ranks import Ranks
from tiebreak.laboratory.reduced import Otherwise, Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import parse_attention, reduced_gpt2
from tiebreak.laboratory.train_command import batches_of
from tiebreak.laboratory.training import Recipe, Steps
from tiebreak.reports.sweeps.store import Place, SweepRun

LOOK_EVERY = 10  # steps, at the largest logit
_FIRST_BLOCKS = "blocks.[01]"
_END = 10  # the loss of a run is the mean over one in so many of its steps, the last


@dataclass(frozen=True)
class Stabiliser:
    """What a switch changes."""

    about: str  # one line
    mitigation: Mitigation = NO_MITIGATION  # of the model or its training
    otherwise: Otherwise = field(default_factory=dict)  # parts of the model that have a mask of their own, or none

    def refusal(self, reduction: Reduction, layers: int) -> str | None:
        """Why it makes no sense here; None: it does."""
        if _FIRST_BLOCKS in self.otherwise:
            if layers < 3:
                return f"a model of {layers} layers has no other blocks than the first two: --layers 3"
            other = self.otherwise[_FIRST_BLOCKS] or Reduction(FP32)
            if other.fmt.mantissa_bits <= reduction.fmt.mantissa_bits:
                return f"{other.fmt.name} has no more bits than {reduction.fmt.name}"
        return None


#: The papers' own, each alone: those of arXiv 2405.18710, and those that arXiv 2510.04212 names.
STABILISERS: Mapping[str, Stabiliser] = MappingProxyType(
    {
        "none": Stabiliser("as it is"),
        "tf32_first": Stabiliser("the first two blocks in TF32", otherwise={_FIRST_BLOCKS: Reduction(TF32)}),
        "fp32_first": Stabiliser("the first two blocks in fp32", otherwise={_FIRST_BLOCKS: None}),
        "head_unmasked": Stabiliser("the LM head in fp32", otherwise={"head": None}),
        "qk_norm": Stabiliser("queries and keys normalised", QK_NORM),
        "qk_clip": Stabiliser(f"W_Q and W_K shrunk where a logit is above {QK_CLIP.tau:g}", QK_CLIP),
        "gated": Stabiliser("a gate on every head's output", GATED),
    }
)


@dataclass(frozen=True)
class Task:
    """A run to do: all that a process on another machine needs to know."""

    place: Place
    sizes: Configuration
    steps: int
    warm_up: int  # steps
    sequences: int  # of a batch
    attention: str  # what it rounds to, as `parse_attention` takes it
    data: Path | None  # folder with token data; None: the text that ships
    digest: str  # of the first batch at seed 1: another machine may have other data
    device: str  # torch's name


class _Logits:
    """The largest logit of a step: a model's observer."""

    def __init__(self) -> None:
        self.largest = math.nan

    def __call__(self, observation: Observation) -> None:
        """Look at one call of attention."""
        largest = max_logit(View(observation)).max().item()
        self.largest = largest if math.isnan(self.largest) else max(self.largest, largest)


def run(task: Task, steps: int | None = None) -> SweepRun:
    """Do a run on one core.

    Args:
        task: what to train.
        steps: to stop after; None: those of the task.

    Raises:
        DataError: no data, or other data than the sweep's.
    """
    torch.set_num_threads(1)
    started, place = time.perf_counter(), task.place
    if batches_of(task.data, task.sizes, task.sequences, 1).digest(1) != task.digest:
        raise DataError(f"{task.data}: other data here than where the sweep began")
    losses, logits, watch = [], [-math.inf], Watch(limit=LARGEST_LOGIT)
    stabiliser = STABILISERS[place.stabiliser]
    clipper = stabiliser.mitigation.clipper()
    model = _model(task, stabiliser.mitigation)
    taken = _steps(task, model)
    diverged = None
    with _masked(model, task, stabiliser):
        for step in range(task.steps if steps is None else steps):
            looking = _Logits() if (step + 1) % LOOK_EVERY == 0 else None
            losses.append(taken.take(step, partial(_seen_by, [each for each in (looking, clipper) if each])).loss)
            if clipper is not None:
                clipper.after_step(model)
            logits += [looking.largest] if looking is not None else []
            diverged = watch.diverged(losses[-1], logits[-1] if looking is not None else math.nan)
            if diverged is not None:
                break
    tail = losses[-math.ceil(len(losses) / _END) :]
    return SweepRun(
        **asdict(place),
        diverged=diverged,
        steps=len(losses),
        loss=_number(sum(tail) / len(tail)),
        lowest=_number(watch.lowest),
        max_logit=_number(max(logits)),
        seconds=round(time.perf_counter() - started, 2),
        platform=_platform(task.device),
    )


def _seen_by(observers: Sequence[Observer], part: int) -> Sequence[Observer]:
    del part  # there is one
    return observers


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _model(task: Task, mitigation: Mitigation) -> GPT2:
    sizes = mitigation.configured(task.sizes)
    declared = EMULATION.kernel(task.place.kernel).declaration
    assert declared is not None
    with torch.device(task.device):
        return GPT2(sizes, everywhere(HeadKernel(declared), sizes), EMULATION.arithmetic, task.place.seed)


def _steps(task: Task, model: GPT2) -> Steps:
    batches = batches_of(task.data, task.sizes, task.sequences, task.place.seed)
    recipe = Recipe(Schedule(task.steps, task.place.rate, task.warm_up), "adamw", "fp32", 1)
    return Steps(model, batches, recipe, Ranks())


def _masked(model: GPT2, task: Task, stabiliser: Stabiliser) -> AbstractContextManager[object]:
    reduction, attention = parse_reduction(task.place.format), parse_attention(task.attention)
    return reduced_gpt2(model, reduction, stabiliser.otherwise, attention)


@cache
def _platform(device: str) -> Mapping[str, str | None]:
    """What of a machine can change the bits of a run."""
    platform = describe()
    card = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "cpu": platform.cpu,
        "level": platform.level,
        "torch": platform.torch,
        "commit": platform.commit,
        "gpu": card,
    }
