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
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from tiebreak.cases.gpt2.data import Batches, Tokens, corpus
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration
from tiebreak.kernels.formats import FP32
from tiebreak.laboratory import flags
from tiebreak.laboratory.reduced import Reduction, emulated_gpt2, parse_attention, parse_reduction, reduced_gpt2
from tiebreak.laboratory.resumable import add_options, read_parts, run_parts
from tiebreak.laboratory.tokens import read_bin
from tiebreak.laboratory.training import CHECKPOINT, Divergence, Recipe, Schedule, Steps, load
from tiebreak.matrix.memory import keep_memory
from tiebreak.reports.cli import INTERRUPTED, PASSED, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.order import grouped
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted

_WORKER_GIB = 1.0
_STEP_SECONDS = 0.045  # of one thread, until there are runs
_ABOUT = """Train the small GPT-2 in several formats and measure how sharp the loss is around its logits; or measure a
run of tiebreak lab train."""
_EPILOG = "exit codes: 0 done, 2 bad usage, file or checkpoint, 130 interrupted"
TRAINED, ON, BACK = "trained", "on", "back"  # a run's phases
_HELD_OUT = 10  # one part in this many of the text, its end, is not trained on
_WARM_UP = 100


_OPTIONS: flags.Options = {
    "folder": {"nargs": "?", "type": Path, "help": "of a run of tiebreak lab train; its logits are fp32's"},
    "--data": {**flags.FOLDER, "help": "with a folder: the run's; default: the text that ships"},
    "--formats": flags.formats("E8M3:rtz,E8M4:rtz,E8M5:rtz,E8M6:rtz,E8M7"),
    "--steps": {**flags.NUMBER, "default": 1000, "help": "in a run's own format"},
    "--more": {**flags.NUMBER, "type": count, "default": 250, "help": "steps on, and from the same state in --back"},
    "--every": {**flags.NUMBER, "default": 250, "help": "steps between two measurements"},
    "--seeds": {**flags.NUMBER, "default": 3, "help": "of weights and batches, from 1"},
    "--sequences": {**flags.NUMBER, "default": 8, "help": "of a batch"},
    "--held-out": {**flags.NUMBER, "default": 64, "help": "sequences that are measured on"},
    "--back": {"type": flags.checked(flags.reduction_name), "default": "E8M7", "help": "format to go back to"},
    "--rate": {**flags.RATE, "default": 1e-3},
    "--kernel": {
        **flags.NAME,
        "type": flags.checked(flags.emulated_kernel),
        "default": "flash@fused",
        "help": "of attention",
    },
    **flags.ATTENTION,
    "--eps": {**flags.comma_list("size", flags.above_zero, "5e-4,5e-5,1e-4", "sizes of the box"), "dest": "epsilons"},
}
# What all runs of a file have in common.
_SETTINGS = ("kernel", "attention", "steps", "more", "back", "every", "rate", "sequences", "held_out", "epsilons")


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

    settings: dict[str, Any]  # by name: _SETTINGS
    reduction: str
    seed: int
    seconds: float  # it took
    exploded: int | None  # the step at which its loss did; None: it did not
    points: list[Point]

    def at(self, phase: str, step: int) -> list[Point]:
        """Return what was measured then: one point, or none where the run exploded before."""
        return [point for point in self.points if (point.phase, point.step) == (phase, step)]


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options; UsageError: in one line what is wrong."""
    made = flags.parser("sharpness", _ABOUT, _EPILOG, measurement=_OPTIONS)
    add_options(made, "sharpness.jsonl", "run")
    options = made.parse_args(argv)
    every = options.every
    if options.steps % every or options.more % every:
        raise UsageError(f"--steps {options.steps} and --more {options.more} must be multiples of --every {every}")
    return options


def settings(options: argparse.Namespace) -> dict[str, Any]:
    """Return what a run has in common with others of its file, as JSON has it."""
    return {name: getattr(options, name) for name in _SETTINGS} | {"epsilons": list(options.epsilons)}


def run_one(options: argparse.Namespace, what: tuple[str, int]) -> Run:
    """Do the run of a format and a seed on one thread: trained in it, then on in it, and from there on in the other."""
    torch.set_num_threads(1)
    keep_memory()
    started, (name, seed) = time.monotonic(), what
    sizes = replace(PRESETS["tiny"], vocabulary=len(corpus().vocabulary))
    learnt, held_out = texts(corpus().tokens, sizes, options.held_out)
    model = emulated_gpt2(options.kernel, sizes, seed)
    recipe = Recipe(Schedule(options.steps + options.more, options.rate, _WARM_UP))
    steps = Steps(model, Batches(learnt, options.sequences, sizes.context, seed), recipe)
    divergence = Divergence()
    points, exploded = _take(options, name, TRAINED, steps, divergence, held_out)
    state = deepcopy((model.state_dict(), steps.optimizers[0].state_dict(), divergence))
    # A run in the other format already has nothing to go back to.
    phases = (ON,) if name == options.back else (ON, BACK)
    for phase in phases if options.more and exploded is None else ():
        weights, moments, divergence = deepcopy(state)
        model.load_state_dict(weights)
        steps.optimizers[0].load_state_dict(moments)
        more, end = _take(options, options.back if phase == BACK else name, phase, steps, divergence, held_out)
        points += more
        exploded = end if phase == ON else exploded
    seconds = round(time.monotonic() - started, 1)
    return Run(settings(options), name, seed, seconds, exploded, points)


def _take(
    options: argparse.Namespace, name: str, phase: str, steps: Steps, divergence: Divergence, text: Tensor
) -> tuple[list[Point], int | None]:
    """Take a phase's steps in a format, and measure every so many of them; return the step of an explosion, too."""
    model, reduction, points = steps.model, parse_reduction(name), list[Point]()
    span = range(options.steps) if phase == TRAINED else range(options.steps, options.steps + options.more)
    for start in span[:: options.every]:
        loss, done = math.nan, start + options.every
        with reduced_gpt2(model, reduction, attention=parse_attention(options.attention)):
            for step in range(start, done):
                loss = steps.take(step, []).loss
                if divergence.after(loss) is not None:
                    return points, step + 1
            with torch.no_grad():
                masked = model(text[:, :-1], 0)
        norms = [model.block(layer).wq.weight.norm().item() for layer in range(model.configuration.layers)]
        sharp = [
            {f"{epsilon:g}": sharpness(logits, text[:, -1], epsilon) for epsilon in options.epsilons}
            for logits in (masked[:, -1], _logits_in_fp32(model, text))
        ]
        held_out = functional.cross_entropy(masked.flatten(0, 1), text[:, 1:].flatten()).item()
        logit = masked[:, -1].abs().mean().item()
        points.append(Point(phase, done, loss, held_out, statistics.fmean(norms), logit, *sharp))
    return points, None


