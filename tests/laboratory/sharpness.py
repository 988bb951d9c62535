"""The verb `tiebreak lab sharpness`: how sharp the loss is around a GPT-2's logits, by the bits it was trained with.

Lee et al., To FP8 and Back Again (arXiv 2405.18710), equations 1 and 2: Keskar et al.'s sharpness (arXiv 1609.04836) of
the logits of the last token, in place of the weights. A run trains the small GPT-2 in one format from one seed, and
then goes on twice from the same state: in its format and in another. Each run is a line in a file, and a program that
is stopped goes on where it was.
"""

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tiebreak.cases.gpt2.data import Batches, Tokens, corpus, read_bin
from tiebreak.cases.gpt2.model import PRESETS, Configuration
from tiebreak.cases.gpt2.optimizers import Schedule
from tiebreak.kernels.formats import FP32
from tiebreak.laboratory.options import (
    ATTENTION,
    FOLDER,
    NAME,
    NUMBER,
    RATE,
    Options,
    above_zero,
    checked,
    comma_list,
    emulated_kernel,
    parser,
    reduction_name,
)
from tiebreak.laboratory.progress import Divergence
from tiebreak.laboratory.ranks import Ranks
from tiebreak.laboratory.reduced import Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import emulated_gpt2, parse_attention, reduced_gpt2
from tiebreak.laboratory.training import CHECKPOINT, Recipe, Steps, load
from tiebreak.matrix.memory import keep_memory
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import HELD, INTERRUPTED, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted

_WORKER_GIB = 1.0
_STEP_SECONDS = 0.045  # of one thread, until there are runs
_EPILOG = "exit codes: 0 done, 2 bad usage, file or checkpoint, 130 interrupted"
TRAINED, ON, BACK = "trained", "on", "back"  # a run's phases
_HELD_OUT = 10  # one part in this many of the text, its end, is not trained on
_WARM_UP = 100


_OPTIONS: Options = {
    "folder": {"nargs": "?", "type": Path, "help": "of a run of tiebreak lab train; its logits are fp32's"},
    "--data": {**FOLDER, "help": "with a folder: the run's; default: the text that ships"},
    "--formats": {
        "type": comma_list("format", reduction_name),
        "metavar": "LIST",
        "default": "E8M3:zero,E8M4:zero,E8M5:zero,E8M6:zero,E8M7",
        "help": "of linear layers' products, E8M5 to even or, as the paper does, E8M5:zero cut off",
    },
    "--steps": {**NUMBER, "default": 1000, "help": "in a run's own format"},
    "--more": {
        **NUMBER,
        "type": count,
        "default": 250,
        "help": "steps that follow, in it and, from the same state, in --back; 0: none",
    },
    "--every": {**NUMBER, "default": 250, "help": "steps between two measurements"},
    "--seeds": {**NUMBER, "default": 3, "help": "of weights and batches, from 1"},
    "--sequences": {**NUMBER, "default": 8, "help": "of a batch"},
    "--held-out": {**NUMBER, "default": 64, "help": "sequences that are measured on"},
    "--back": {"type": checked(reduction_name), "default": "E8M7", "help": "format that training goes back to"},
    "--rate": {**RATE, "default": 1e-3, "help": "AdamW's highest learning rate"},
    "--kernel": {**NAME, "type": checked(emulated_kernel), "default": "flash@fused", "help": "of attention"},
    **ATTENTION,
    "--eps": {
        "type": comma_list("size", above_zero),
        "metavar": "LIST",
        "default": "5e-4,5e-5,1e-4",
        "help": "sizes of the box",
    },
}


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
        return [Point(**point) for point in self.points]

    def at(self, phase: str, step: int) -> Iterator[Point]:
        """What was measured then: one point, or none where the run exploded before."""
        return (point for point in self.measured if (point.phase, point.step) == (phase, step))


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
    points, divergence = list[Point](), Divergence()
    exploded = _take(settings, steps, range(settings.steps), own, divergence, points, TRAINED, kept_apart)
    state = deepcopy((model.state_dict(), steps.optimizers[0].state_dict(), divergence))
    # A run in the other format already has nothing to go back to.
    phases = ((ON, own), *(((BACK, other),) if own != other else ())) if settings.more and exploded is None else ()
    for phase, reduction in phases:
        weights, moments, divergence = deepcopy(state)
        model.load_state_dict(weights)
        steps.optimizers[0].load_state_dict(moments)
        span = range(settings.steps, settings.steps + settings.more)
        end = _take(settings, steps, span, reduction, divergence, points, phase, kept_apart)
        exploded = end if phase == ON else exploded
    seconds = round(time.monotonic() - started, 1)
    return Run(asdict(settings), task.reduction, task.seed, seconds, exploded, [asdict(point) for point in points])


