"""The verb `tiebreak lab sharpness`: how sharp the loss is around a GPT-2's logits, by the bits it was trained with.

Every run trains the small GPT-2 in one format, from one seed, and then goes on twice from the same state: in its format
and in another. Each run is a line in a file, and a program that is stopped goes on where it was.
"""

import argparse
import itertools
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor
from torch.nn import functional

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.platform import worker_count
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import Batches, DataError, Tokens, corpus, read_bin
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration, everywhere
from tiebreak.cases.gpt2.optimizers import Schedule
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.roster import composed_kernel
from tiebreak.laboratory.checkpoints import CHECKPOINT, CheckpointError, load
from tiebreak.laboratory.progress import Progress
from tiebreak.laboratory.ranks import Ranks
from tiebreak.laboratory.reduced import Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import SAME, add_attention, parse_attention, reduced_gpt2
from tiebreak.laboratory.sharpness import EPSILON, sharpness
from tiebreak.laboratory.training import Recipe, Training
from tiebreak.matrix.memory import keep_memory
from tiebreak.programs.resumable import add_options, expected, read_parts, run_parts
from tiebreak.reports.cli import Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.tables.run import counted

DONE, INTERRUPTED = 0, 130
TRAINED, ON, BACK = "trained", "on", "back"  # a run's phases
_WORKER_GIB = 1.0
_STEP_SECONDS = 0.045  # of one thread, until runs have told
_HELD_OUT = 10  # one part in this many of the text, its end, is not trained on
_WARM_UP = 100
_EPILOG = "exit codes: 0 done, 2 bad usage, file or checkpoint, 130 interrupted"


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


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: the verb's, those of the process by default.

    Returns:
        0 done, 2 on bad usage or a file of other settings, 130 after Ctrl-C.

    Raises:
        UsageError: in one line what is wrong.
    """
    options = _parser().parse_args(arguments)
    if find_spec("scipy") is None:
        raise UsageError("scipy searches the sharpest point: pip install 'tiebreak[sharpness]'")
    try:
        epsilons = _epsilons(options.eps)
        if options.folder is not None:
            print(_of_folder(options.folder, options.data, epsilons, options.held_out))
            return DONE
        return _of_runs(options, epsilons)
    except (ValueError, OSError, CheckpointError, DataError) as error:
        raise UsageError(str(error)) from error


def _of_runs(options: argparse.Namespace, epsilons: list[float]) -> int:
    settings = _settings(options, epsilons)
    names = [parse_reduction(name).name for name in split(options.formats)]
    tasks = [Task(settings, name, seed) for seed in range(1, options.seeds + 1) for name in dict.fromkeys(names)]
    found = _kept(options.out, settings)
    have = {(run.reduction, run.seed) for run in found}
    left = [task for task in tasks if (task.reduction, task.seed) not in have]
    workers = min(options.workers or worker_count(_WORKER_GIB), max(1, len(left)))
    each = (
        statistics.fmean(run.seconds for run in found)
        if found
        else _STEP_SECONDS * (settings.steps + settings.more * 2)
    )
    duration = expected(each * len(left) / workers)
    print(f"{counted(len(have), 'run')} kept, {len(left)} to run, {workers} at a time: {duration}", flush=True)
    try:
        run_parts(run_one, left, workers, options.out, _told, found)
    except KeyboardInterrupt:
        print(f"stopped; {options.out} has the runs that are done, and the same command goes on")
        return INTERRUPTED
    wanted = {(task.reduction, task.seed) for task in tasks}
    print(summary([run for run in found if (run.reduction, run.seed) in wanted], settings))
    return DONE


def _kept(path: Path, settings: Settings) -> list[Run]:
    """The runs that a file has.

    Raises:
        ValueError: they are of other settings, or none of this program's; one line.
    """
    found = read_parts(path, Run)
    for run in found:
        for name, value in asdict(settings).items():
            if run.settings.get(name) != value:
                told = f"{path}: was written with {name} = {run.settings.get(name)}, not {value}; name another --out"
                raise ValueError(told)
    return found


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
            found, at = _stretch(task, folder, phase, reduction)
            points += found
            exploded = at if phase == ON else exploded
    seconds = round(time.monotonic() - started, 1)
    return Run(asdict(settings), task.reduction, task.seed, seconds, exploded, [asdict(point) for point in points])


def _stretch(task: Task, folder: Path, phase: str, reduction: Reduction) -> tuple[list[Point], int | None]:
    """Train from the folder's checkpoint to the end, or to where a run's own format ends: points, and an explosion."""
    settings = task.settings
    told: dict[str, str | int | float] = {"seed": task.seed}
    sizes = replace(PRESETS["tiny"], vocabulary=len(corpus().vocabulary))
    model = _model(settings.kernel, sizes, task.seed)
    learnt, kept_apart = _texts(corpus().tokens, sizes, settings.held_out)
    schedule = Schedule(settings.steps + settings.more, settings.rate, _WARM_UP)
    batches = Batches(learnt, settings.sequences, sizes.context, task.seed)
    training = Training(model, batches, Recipe(schedule, "adamw", "fp32", parts=1), told, folder, Ranks())
    if phase != TRAINED:
        training.resume(load(folder, told))
    end = settings.steps if phase == TRAINED else schedule.steps
    reports = training.reports(settings.every, schedule.steps, lambda: training.done + 1 == end)
    points: list[Point] = []
    while True:
        with reduced_gpt2(model, reduction, attention=parse_attention(settings.attention)):
            progress = next(reports, None)
        if progress is None or training.exploded:
            return points, training.done if training.exploded else None
        points.append(_point(model, kept_apart, reduction, settings, phase, progress))


def _model(kernel: str, sizes: Configuration, seed: int) -> GPT2:
    declared = composed_kernel(kernel).declaration
    assert declared is not None
    return GPT2(sizes, everywhere(HeadKernel(declared), sizes), EMULATION.arithmetic, seed)


def _texts(tokens: Tokens, sizes: Configuration, sequences: int) -> tuple[Tokens, Tensor]:
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
    found = [
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
        *found,
    )


def _told(run: Run) -> str:
    named, trained = f"{run.reduction}, seed {run.seed}", [point for point in run.measured if point.phase == TRAINED]
    if run.exploded is not None or not trained:
        return f"{named}: exploded at step {run.exploded}"
    epsilon, found = next(iter(trained[-1].masked.items()))
    return f"{named}: held-out loss {trained[-1].held_out:.3f}, sharpness {found:.4f} % at epsilon {epsilon}"


def summary(runs: Sequence[Run], settings: Settings) -> str:
    """The tables, in Markdown: against steps, at the end of the stretch in a run's own format, and after it."""
    names = sorted({run.reduction for run in runs}, key=lambda name: (":" in name, name))
    of = {name: [run for run in runs if run.reduction == name] for name in names}
    parts = [_over_steps(of, settings), _at_the_end(of, settings)]
    if settings.more:
        parts.append(_gone_on(of, settings))
    return "\n\n".join(parts + [_order(each) for each in _groups(of, settings)])


