"""The verb `tiebreak lab sweep`: how often training diverges, over seeds, rates, formats and kernels; resumes.

A run is a small GPT-2 trained from its first weights with masked products, until it ends or diverges.
"""

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from tiebreak.backends.platform import describe, worker_count
from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.data import Batches, DataError
from tiebreak.cases.gpt2.mitigations import GATED, NO_MITIGATION, QK_CLIP, QK_NORM, Mitigation
from tiebreak.cases.gpt2.model import CLIP
from tiebreak.cases.gpt2.monitors import MEASURES, View
from tiebreak.kernels.formats import FP32, TF32
from tiebreak.laboratory import flags, ray_cluster, reduced
from tiebreak.laboratory.reduced import Otherwise, Reduction, parse_attention, parse_reduction
from tiebreak.laboratory.resumable import expected, in_processes, show_progress
from tiebreak.laboratory.sweep_store import (
    NO_STABILISER,
    Place,
    Sweep,
    SweepRun,
    SweepSettings,
    keep,
    open_store,
    read_sweep,
)
from tiebreak.laboratory.sweep_tables import sweep_tables
from tiebreak.laboratory.tokens import batches_of
from tiebreak.laboratory.training import (
    EXPLOSION_NATS,
    EXPLOSION_STEPS,
    LARGEST_LOGIT,
    Divergence,
    Recipe,
    Schedule,
    Steps,
)
from tiebreak.reports.cli import INTERRUPTED, PASSED
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import unknown
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.run import counted

LOOK_EVERY = 10  # steps, at the largest logit
_FIRST_BLOCKS = "blocks.[01]"
_END = 10  # the loss of a run is the mean over one in so many of its steps, the last
_WORKER_GIB = 1.0
DIVERGED = (
    f"its loss was NaN or Inf, or in {EXPLOSION_STEPS} steps in a row {EXPLOSION_NATS:g} nats above its lowest, or a"
    f" logit beyond {LARGEST_LOGIT:g} (looked at every {LOOK_EVERY} steps)"
)
_EPILOG = f"""{flags.PRESET_LINES}
exit codes: 0 done, whatever diverged; 2 bad usage, another sweep's store, a file cut short, no cluster;
130 stopped: the same command goes on"""


@dataclass(frozen=True)
class Stabiliser:
    about: str  # one line
    mitigation: Mitigation = NO_MITIGATION  # of the model or its training
    otherwise: Otherwise = field(default_factory=dict)  # parts of the model that have a mask of their own, or none

    def refusal(self, reduction: Reduction, layers: int) -> str | None:
        """Return why it makes no sense here; None: it does."""
        if _FIRST_BLOCKS in self.otherwise:
            if layers < 3:
                return f"a model of {layers} layers has no other blocks than the first two: --layers 3"
            other = self.otherwise[_FIRST_BLOCKS] or Reduction(FP32)
            if other.fmt.mantissa_bits <= reduction.fmt.mantissa_bits:
                return f"{other.fmt.name} has no more bits than {reduction.fmt.name}"
        return None


#: The papers' own, each alone: those of arXiv 2405.18710, and those that arXiv 2510.04212 names.
STABILISERS: Mapping[str, Stabiliser] = {
    NO_STABILISER: Stabiliser("as it is"),
    "tf32_first": Stabiliser("the first two blocks in TF32", otherwise={_FIRST_BLOCKS: Reduction(TF32)}),
    "fp32_first": Stabiliser("the first two blocks in fp32", otherwise={_FIRST_BLOCKS: None}),
    "head_unmasked": Stabiliser("the LM head in fp32", otherwise={"head": None}),
    "qk_norm": Stabiliser("queries and keys normalised", QK_NORM),
    "qk_clip": Stabiliser(f"W_Q and W_K shrunk where a logit is above {QK_CLIP.tau:g}", QK_CLIP),
    "gated": Stabiliser("a gate on every head's output", GATED),
}


@dataclass(frozen=True)
class Task:
    """A run to do: all that a process on another machine needs to know."""

    place: Place
    options: argparse.Namespace  # the sweep's, as `parse` gives them
    digest: str  # of the first batch at seed 1: another machine may have other data