def _take(
    settings: Settings,
    steps: Steps,
    span: range,
    reduction: Reduction,
    divergence: Divergence,
    points: list[Point],
    phase: str,
    text: Tensor,
) -> int | None:
    """Take steps in one format, and measure every so many of them; return the step at which the loss exploded."""
    model, attention = steps.model, parse_attention(settings.attention)
    for start in span[:: settings.every]:
        loss = math.nan
        with reduced_gpt2(model, reduction, attention=attention):
            for step in range(start, start + settings.every):
                loss = steps.take(step, []).loss
                if divergence.after(loss) is not None:
                    return step + 1
            with torch.no_grad():
                masked = model(text[:, :-1], 0)
        with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
            unmasked = model(text[:, :-1], 0)[:, -1]
        norms = [model.block(layer).wq.weight.norm().item() for layer in range(model.configuration.layers)]
        sharp = [
            {f"{epsilon:g}": sharpness(logits, text[:, -1], epsilon) for epsilon in settings.epsilons}
            for logits in (masked[:, -1], unmasked)
        ]
        held_out = functional.cross_entropy(masked.flatten(0, 1), text[:, 1:].flatten()).item()
        logit = masked[:, -1].abs().mean().item()
        done = start + settings.every
        points.append(Point(phase, done, loss, held_out, statistics.fmean(norms), logit, *sharp))
    return None


def texts(tokens: Tokens, sizes: Configuration, sequences: int) -> tuple[Tokens, Tensor]:
    """Return what is trained on, and sequences of the rest with their target: int64 (sequences, context + 1)."""
    end = len(tokens) - len(tokens) // _HELD_OUT
    starts = np.linspace(end, len(tokens) - sizes.context - 1, sequences).astype(int)
    return tokens[:end], torch.from_numpy(
        np.stack([tokens[at : at + sizes.context + 1] for at in starts]).astype(np.int64)
    )