def _values(runs: Sequence[Run], phase: str, step: int, of: Callable[[Point], float]) -> str:
    """Mean and standard deviation over seeds."""
    return _told_values(
        [of(point) for run in runs for point in run.measured if (point.phase, point.step) == (phase, step)]
    )


def _told_values(found: Sequence[float]) -> str:
    if not found:
        return "-"
    spread = f" ± {statistics.stdev(found):.2g}" if len(found) > 1 else ""
    return f"{statistics.fmean(found):.4g}{spread}"


def _table(rows: Iterable[Sequence[str]], head: Sequence[str], title: str) -> str:
    return f"{title}\n\n{tabulate(rows, head, tablefmt='pipe', disable_numparse=True)}"


def _over_steps(of: Mapping[str, Sequence[Run]], settings: Settings) -> str:
    first = f"{settings.epsilons[0]:g}"
    steps = range(settings.every, settings.steps + 1, settings.every)
    rows = [
        [name, str(len(runs)), *(_values(runs, TRAINED, step, lambda point: point.masked[first]) for step in steps)]
        for name, runs in of.items()
    ]
    title = f"Sharpness in per cent at epsilon {first} after so many steps, mean ± standard deviation over seeds"
    return _table(rows, ["format", "seeds", *map(str, steps)], title)