def _stabiliser(name: str) -> str:
    if name not in STABILISERS:
        raise ValueError(unknown("stabiliser", name, STABILISERS, "--help lists"))
    return name


_ABOUT = "; ".join(f"{name}: {each.about}" for name, each in STABILISERS.items())


_AXES: flags.Options = {
    "--seeds": {**flags.NUMBER, "default": 20, "help": "how many, from 1"},
    "--lr": flags.comma_list("learning rate", flags.above_zero, "4e-4,4e-3,1e-2", "learning rates"),
    "--formats": flags.formats("E8M7,E8M5:rtz,E8M4:rtz"),
    **flags.ATTENTION,
    "--kernels": flags.comma_list("kernel", flags.emulated_kernel, "flash@paper,stabilized@paper,fair", "of attention"),
    "--stabiliser": flags.comma_list("stabiliser", _stabiliser, NO_STABILISER, f"each alone. {_ABOUT}"),
}
_WHERE: flags.Options = {
    "--out": {**flags.FOLDER, "default": Path("out", "sweep"), "help": "a file a run; what was stopped goes on there"},
    "--workers": {**flags.NUMBER, "help": "processes (default: as many as the machine carries)"},
    "--on": {"metavar": "WHERE", "help": "ray: Ray on this machine; ray://HOST:PORT or HOST:PORT: a Ray cluster"},
    "--gpus-per-run": {"type": float, "default": 0.0, "metavar": "SHARE", "help": "of a GPU, such as 0.25; default: 0"},
}


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options, those not given at the preset's defaults; UsageError: one line that names the option."""
    options = flags.fill(
        flags.parser(
            "sweep",
            "How often training diverges: a small GPT-2 over seeds, learning rates, formats and kernels.",
            _EPILOG,
            what_varies=_AXES,
            what_is_trained={**flags.MODEL, **flags.LENGTH},
            where_and_how=_WHERE,
        ).parse_args(argv)
    )
    options.data = options.data and options.data.resolve()
    if options.on is not None:
        ray_cluster.address_of(options.on)
    if not 0 <= options.gpus_per_run < math.inf:
        raise UsageError(f"--gpus-per-run must be 0 or more, not {options.gpus_per_run:g}")
    if options.gpus_per_run and options.on is None:
        raise UsageError("--gpus-per-run: --on ray shares out this machine's GPUs, too")
    for reduction in map(parse_reduction, options.formats):
        if options.attention == reduced.SAME and reduction.clamps:
            raise UsageError(f"--formats: {reduced.NO_RANGE.format(reduction.name)}")
        for name in options.stabiliser:
            if refusal := STABILISERS[name].refusal(reduction, options.layers):
                raise UsageError(f"--stabiliser {name}: {refusal}")
    return options


def batches(options: argparse.Namespace, seed: int) -> Batches:
    """Return the batches of a seed; DataError: no data to train on."""
    sizes = flags.configuration(options)
    return batches_of(options.data, sizes.vocabulary, sizes.context, options.sequences, seed)


def settings(options: argparse.Namespace) -> SweepSettings:
    """Return the sweep that the options describe; DataError: no data to train on."""
    recipe = {
        "preset": options.preset,
        **asdict(flags.configuration(options)),
        **{name: getattr(options, name) for name in ("steps", "warm_up", "sequences", "attention")},
        "optimizer": f"adamw, gradients clipped at {CLIP:g}",
        "data": batches(options, 1).digest(1),
    }
    return SweepSettings(
        SCHEMA, recipe, DIVERGED, options.seeds, options.lr, options.formats, options.kernels, options.stabiliser
    )


