"""The verb `tiebreak lab sharpness`: how sharp the loss is around a GPT-2's logits, by the bits it was trained with.

Each run is a line in a file, and a program that is stopped goes on where it was.
"""

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn import functional

from tiebreak.cases.gpt2.data import corpus, read_bin
from tiebreak.cases.gpt2.model import Configuration
from tiebreak.kernels.formats import FP32
from tiebreak.laboratory.options import (
    ATTENTION,
    RATE,
    Options,
    above_zero,
    checked,
    comma_list,
    emulated_kernel,
    parser,
    takes_folder,
    takes_name,
    takes_number,
)
from tiebreak.laboratory.reduced import Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import emulated_gpt2, reduced_gpt2
from tiebreak.laboratory.sharpness_run import TRAINED, Run, Settings, Task, run_one, sharpness, texts
from tiebreak.laboratory.sharpness_tables import summary, table
from tiebreak.laboratory.training import CHECKPOINT, load
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import HELD, INTERRUPTED, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.tables.run import counted

_WORKER_GIB = 1.0
_STEP_SECONDS = 0.045  # of one thread, until there are runs
_EPILOG = "exit codes: 0 done, 2 bad usage, file or checkpoint, 130 interrupted"


def _format(text: str) -> str:
    return parse_reduction(text).name


_OPTIONS: Options = {
    "folder": {"nargs": "?", "type": Path, "help": "of a run of tiebreak lab train; its logits are fp32's"},
    "--data": takes_folder("with a folder: the run's; default: the text that ships"),
    "--formats": takes_name(
        "of linear layers' products, E8M5 to even or, as the paper does, E8M5:zero cut off",
        "E8M3:zero,E8M4:zero,E8M5:zero,E8M6:zero,E8M7",
        "LIST",
        type=comma_list("format", _format),
    ),
    "--steps": takes_number("in a run's own format", default=1000),
    "--more": takes_number(
        "steps that follow, in it and, from the same state, in --back; 0: none", default=250, type=count
    ),
    "--every": takes_number("steps between two measurements", default=250),
    "--seeds": takes_number("of weights and batches, from 1", default=3),
    "--sequences": takes_number("of a batch", default=8),
    "--held-out": takes_number("sequences that are measured on", default=64),
    "--back": takes_name("what training goes back to", "E8M7", "FORMAT", type=checked(_format)),
    "--rate": {**RATE, "default": 1e-3, "help": "AdamW's highest learning rate; default: 1e-3"},
    "--kernel": takes_name("of attention", "flash@fused", type=checked(emulated_kernel)),
    **ATTENTION,
    "--eps": takes_name("sizes of the box", "5e-4,5e-5,1e-4", "LIST", type=comma_list("size", above_zero)),
}


def main(argv: Sequence[str]) -> int:
    """Measure sharpness; see `tiebreak.reports.cli.main`.

    Returns:
        0 done, 130 after Ctrl-C.

    Raises:
        UsageError: in one line what is wrong.
    """
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
    """Return the runs that a file has.

    Raises:
        ValueError: they are of other settings, or none of this program's; one line.
    """
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
    return table(rows, ("epsilon", "sharpness in per cent"), f"{title} {loss:.3f}")
