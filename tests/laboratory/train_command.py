"""The verb `tiebreak lab train`: train a GPT-2 with any attention kernel, with monitors, checkpoints and a resume.

Here the cases meet a backend: this module puts the parts together, and nothing imports it but the command.
"""

import argparse
import contextlib
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import TypeVar

import torch

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import Batches, DataError, corpus, read_bin
from tiebreak.cases.gpt2.model import GPT2, Configuration, everywhere
from tiebreak.cases.gpt2.optimizers import Schedule
from tiebreak.kernels.external import ContractError, external_kernel
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.plans import FP32_PLAN, Cast
from tiebreak.laboratory.checkpoints import CHECKPOINT, CheckpointError, load
from tiebreak.laboratory.progress import COLLAPSED_DIVERSITY, COLLAPSED_REPORTS, LOG, EarlyWarning
from tiebreak.laboratory.ranks import Ranks, joined, take_device
from tiebreak.laboratory.train_options import configuration, in_layers, parse, parts
from tiebreak.laboratory.training import NotFiniteAtStartError, Recipe, Steps, Training
from tiebreak.reports.errors import UsageError

DONE, EXPLODED, USAGE, INTERRUPTED = 0, 1, 2, 130  # exit codes
# What may differ between a run and its resumption.
_FREE = ("out", "resume", "report_every", "checkpoint_every", "data")
_WARNING = (
    f"early warning: nearly all tokens point one way at a layer's W_Q (sign diversity below {COLLAPSED_DIVERSITY} in"
    f" {COLLAPSED_REPORTS} reports in a row): the loss may explode (arXiv 2510.04202)"
)
_Made = TypeVar("_Made")


class _ShownError(Exception):
    """Something wrong with the command line, data or checkpoint, that the terminal shows already."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train.

    Args:
        argv: the verb's arguments, those of the process by default.

    Returns:
        0 after the last step, 1 if the loss exploded, 2 on bad usage, data or checkpoint, 130 after Ctrl-C.
    """
    gc.enable()  # the command turns it off, for verbs that end in a second
    try:
        with joined() as ranks, ctrl_c(once=ranks.size == 1) as asked:
            options = _agreed(ranks, lambda: parse(None if argv is None else list(argv)))
            training = _agreed(ranks, lambda: _training(options, ranks))
            _train(training, options, ranks, asked)
            return _end(training, options, ranks)
    except _ShownError:
        return USAGE
    except (ValueError, OSError, CheckpointError, ContractError, CannotRunError, NotFiniteAtStartError) as error:
        if os.environ.get("RANK", "0") == "0":  # all processes say the same, or it is the first that writes files
            _tell(error)
        return USAGE