def _at_the_end(of: Mapping[str, Sequence[Run]], settings: Settings) -> str:
    columns: dict[str, Callable[[Point], float]] = {
        "held-out loss": lambda point: point.held_out,
        "norm of W_Q": lambda point: point.w_q,
        "mean logit magnitude": lambda point: point.logit,
    }
    for epsilon in settings.epsilons:
        columns[f"eps {epsilon:g}"] = lambda point, key=f"{epsilon:g}": point.masked[key]  # type: ignore[misc]
    first = f"{settings.epsilons[0]:g}"
    columns[f"eps {first}, logits in fp32"] = lambda point: point.unmasked[first]
    rows = [
        [
            name,
            *(_values(runs, TRAINED, settings.steps, column) for column in columns.values()),
            _against(runs, of.get(settings.back, ()), settings),
        ]
        for name, runs in of.items()
    ]
    head = ["format", *columns, f"eps {first}, in per cent of {settings.back}'s"]
    return _table(rows, head, f"After {settings.steps} steps")


def _against(runs: Sequence[Run], others: Sequence[Run], settings: Settings) -> str:
    """Sharpness at the end in per cent of the other format's at the same seed, so with the same batches."""
    own, other = _at_end(runs, settings), _at_end(others, settings)
    shares = [100 * own[seed] / other[seed] for seed in own.keys() & other.keys()]
    return _told_values(shares)


def _at_end(runs: Sequence[Run], settings: Settings) -> dict[int, float]:
    """Sharpness by seed at the end of the stretch in a run's own format."""
    first = f"{settings.epsilons[0]:g}"
    points = ((run.seed, point) for run in runs for point in run.measured)
    return {
        seed: point.masked[first] for seed, point in points if (point.phase, point.step) == (TRAINED, settings.steps)
    }


def _gone_on(of: Mapping[str, Sequence[Run]], settings: Settings) -> str:
    first, end = f"{settings.epsilons[0]:g}", settings.steps + settings.more
    rows = []
    for name, runs in of.items():
        masked = [_values(runs, phase, end, lambda point: point.masked[first]) for phase in (ON, BACK)]
        unmasked = [_values(runs, phase, end, lambda point: point.unmasked[first]) for phase in (ON, BACK)]
        losses = [_values(runs, phase, end, lambda point: point.held_out) for phase in (ON, BACK)]
        rows.append([name, *masked, *unmasked, *losses])
    places = ("on in it", f"in {settings.back}")
    head = [f"{what}, {place}" for what in ("sharpness", "logits in fp32", "held-out loss") for place in places]
    return _table(rows, ["format", *head], f"After {settings.more} more steps, from one state")


def _groups(of: Mapping[str, Sequence[Run]], settings: Settings) -> Iterator[dict[str, dict[int, float]]]:
    """Sharpness at the end by format and seed, of each way to mask, beside the format that training goes back to."""
    for suffix in sorted({name.partition(":")[2] for name in of}):
        alike = {name: runs for name, runs in of.items() if name.partition(":")[2] == suffix or name == settings.back}
        group = {name: ends for name, runs in alike.items() if (ends := _at_end(runs, settings))}
        if len(group) > 1:
            yield group


def _order(group: Mapping[str, Mapping[int, float]]) -> str:
    """Which is sharper, by mean, and in how many seeds each step of that order is seen."""
    ranked = sorted(group, key=lambda name: -statistics.fmean(group[name].values()))
    told = [ranked[0]] if ranked else []
    for sharper, flatter in itertools.pairwise(ranked):
        both = set(group[sharper]) & set(group[flatter])
        seen = sum(group[sharper][seed] > group[flatter][seed] for seed in both)
        told.append(f"> ({seen} of {len(both)} seeds) {flatter}")
    return "Order: " + " ".join(told)


