"""The verb `tiebreak lab sharpness`: how sharp the loss is around a GPT-2's logits, by the bits it was trained with.

Every run trains the small GPT-2 in one format, from one seed, and then goes on twice from the same state: in its format
and in another. Each run is a line in a file, and a program that is stopped goes on where it was.
"""

import argparse
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, fields
from importlib.util import find_spec
from pathlib import Path

import torch
from torch.nn import functional

from tiebreak.cases.gpt2.data import DataError, corpus, read_bin
from tiebreak.cases.gpt2.model import Configuration
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.roster import composed_kernel
from tiebreak.laboratory.checkpoints import CHECKPOINT, CheckpointError, load
from tiebreak.laboratory.reduced import Reduction, parse_reduction
from tiebreak.laboratory.reduced_gpt2 import SAME, add_attention, parse_attention, reduced_gpt2
from tiebreak.laboratory.sharpness import EPSILON, sharpness
from tiebreak.laboratory.sharpness_run import TRAINED, Run, Settings, Task, gpt2, run_one, texts
from tiebreak.laboratory.sharpness_tables import summary, table
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import HELD, INTERRUPTED, Parser, count, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.tables.run import counted

_WORKER_GIB = 1.0
_STEP_SECONDS = 0.045  # of one thread, until there are runs
_EPILOG = "exit codes: 0 done, 2 bad usage, file or checkpoint, 130 interrupted"


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
            return HELD
        return _of_runs(options, epsilons)
    except (ValueError, OSError, CheckpointError, DataError) as error:
        raise UsageError(str(error)) from error


def _of_runs(options: argparse.Namespace, epsilons: list[float]) -> int:
    settings = _settings(options, epsilons)
    names = [parse_reduction(name).name for name in split(options.formats)]
    tasks = [Task(settings, name, seed) for seed in range(1, options.seeds + 1) for name in dict.fromkeys(names)]
    runs = _kept(options.out, settings)
    have = {(run.reduction, run.seed) for run in runs}
    left = [task for task in tasks if (task.reduction, task.seed) not in have]
    each = (
        statistics.fmean(run.seconds for run in runs) if runs else _STEP_SECONDS * (settings.steps + settings.more * 2)
    )
    outlook, seconds = f"{counted(len(have), 'run')} kept, {len(left)} to run", each * len(left)
    if not run_parts(run_one, left, options, _line, runs, outlook=outlook, seconds=seconds, gib=_WORKER_GIB):
        return INTERRUPTED
    wanted = {(task.reduction, task.seed) for task in tasks}
    print(summary([run for run in runs if (run.reduction, run.seed) in wanted], settings))
    return HELD


def _kept(path: Path, settings: Settings) -> list[Run]:
    """The runs that a file has.

    Raises:
        ValueError: they are of other settings, or none of this program's; one line.
    """
    runs = read_parts(path, Run)
    for run in runs:
        for name, value in asdict(settings).items():
            if run.settings.get(name) != value:
                problem = f"{path}: was written with {name} = {run.settings.get(name)}, not {value}; name another --out"
                raise ValueError(problem)
    return runs


def _line(run: Run) -> str:
    named, trained = f"{run.reduction}, seed {run.seed}", [point for point in run.measured if point.phase == TRAINED]
    if run.exploded is not None or not trained:
        return f"{named}: exploded at step {run.exploded}"
    epsilon, per_cent = next(iter(trained[-1].masked.items()))
    return f"{named}: held-out loss {trained[-1].held_out:.3f}, sharpness {per_cent:.4f} % at epsilon {epsilon}"


def _of_folder(folder: Path, data: Path | None, epsilons: list[float], sequences: int) -> str:
    """The sharpness of a run of `tiebreak lab train`, its logits computed in fp32."""
    if not (folder / CHECKPOINT).is_file():
        raise UsageError(f"{folder}: no {CHECKPOINT} in it; tiebreak lab train --out DIR writes one")
    checkpoint = load(folder, {})
    try:
        sizes = Configuration(**{each.name: checkpoint.run[each.name] for each in fields(Configuration)})  # type: ignore[arg-type]
        model = gpt2("flash@fp32", sizes, 0)
        model.load_state_dict(checkpoint.model)
    except (KeyError, TypeError, RuntimeError) as error:
        raise UsageError(f"{folder / CHECKPOINT}: none of tiebreak lab train's ({type(error).__name__})") from error
    tokens = corpus().tokens if data is None else read_bin(data, sizes.vocabulary, sizes.context)
    text = texts(tokens, sizes, sequences)[1]
    with torch.no_grad(), reduced_gpt2(model, Reduction(FP32)):
        logits = model(text[:, :-1], 0)[:, -1]
    loss = functional.cross_entropy(logits, text[:, -1]).item()
    rows = [(f"{epsilon:g}", f"{sharpness(logits, text[:, -1], epsilon):.4g}") for epsilon in epsilons]
    title = f"{folder} after {counted(checkpoint.step, 'step')}: loss of the last tokens of {sequences} sequences"
    title += f" {loss:.3f}"
    return table(rows, ("epsilon", "sharpness in per cent"), title)


def _settings(options: argparse.Namespace, epsilons: list[float]) -> Settings:
    if options.steps % options.every or options.more % options.every:
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
        epsilons = [float(each) for each in split(text)]
    except ValueError:
        epsilons = []
    if not epsilons or not all(math.isfinite(each) and each > 0 for each in epsilons):
        raise UsageError(f"--eps {text}: expected numbers above 0, such as {EPSILON},1e-3")
    return epsilons


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
    for flag, default, about in (
        ("--steps", 1000, "in a run's own format"),
        ("--more", 250, "steps that follow, in it and, from the same state, in --back; 0: none"),
        ("--every", 250, "steps between two measurements"),
        ("--seeds", 3, "of weights and batches, from 1"),
        ("--sequences", 8, "of a batch"),
        ("--held-out", 64, "sequences that are measured on"),
    ):
        least = count if flag == "--more" else positive
        parser.add_argument(flag, type=least, default=default, metavar="N", help=f"{about}; default: {default}")
    parser.add_argument("--back", default="E8M7", metavar="FORMAT", help="what training goes back to; default: E8M7")
    parser.add_argument("--rate", type=float, default=1e-3, help="AdamW's highest learning rate; default: 1e-3")
    parser.add_argument("--kernel", default="flash@fused", metavar="NAME", help="of attention; default: flash@fused")
    add_attention(parser)
    parser.add_argument(
        "--eps", default="5e-4,5e-5,1e-4", metavar="LIST", help="sizes of the box; default: %(default)s"
    )
    add_options(parser, "sharpness.jsonl", "run")
    return parser