def _logits_in_fp32(model: GPT2, text: Tensor) -> Tensor:
    with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
        logits: Tensor = model(text[:, :-1], 0)[:, -1]
    return logits


def texts(tokens: Tokens, sizes: Configuration, sequences: int) -> tuple[Tokens, Tensor]:
    """Return what is trained on, and sequences of the rest with their target: int64 (sequences, context + 1)."""
    end = len(tokens) - len(tokens) // _HELD_OUT
    starts = np.linspace(end, len(tokens) - sizes.context - 1, sequences).astype(int)
    rest = np.stack([tokens[at : at + sizes.context + 1] for at in starts])
    return tokens[:end], torch.from_numpy(rest.astype(np.int64))


def sharpness(logits: Tensor, targets: Tensor, epsilon: float) -> float:
    """Return the rise of the mean loss f over one plus the loss, in per cent: 100 (max f(y + z) - f(y)) / (1 + f(y)).

    z runs over the box ``|z_i| <= epsilon (|y_i| + 1)`` and L-BFGS-B finds the maximum, from z = 0 with scipy's own
    settings. One z for every sequence: their maxima don't depend on each other, and are searched for at once.

    Args:
        logits: y, of the last token of every sequence, (sequences, vocabulary).
        targets: the tokens that follow, int64 (sequences,).
        epsilon: size of the box, above 0.
    """
    y = logits.detach().cpu().double()
    if not bool(torch.isfinite(y).all()):
        raise ValueError("the logits have NaN or Inf: there is no loss to rise")
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
    options = parse(argv)
    if find_spec("scipy") is None:
        raise UsageError("scipy searches the sharpest point: pip install 'tiebreak[sharpness]'")
    try:
        if options.folder is None:
            return _of_runs(options)
        print(_of_folder(options))
    except (ValueError, OSError) as error:
        raise UsageError(str(error)) from error
    return PASSED