def main(argv: Sequence[str]) -> int:
    """Run what is left of a sweep: 0 when all runs are done, 130 after Ctrl-C."""
    gc.enable()  # the command turns it off, for verbs that end in a second
    options = parse(argv)
    try:
        asked = settings(options)
    except DataError as error:
        raise UsageError(str(error)) from None
    sweep = open_store(options.out, asked)
    left = [Task(place, options, asked.recipe["data"]) for place in sweep.left]
    try:
        if left:
            _run_all(options, sweep, left)
    except KeyboardInterrupt:
        done = counted(len(read_sweep(options.out).runs), "run")
        print(f"\nstopped; {options.out} has the {done} done, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    grids.show(sweep_tables(read_sweep(options.out)))
    print(f"again: tiebreak show {options.out}; as a page: tiebreak page {options.out} -o DIR")
    return PASSED


def _run_all(options: argparse.Namespace, sweep: Sweep, left: Sequence[Task]) -> None:
    """Run what is left, each run into the store as it ends."""
    if options.on is None:
        workers = min(options.workers or worker_count(_WORKER_GIB), len(left))
        _show(map(run, left) if workers == 1 else in_processes(run, left, workers), sweep, left, workers, "here")
        return
    with ray_cluster.connected(ray_cluster.address_of(options.on), options.workers) as cluster:
        slots = min(cluster.slots(options.gpus_per_run), len(left))
        _show(cluster.run(run, left, gpus=options.gpus_per_run), sweep, left, slots, f"on Ray, {cluster.about}")


def _show(runs: Iterable[SweepRun], sweep: Sweep, left: Sequence[Task], workers: int, where: str) -> None:
    """Keep runs as they come, and show what each came to; first what is left, and how long that will take."""
    steps, options = sum(each.steps for each in sweep.runs), left[0].options
    each = sum(each.seconds for each in sweep.runs) / steps * options.steps if steps else 0.0
    to_go = f": {expected(each * len(left) / workers)}" if steps else ""
    kept = counted(len(sweep.runs), "run")
    print(f"{kept} kept, {len(left)} to run, {workers} at a time {where}{to_go}", flush=True)

    def lines() -> Iterator[str]:
        for each in runs:
            keep(each, options.out)
            end = f"diverged ({each.diverged}) at step {each.steps}" if each.diverged else f"loss {each.loss:.3f}"
            yield f"{each.text}: {end}"

    show_progress(lines(), len(left), "run")


def run(task: Task) -> SweepRun:
    """Do a run on one core; DataError: no data, or others than the sweep's."""
    torch.set_num_threads(1)
    started, place, options = time.perf_counter(), task.place, task.options
    if batches(options, 1).digest(1) != task.digest:
        raise DataError(f"{options.data}: other data here than where the sweep began")
    stabiliser, device = STABILISERS[place.stabiliser], "cuda" if options.gpus_per_run else "cpu"
    with torch.device(device):
        model = reduced.emulated_gpt2(
            place.kernel, stabiliser.mitigation.configured(flags.configuration(options)), place.seed
        )
    taken = Steps(model, batches(options, place.seed), Recipe(Schedule(options.steps, place.rate, options.warm_up)))
    losses, largest, diverged = list[float](), -math.inf, None
    divergence, clipper = Divergence(limit=LARGEST_LOGIT), stabiliser.mitigation.clipper()
    reduction, attention = parse_reduction(place.format), parse_attention(options.attention)
    logits: list[float] = []  # the largest of each call of a step that is looked at

    def look(observation: Observation) -> None:
        logits.append(MEASURES["max_logit"](View(observation)).max().item())

    with reduced.reduced_gpt2(model, reduction, stabiliser.otherwise, attention):
        for step in range(options.steps):
            logits.clear()
            observers = [look] if (step + 1) % LOOK_EVERY == 0 else []
            losses.append(taken.take(step, observers if clipper is None else [*observers, clipper]).loss)
            if clipper is not None:
                clipper.after_step(model)
            largest = max(largest, *logits, -math.inf)
            diverged = divergence.after(losses[-1], max(logits, default=math.nan))
            if diverged is not None:
                break
    tail = losses[-math.ceil(len(losses) / _END) :]
    numbers = {"loss": sum(tail) / len(tail), "lowest": divergence.lowest, "max_logit": largest}
    fields: dict[str, Any] = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
    fields |= {**structs.asdict(place), "seconds": round(time.perf_counter() - started, 2)}
    return SweepRun(**fields, diverged=diverged, steps=len(losses), platform=_platform(device))


@cache
def _platform(device: str) -> Mapping[str, str | None]:
    """Return what of a machine can change the bits of a run."""
    platform = describe()
    told = {name: platform[name] for name in ("cpu", "level", "torch", "commit")}
    return {**told, "gpu": torch.cuda.get_device_name() if device == "cuda" else None}
