"""The verb `tiebreak train`: train a GPT-2 with any kernel of the suite, with monitors, checkpoints and a resume.

Here the cases meet a backend: this module puts the parts together, and nothing imports it but the command.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from tiebreak.backends.backend import BACKENDS
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.checkpoints import CheckpointError, load
from tiebreak.cases.gpt2.data import Batches, DataError, corpus, read_bin
from tiebreak.cases.gpt2.model import GPT2, PRESETS, Configuration, everywhere
from tiebreak.cases.gpt2.training import LOG, NotFiniteAtStartError, Schedule, Training
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.plans import FP32_PLAN, Cast
from tiebreak.kernels.roster import composed_kernel

DONE, EXPLODED, USAGE = 0, 1, 2  # exit codes


def main(argv: Sequence[str] | None = None) -> int:
    """Train.

    Args:
        argv: the verb's arguments, those of the process by default.

    Returns:
        0 after the last step, 1 if the loss exploded, 2 on bad usage, data or checkpoint.
    """
    arguments = _parser().parse_args(argv)
    try:
        training = _training(arguments)
        for progress in training.reports(arguments.report_every, arguments.checkpoint_every):
            print(progress.line, flush=True)
    except (ValueError, OSError, DataError, CheckpointError, NotFiniteAtStartError) as error:
        print(f"tiebreak train: {error}", file=sys.stderr)
        return USAGE
    if training.exploded:
        print(f"the loss exploded; the last steps' q, k, v, dO are in {arguments.out}")
    return EXPLODED if training.exploded else DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tiebreak train", description="train a GPT-2 with any kernel of the suite")
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="sizes of the model")
    parser.add_argument("--data", type=Path, help="folder with nanoGPT's train.bin; without it, the text that ships")
    parser.add_argument("--steps", type=int, required=True, help="of the whole run")
    parser.add_argument("--out", type=Path, required=True, help="folder for the log and the checkpoints")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    parser.add_argument("--kernel", default="flash@paper", help="standard, fair or rule@plan")
    parser.add_argument("--backend", choices=BACKENDS, default="cpu", help="what attention runs on")
    parser.add_argument("--sequences", type=int, default=8, help="of a batch")
    parser.add_argument("--rate", type=float, default=6e-4, help="highest learning rate")
    parser.add_argument("--warm-up", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=0, help="of weights, batches and noise")
    parser.add_argument("--report-every", type=int, default=10, help="steps")
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps; a killed run loses no more")
    return parser


# What may differ between a run and its resumption.
_FREE = ("out", "resume", "report_every", "checkpoint_every", "data")


def _training(arguments: argparse.Namespace) -> Training:
    """The run, at its start or where its checkpoint was taken.

    Raises:
        ValueError, DataError, CheckpointError: in one line what is wrong, and where.
    """
    for name in ("steps", "sequences", "warm_up", "report_every", "checkpoint_every"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {getattr(arguments, name)}")
    configuration = PRESETS[arguments.preset]
    batches = _batches(arguments, configuration)
    schedule = Schedule(arguments.steps, arguments.rate, arguments.warm_up)
    run = {name: value for name, value in vars(arguments).items() if name not in _FREE}
    model = _model(arguments, configuration)
    arguments.out.mkdir(parents=True, exist_ok=True)
    training = Training(model, batches, schedule, {**run, "data": batches.digest(1)}, arguments.out)
    if arguments.resume:
        training.resume(load(arguments.out, {**run, "data": batches.digest(1)}))
    elif (arguments.out / LOG).exists():
        raise ValueError(f"{arguments.out} holds a run already; go on with --resume or name another --out")
    return training


def _batches(arguments: argparse.Namespace, configuration: Configuration) -> Batches:
    if arguments.data is None:
        tokens = corpus().tokens
    else:
        tokens = read_bin(arguments.data, configuration.vocabulary, configuration.context)
    return Batches(tokens, arguments.sequences, configuration.context, arguments.seed)


def _model(arguments: argparse.Namespace, configuration: Configuration) -> GPT2:
    declared = composed_kernel(arguments.kernel).declaration
    assert declared is not None, "a composed kernel is its declaration"
    exact = declared.plan == FP32_PLAN
    kernel = replace(HeadKernel(declared), inputs=Cast(FP32)) if exact else HeadKernel(declared)
    backend = BACKENDS[arguments.backend]
    with torch.device(backend.device):
        return GPT2(configuration, everywhere(kernel, configuration), backend.arithmetic, arguments.seed)