def sharpness(logits: Tensor, targets: Tensor, epsilon: float) -> float:
    """Return the rise of the mean loss f over one plus the loss, in per cent: 100 (max f(y + z) - f(y)) / (1 + f(y)).

    z runs over the box ``|z_i| <= epsilon (|y_i| + 1)`` and L-BFGS-B finds the maximum, from z = 0 with scipy's own
    settings. One z for every sequence: their maxima don't depend on each other, and are searched for at once.

    Args:
        logits: y, of the last token of every sequence, (sequences, vocabulary).
        targets: the tokens that follow, int64 (sequences,).
        epsilon: size of the box.

    Raises:
        ValueError: logits that are not finite, or a box without size.
    """
    y = logits.detach().double().cpu()
    if not bool(torch.isfinite(y).all()):
        raise ValueError("the logits have NaN or Inf: there is no loss to rise")
    if not epsilon > 0:
        raise ValueError(f"epsilon must be above 0, not {epsilon}")
    optimize = import_module("scipy.optimize")  # an extra, and slow to import

    def fallen(z: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        """What the minimiser takes: the loss, summed, times -1, and its gradient."""
        moved = (y + torch.from_numpy(z).view_as(y)).requires_grad_()
        with torch.enable_grad():
            loss = -functional.cross_entropy(moved, targets.cpu(), reduction="sum")
        (gradient,) = torch.autograd.grad(loss, moved)
        return loss.item(), gradient.flatten().numpy()

    start, box = np.zeros(y.numel()), (epsilon * (y.abs() + 1.0)).flatten().numpy()
    bounds = optimize.Bounds(-box, box)
    minimum = optimize.minimize(fallen, start, jac=True, method="L-BFGS-B", bounds=bounds)
    before, after = -fallen(start)[0] / len(y), -float(minimum.fun) / len(y)
    return 100.0 * (after - before) / (1.0 + before)


def main(argv: Sequence[str]) -> int:
    """Measure sharpness; 0 done, 130 after Ctrl-C. UsageError: in one line what is wrong."""
    made = parser(
        "sharpness",
        "Train the small GPT-2 in several formats and measure how sharp the loss is around its logits; or measure a\n"
        "run of tiebreak lab train.",
        _EPILOG,
        measurement=_OPTIONS,
    )
    add_options(made, "sharpness.jsonl", "run")
    options = made.parse_args(argv)
    if find_spec("scipy") is None:
        raise UsageError("scipy searches the sharpest point: pip install 'tiebreak[sharpness]'")
    try:
        if options.folder is None:
            return _of_runs(options)
        print(_of_folder(options))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return HELD


def _of_runs(options: argparse.Namespace) -> int:
    if options.steps % options.every or options.more % options.every:
        raise UsageError(
            f"--steps {options.steps} and --more {options.more} must be multiples of --every {options.every}"
        )
    given = {"epsilons": list(options.eps), **vars(options)}
    settings = Settings(**{each.name: given[each.name] for each in fields(Settings)})
    tasks = [Task(settings, name, seed) for seed in range(1, options.seeds + 1) for name in options.formats]
    runs = _kept(options.out, settings)
    have = {(run.reduction, run.seed) for run in runs}
    left = [task for task in tasks if (task.reduction, task.seed) not in have]
    each = _STEP_SECONDS * (settings.steps + settings.more * 2)
    each = statistics.fmean(run.seconds for run in runs) if runs else each
    outlook, seconds = f"{counted(len(have), 'run')} kept, {len(left)} to run", each * len(left)
    if not run_parts(run_one, left, options, _line, runs, outlook=outlook, seconds=seconds, gib=_WORKER_GIB):
        return INTERRUPTED
    wanted = {(task.reduction, task.seed) for task in tasks}
    print(summary([run for run in runs if (run.reduction, run.seed) in wanted], settings))
    return HELD


def _kept(path: Path, settings: Settings) -> list[Run]:
    """Return the runs that a file has; ValueError: of other settings, or none of this program's."""
    runs = read_parts(path, Run)
    for run in runs:
        for name, asked in asdict(settings).items():
            if (kept := run.settings.get(name)) != asked:
                raise ValueError(f"{path}: was written with {name} = {kept}, not {asked}; name another --out")
    return runs


def _line(run: Run) -> str:
    named, trained = f"{run.reduction}, seed {run.seed}", [point for point in run.measured if point.phase == TRAINED]
    if run.exploded is not None or not trained:
        return f"{named}: exploded at step {run.exploded}"
    epsilon, per_cent = next(iter(trained[-1].masked.items()))
    return f"{named}: held-out loss {trained[-1].held_out:.3f}, sharpness {per_cent:.4f} % at epsilon {epsilon}"


def _of_folder(options: argparse.Namespace) -> str:
    """Return the sharpness of a run of `tiebreak lab train`, its logits computed in fp32."""
    folder, sequences = options.folder, options.held_out
    if not (folder / CHECKPOINT).is_file():
        raise UsageError(f"{folder}: no {CHECKPOINT} in it; tiebreak lab train --out DIR writes one")
    checkpoint = load(folder, {})
    try:
        sizes = Configuration(**{each.name: checkpoint["run"][each.name] for each in fields(Configuration)})
        model = emulated_gpt2("flash@fp32", sizes, 0)
        model.load_state_dict(checkpoint["model"])
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"{folder / CHECKPOINT}: none of tiebreak lab train's ({type(error).__name__})") from error
    tokens = corpus().tokens if options.data is None else read_bin(options.data, sizes.vocabulary, sizes.context)
    text = texts(tokens, sizes, sequences)[1]
    with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
        logits = model(text[:, :-1], 0)[:, -1]
    loss = functional.cross_entropy(logits, text[:, -1]).item()
    rows = [(f"{epsilon:g}", f"{sharpness(logits, text[:, -1], epsilon):.4g}") for epsilon in options.eps]
    title = f"{folder} after {counted(checkpoint['step'], 'step')}: loss of the last tokens of {sequences} sequences"
    return grids.text([Grid(("epsilon", "sharpness in per cent"), rows, f"{title} {loss:.3f}")], "github")