def _of_folder(folder: Path, data: Path | None, epsilons: list[float], sequences: int) -> str:
    """The sharpness of a run of `tiebreak lab train`, its logits computed in fp32."""
    if not (folder / CHECKPOINT).is_file():
        raise UsageError(f"{folder}: no {CHECKPOINT} in it; tiebreak lab train --out DIR writes one")
    checkpoint = load(folder, {})
    try:
        sizes = Configuration(**{each.name: checkpoint.run[each.name] for each in fields(Configuration)})  # type: ignore[arg-type]
        model = _model("flash@fp32", sizes, 0)
        model.load_state_dict(checkpoint.model)
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"{folder / CHECKPOINT}: none of tiebreak lab train's ({type(error).__name__})") from error
    tokens = corpus().tokens if data is None else read_bin(data, sizes.vocabulary, sizes.context)
    text = _texts(tokens, sizes, sequences)[1]
    with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
        logits = model(text[:, :-1], 0)[:, -1]
    loss = functional.cross_entropy(logits, text[:, -1]).item()
    rows = [(f"{epsilon:g}", f"{sharpness(logits, text[:, -1], epsilon):.4g}") for epsilon in epsilons]
    title = f"{folder} after {counted(checkpoint.step, 'step')}: loss of the last tokens of {sequences} sequences"
    title += f" {loss:.3f}"
    return _table(rows, ("epsilon", "sharpness in per cent"), title)


def _settings(options: argparse.Namespace, epsilons: list[float]) -> Settings:
    for name in ("steps", "every", "seeds", "sequences", "held_out", "workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if options.more < 0 or options.steps % options.every or options.more % options.every:
        raise UsageError(
            f"--steps {options.steps} and --more {options.more} must be multiples of --every {options.every}"
        )
    if not (math.isfinite(options.rate) and options.rate > 0):
        raise UsageError(f"--rate must be above 0, not {options.rate}")
    if composed_kernel(options.kernel).declaration is None:
        raise UsageError(f"--kernel {options.kernel}: only a declared kernel can be put in other formats")
    return Settings(
        options.kernel,
        SAME if (attention := parse_attention(options.attention)) is None else attention.name,
        options.steps,
        options.more,
        parse_reduction(options.back).name,
        options.every,
        options.rate,
        options.sequences,
        options.held_out,
        epsilons,
    )


def _epsilons(text: str) -> list[float]:
    try:
        found = [float(each) for each in split(text)]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(each) and each > 0 for each in found):
        raise UsageError(f"--eps {text}: expected numbers above 0, such as {EPSILON},1e-3")
    return found


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak lab sharpness",
        description="Train the small GPT-2 in several formats and measure how sharp the loss is around its logits; or"
        " measure a run of tiebreak lab train.",
        epilog=_EPILOG,
    )
    parser.add_argument("folder", nargs="?", type=Path, help="of a run of tiebreak lab train; its logits are fp32's")
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="with a folder: the run's; default: the text that ships"
    )
    parser.add_argument(
        "--formats",
        default="E8M3:zero,E8M4:zero,E8M5:zero,E8M6:zero,E8M7",
        metavar="LIST",
        help="of linear layers' products, E8M5 to even or, as the paper does, E8M5:zero cut off; default: %(default)s",
    )
    for flag, default, told in (
        ("--steps", 1000, "in a run's own format"),
        ("--more", 250, "steps that follow, in it and, from the same state, in --back; 0: none"),
        ("--every", 250, "steps between two measurements"),
        ("--seeds", 3, "of weights and batches, from 1"),
        ("--sequences", 8, "of a batch"),
        ("--held-out", 64, "sequences that are measured on"),
    ):
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{told}; default: {default}")
    parser.add_argument("--back", default="E8M7", metavar="FORMAT", help="what training goes back to; default: E8M7")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's highest learning rate; default: 1e-3")
    parser.add_argument("--kernel", default="flash@fused", metavar="NAME", help="of attention; default: flash@fused")
    add_attention(parser)
    parser.add_argument(
        "--eps", default="5e-4,5e-5,1e-4", metavar="LIST", help="sizes of the box; default: %(default)s"
    )
    add_options(parser, "sharpness.jsonl", "run")
    return parser