def _of_runs(options: argparse.Namespace) -> int:
    runs = read_parts(options.out, Run)
    for run, (name, asked) in itertools.product(runs, settings(options).items()):
        if (kept := run.settings.get(name)) != asked:
            raise ValueError(f"{options.out}: was written with {name} = {kept}, not {asked}; name another --out")
    wanted = [(name, seed) for seed in range(1, options.seeds + 1) for name in options.formats]
    have = {(run.reduction, run.seed) for run in runs}
    left = [each for each in wanted if each not in have]
    spent = [run.seconds for run in runs] or [_STEP_SECONDS * (options.steps + options.more * 2)]
    if not run_parts(partial(run_one, options), left, options, _line, runs, spent=spent, gib=_WORKER_GIB):
        return INTERRUPTED
    print(summary([run for run in runs if (run.reduction, run.seed) in wanted], options))
    return PASSED


def _line(run: Run) -> str:
    named, trained = f"{run.reduction}, seed {run.seed}", [point for point in run.points if point.phase == TRAINED]
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
    logits = _logits_in_fp32(model, text)
    loss = functional.cross_entropy(logits, text[:, -1]).item()
    rows = [(f"{epsilon:g}", f"{sharpness(logits, text[:, -1], epsilon):.4g}") for epsilon in options.epsilons]
    title = f"{folder} after {counted(checkpoint['step'], 'step')}: loss of the last tokens of {sequences} sequences"
    return grids.text([Grid(("epsilon", "sharpness in per cent"), rows, f"{title} {loss:.3f}")], "github")


def summary(runs: Sequence[Run], options: argparse.Namespace) -> str:
    """Return what the runs came to, in Markdown: over the steps in their own format, at their end, and after it."""
    first, last, end, back = f"{options.epsilons[0]:g}", options.steps, options.steps + options.more, options.back
    of = grouped(sorted(runs, key=lambda run: (":" in run.reduction, run.reduction)), lambda run: run.reduction)
    ends = {
        name: {run.seed: point.masked[first] for run in own for point in run.at(TRAINED, last)}
        for name, own in of.items()
    }

    def at(phase: str, step: int, value: Callable[[Point], float]) -> Callable[[str], str]:
        return lambda name: _mean_and_spread([value(point) for run in of[name] for point in run.at(phase, step)])

    def against(name: str) -> str:
        """In per cent of the other format's at the same seed, so with the same batches."""
        other = ends.get(back, {})
        return _mean_and_spread([100 * own / other[seed] for seed, own in ends[name].items() if seed in other])

    gone_on: dict[str, Callable[[Point], float]] = {
        "sharpness": _sharp(first),
        "logits in fp32": _sharp(first, "unmasked"),
        "held-out loss": attrgetter("held_out"),
    }
    places = {"on in it": ON, f"in {back}": BACK}
    # By title, and then by heading: what a format's cell says.
    tables: dict[str, dict[str, Callable[[str], str]]] = {
        f"Sharpness in per cent at epsilon {first} after so many steps, mean ± standard deviation": {
            "seeds": lambda name: str(len(of[name])),
            **{str(n): at(TRAINED, n, _sharp(first)) for n in range(options.every, last + 1, options.every)},
        },
        f"After {last} steps": {
            "held-out loss": at(TRAINED, last, attrgetter("held_out")),
            "norm of W_Q": at(TRAINED, last, attrgetter("w_q")),
            "mean logit magnitude": at(TRAINED, last, attrgetter("logit")),
            **{f"eps {name:g}": at(TRAINED, last, _sharp(f"{name:g}")) for name in options.epsilons},
            f"eps {first}, logits in fp32": at(TRAINED, last, _sharp(first, "unmasked")),
            f"eps {first}, in per cent of {back}'s": against,
        },
        f"After {options.more} more steps, from one state": {
            f"{what}, {place}": at(phase, end, value)
            for what, value in gone_on.items()
            for place, phase in places.items()
        },
    }
    parts: list[Part] = [
        Grid(["format", *columns], [[name, *(cell(name) for cell in columns.values())] for name in of], title)
        for title, columns in list(tables.items())[: 3 if options.more else 2]
    ]
    for suffix in sorted({name.partition(":")[2] for name in of}):  # each way to mask
        group = {name: own for name, own in ends.items() if own and (name.partition(":")[2] == suffix or name == back)}
        if len(group) > 1:
            parts.append(_order(group))
    return grids.text(parts, "github")


def _sharp(epsilon: str, logits: str = "masked") -> Callable[[Point], float]:
    return lambda point: float(getattr(point, logits)[epsilon])


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