def summary(runs: Sequence[Run], settings: Settings) -> str:
    """Return what the runs came to, in Markdown: over the steps in their own format, at their end, and after it."""
    first, end = f"{settings.epsilons[0]:g}", settings.steps + settings.more
    names = sorted({run.reduction for run in runs}, key=lambda name: (":" in name, name))
    of = {name: [run for run in runs if run.reduction == name] for name in names}
    ends = {
        name: {run.seed: point.masked[first] for run in own for point in run.at(TRAINED, settings.steps)}
        for name, own in of.items()
    }

    def cells(name: str, phase: str, step: int, *columns: Callable[[Point], float]) -> list[str]:
        points = [point for run in of[name] for point in run.at(phase, step)]
        return [_mean_and_spread(list(map(column, points))) for column in columns]

    def against(name: str) -> str:
        """In per cent of the other format's at the same seed, so with the same batches."""
        other = ends.get(settings.back, {})
        return _mean_and_spread([100 * own / other[seed] for seed, own in ends[name].items() if seed in other])

    steps = range(settings.every, settings.steps + 1, settings.every)
    head = ["format", "seeds", *map(str, steps)]
    rows = [
        [name, str(len(own)), *(cell for step in steps for cell in cells(name, TRAINED, step, _masked(first)))]
        for name, own in of.items()
    ]
    parts: list[Part] = [
        Grid(head, rows, f"Sharpness in per cent at epsilon {first} after so many steps, mean ± standard deviation")
    ]
    columns: dict[str, Callable[[Point], float]] = {
        "held-out loss": lambda point: point.held_out,
        "norm of W_Q": lambda point: point.w_q,
        "mean logit magnitude": lambda point: point.logit,
        **{f"eps {epsilon:g}": _masked(f"{epsilon:g}") for epsilon in settings.epsilons},
        f"eps {first}, logits in fp32": lambda point: point.unmasked[first],
    }
    head = ["format", *columns, f"eps {first}, in per cent of {settings.back}'s"]
    rows = [[name, *cells(name, TRAINED, settings.steps, *columns.values()), against(name)] for name in names]
    parts.append(Grid(head, rows, f"After {settings.steps} steps"))
    if settings.more:
        gone_on: dict[str, Callable[[Point], float]] = {
            "sharpness": _masked(first),
            "logits in fp32": lambda point: point.unmasked[first],
            "held-out loss": lambda point: point.held_out,
        }
        places = {ON: "on in it", BACK: f"in {settings.back}"}
        head = ["format", *(f"{what}, {place}" for what in gone_on for place in places.values())]
        rows = [
            [
                name,
                *(cell for column in gone_on.values() for phase in places for cell in cells(name, phase, end, column)),
            ]
            for name in names
        ]
        parts.append(Grid(head, rows, f"After {settings.more} more steps, from one state"))
    for suffix in sorted({name.partition(":")[2] for name in of}):  # each way to mask
        alike = [name for name in names if name.partition(":")[2] == suffix or name == settings.back]
        group = {name: ends[name] for name in alike if ends[name]}
        if len(group) > 1:
            parts.append(_order(group))
    return grids.text(parts, "github")


def _masked(epsilon: str) -> Callable[[Point], float]:
    return lambda point: point.masked[epsilon]


def _mean_and_spread(values: Sequence[float]) -> str:
    if not values:
        return "-"
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4g}{spread}"


def _order(group: Mapping[str, Mapping[int, float]]) -> str:
    """Which is sharper, by mean, and in how many seeds each step of that order is seen."""
    ranked = sorted(group, key=lambda name: -statistics.fmean(group[name].values()))
    order = ranked[0]
    for sharper, flatter in itertools.pairwise(ranked):
        both = set(group[sharper]) & set(group[flatter])
        seen = sum(group[sharper][seed] > group[flatter][seed] for seed in both)
        order += f" > ({seen} of {len(both)} seeds) {flatter}"
    return f"Order: {order}"