@contextlib.contextmanager
def ctrl_c(*, once: bool) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C ask, not interrupt; yields whether it did.

    Args:
        once: whether a second Ctrl-C interrupts at once. Not under torchrun, which passes the signal on once more.
    """
    pressed: list[int] = []
    former = signal.getsignal(signal.SIGINT)

    def press(number: int, frame: FrameType | None) -> None:
        del frame
        pressed.append(number)
        if once:
            signal.signal(signal.SIGINT, former)

    if former is not signal.SIG_IGN:  # as in a shell's background
        signal.signal(signal.SIGINT, press)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, former)


def _backend(name: str) -> Backend:
    """The backend, once it is sure that the run can keep what an explosion leaves."""
    reason = BACKENDS[name].unavailable()
    if reason is not None:
        raise UsageError(f"--backend {name}: {reason}")
    BACKENDS[name].set_up()
    try:
        import_module("safetensors.torch")
    except ImportError as error:
        raise UsageError(
            f"safetensors keeps the attention inputs of an explosion: pip install safetensors ({error})"
        ) from error
    return BACKENDS[name]


def _agreed(ranks: Ranks, make: Callable[[], _Made]) -> _Made:
    """What `make` returns, if it does in every process.

    Raises:
        _ShownError: it does not; the first reason has been shown.
    """
    made: list[_Made] = []
    problem = ""
    try:
        made.append(make())
    except (UsageError, ValueError, OSError, DataError, CheckpointError) as error:
        problem = str(error)
    problems = [text for text in ranks.gather(problem) if text]
    if problems:
        if ranks.first:
            _tell(problems[0])
        ranks.gather(problem)  # torchrun stops all processes as soon as one ends: not before it is told
        raise _ShownError
    return made[0]


def _tell(problem: object) -> None:
    print(f"tiebreak lab train: {problem}", file=sys.stderr, flush=True)


def _training(options: argparse.Namespace, ranks: Ranks) -> Training:
    """The run, at its start or where its checkpoint was taken.

    Raises:
        UsageError, ValueError, OSError, DataError, CheckpointError: in one line what is wrong, and where.
    """
    backend = _backend(options.backend)
    take_device(backend.device)
    sizes = configuration(options)
    in_parts = parts(options, ranks.size)
    batches = batches_of(options.data, sizes, options.sequences, options.seed)
    recipe = Recipe(
        Schedule(options.steps, options.rate, options.warm_up), options.optimizer, options.precision, in_parts
    )
    given = {name: value for name, value in vars(options).items() if name not in _FREE}
    run = {**given, **asdict(sizes), "data": batches.digest(1)}
    if (options.out / LOG).exists() and not options.resume:
        raise UsageError(f"{options.out} holds a run already; go on with --resume or name another --out")
    checkpoint = load(options.out, run) if options.resume else None
    steps = Steps(_model(options, sizes, backend), batches, recipe, ranks)
    training = Training(steps, run, options.out)
    if checkpoint is not None:
        training.resume(checkpoint)
    elif ranks.first:
        options.out.mkdir(parents=True, exist_ok=True)
    if ranks.first:
        _introduce(options, training, batches, ranks)
    return training


def batches_of(data: Path | None, sizes: Configuration, sequences: int, seed: int) -> Batches:
    """The batches of a run.

    Args:
        data: folder with token data; None: the text that ships.
        sizes: of the model.
        sequences: of a batch.
        seed: of the sequence of batches.

    Raises:
        DataError: data that can't be trained on; one line.
    """
    tokens = corpus().tokens if data is None else read_bin(data, sizes.vocabulary, sizes.context)
    return Batches(tokens, sequences, sizes.context, seed)


def _model(options: argparse.Namespace, sizes: Configuration, backend: Backend) -> GPT2:
    kernels = [
        list(layer)
        for layer in everywhere(_head("--kernel", _kernel(options.kernel, backend, options.backward), sizes), sizes)
    ]
    for place, name in in_layers(options.in_layers, sizes).items():
        layer, heads = place
        head = _head("--in-layers", _kernel(name, backend, options.backward), sizes)
        for at in heads:
            kernels[layer][at] = head
    with torch.device(backend.device):
        return GPT2(sizes, tuple(map(tuple, kernels)), backend.arithmetic, options.seed)


def _head(flag: str, kernel: Kernel, sizes: Configuration) -> HeadKernel:
    """A kernel as heads of these sizes use it.

    Raises:
        UsageError: it does not take such heads.
    """
    probe = torch.zeros(1, sizes.heads, 2, sizes.d)
    refusal = kernel.refusal(AttentionInputs(probe, probe, probe, probe, Formats.of(BF16), causal=True))
    if refusal is not None:
        raise UsageError(f"{flag} {kernel.name}: {refusal}")
    if not kernel.composed or kernel.declaration is None:
        return HeadKernel(kernel)
    head = HeadKernel(kernel.declaration)
    return replace(head, inputs=Cast(FP32)) if kernel.declaration.plan == FP32_PLAN else head


def _kernel(name: str, backend: Backend, backward: str) -> Kernel:
    """A kernel by name.

    Raises:
        ValueError: the backend has no such kernel, or a user's own can't be loaded.
    """
    if ":" not in name:
        return backend.kernel(name)
    kernel = external_kernel(name)
    return replace(kernel, has_backward=False) if backward == "emulated" else kernel


def _introduce(options: argparse.Namespace, training: Training, batches: Batches, ranks: Ranks) -> None:
    data = "the text that ships" if options.data is None else options.data
    print(
        f"{options.preset}: {options.layers} layers, {options.heads} heads, width {options.width},"
        f" {training.parameters:,} parameters; {options.kernel} on {options.backend}, linear layers in"
        f" {options.precision}; {options.optimizer}, {options.sequences} sequences of {options.context} tokens a step"
        f" on {ranks.size} process{'es' if ranks.size > 1 else ''}; {len(batches.tokens):,} tokens of {data}"
    )
    if options.resume:
        print(f"going on after step {training.done} of {options.steps}")
    sys.stdout.flush()


@dataclass
class _Speed:
    """Time and tokens between two reports."""

    tokens: int  # of a step
    step: int  # of the last report
    since: float  # when that was, in seconds

    def line(self, step: int) -> str:
        now = time.perf_counter()
        each = (now - self.since) / (step - self.step)
        self.step, self.since = step, now
        return f"{each:.3g} s a step  {self.tokens / each:,.0f} tokens/s"


def _train(training: Training, options: argparse.Namespace, ranks: Ranks, asked: Callable[[], bool]) -> None:
    speed = _Speed(options.sequences * options.context, training.done, time.perf_counter())
    warning = EarlyWarning()
    for progress in training.reports(options.report_every, options.checkpoint_every, asked):
        if not ranks.first:
            continue
        print(f"{progress.line}  {speed.line(progress.step)}", flush=True)
        if warning.due(progress):
            print(_WARNING, flush=True)


def _end(training: Training, options: argparse.Namespace, ranks: Ranks) -> int:
    """Say how the run ended; its exit code."""
    if training.exploded:
        text = f"the loss exploded at step {training.done}; q, k, v, dO of {len(training.captured)} of the last steps"
        text += f" are in {options.out}: pytest tests/matrix --captured {options.out}"
        code = EXPLODED
    elif training.interrupted:
        text = f"interrupted after step {training.done}; {options.out / CHECKPOINT} has it all: go on with --resume"
        code = INTERRUPTED
    else:
        text, code = f"done: {training.done} steps; {options.out / CHECKPOINT}", DONE
    if ranks.first:
        print(text, flush=True)
    return code
