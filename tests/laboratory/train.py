"""The verb `tiebreak lab train`: train a GPT-2 with any attention kernel, with monitors, checkpoints and a resume."""

import argparse
import contextlib
import gc
import math
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import FrameType

import torch

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.gpt2.attention import HeadKernel
from tiebreak.cases.gpt2.data import Batches
from tiebreak.cases.gpt2.model import GPT2, Configuration
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.kernels.plans import FP32_PLAN, Cast
from tiebreak.laboratory import flags
from tiebreak.laboratory.tokens import batches_of
from tiebreak.laboratory.training import (
    CHECKPOINT,
    LOG,
    OPTIMIZERS,
    PRECISIONS,
    Ranks,
    Recipe,
    Schedule,
    Steps,
    Training,
    joined,
)
from tiebreak.reports.cli import FAILED, INTERRUPTED, PASSED, USAGE, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split

# arXiv 2510.04202 calls the collapse of the sign diversity an early warning. The numbers are this suite's: six sound
# runs of the preset tiny (seeds 0 to 5, 400 steps, reports every 10) were below for 5 reports in a row at most, two at
# learning rates 30 and 300 times too high for 24 and 21.
COLLAPSED_DIVERSITY = 0.02  # 99 of 100 tokens point one way ...
COLLAPSED_REPORTS = 8  # ... in this many reports in a row
# What may differ between a run and its resumption.
_FREE = ("out", "resume", "report_every", "checkpoint_every", "data")
_MUON_RATE = 5e-4
_AT_ONCE = {"gpt2_small": 16, "gpt2_medium": 8, "tiny": 8}  # sequences of one forward pass, at most
_WARNING = (
    f"early warning: nearly all tokens point one way at a layer's W_Q (sign diversity below {COLLAPSED_DIVERSITY} in"
    f" {COLLAPSED_REPORTS} reports in a row): the loss may explode (arXiv 2510.04202)"
)
_EPILOG = f"""{flags.PRESET_LINES}
several GPUs: torchrun --nproc-per-node N --no-python tiebreak lab train ...
exit codes: 0 done, 1 the loss exploded, 2 bad usage, data or checkpoint, 130 interrupted"""

_WHAT: flags.Options = {
    **flags.MODEL,
    "--seed": {**flags.NUMBER, "type": count, "default": 0, "help": "of weights, batches and noise; default: 0"},
    "--kernel": {
        **flags.NAME,
        "default": "flash@paper",
        "help": "of attention: standard, fair, rule@plan, the backend's own, or path/to/file.py:function",
    },
    "--in-layers": {
        "default": "",
        "metavar": "LIST",
        "help": "other kernels in some layers or heads, counted from 1: 2=standard,3.1=flash@fp32 is standard attention"
        " in layer 2 and fp32 in head 1 of layer 3",
    },
    "--backward": {"choices": ("own", "emulated"), "default": "own", "help": "your kernel's, or this suite's in fp32"},
    "--backend": {"choices": BACKENDS, "default": "cpu", "help": "what everything runs on"},
}
_HOW: flags.Options = {
    **flags.LENGTH,
    "--at-once": {
        **flags.NUMBER,
        "help": "sequences of one forward pass, the gradients of several are added up; default: the most that divides a"
        " process' share, of at most 16 (gpt2_small) or 8",
    },
    "--optimizer": {"choices": OPTIMIZERS, "default": "adamw", "help": "muon: on the blocks' matrices, else AdamW"},
    "--rate": {**flags.RATE, "help": f"highest learning rate; muon: {_MUON_RATE} by default"},
    "--precision": {"choices": PRECISIONS, "help": "of the linear layers; weights stay in fp32"},
}
_RUN: flags.Options = {
    "--out": {**flags.FOLDER, "default": Path("out", "train"), "help": "for log, checkpoint, inputs of an explosion"},
    "--resume": {"action": "store_true", "help": "go on from the checkpoint in --out"},
    "--report-every": {**flags.NUMBER, "help": "steps; monitors look then"},
    "--checkpoint-every": {**flags.NUMBER, "help": "steps; a killed run loses no more"},
}


def main(argv: Sequence[str]) -> int:
    """Train: 0 after the last step, 1 if the loss exploded, 2 on bad usage, data or checkpoint, 130 after Ctrl-C."""
    gc.enable()  # the command turns it off, for verbs that end in a second
    try:
        with joined() as ranks, ctrl_c(once=ranks.size == 1) as asked:
            made = _agreed(ranks, lambda: _training(argv, ranks))
            if made is None:
                return USAGE
            options, training = made
            _train(training, options, ranks, asked)
            return _end(training, options, ranks)
    except (ValueError, OSError, CannotRunError) as error:
        if os.environ.get("RANK", "0") == "0":  # all processes say the same, or it is the first that writes files
            _tell(error)
        return USAGE


@contextlib.contextmanager
def ctrl_c(*, once: bool) -> Iterator[Callable[[], bool]]:
    """Let Ctrl-C ask, not interrupt; yields whether it did.

    A second one interrupts at once, where it is to ask `once`: not under torchrun, which passes the signal on again.
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


_Made = tuple[argparse.Namespace, Training]


def _agreed(ranks: Ranks, make: Callable[[], _Made]) -> _Made | None:
    """Return what `make` returns; None if it can't be made in some process, and the first reason is shown."""
    made, problem = None, ""
    try:
        made = make()
    except (UsageError, ValueError, OSError) as error:
        problem = str(error)
    problems = [text for text in ranks.gather(problem) if text]
    if not problems:
        return made
    if ranks.first:
        _tell(problems[0])
    ranks.gather(problem)  # torchrun stops all processes as soon as one ends: not before it is told
    return None


def _tell(problem: object) -> None:
    print(f"tiebreak lab train: {problem}", file=sys.stderr, flush=True)


def _training(argv: Sequence[str], ranks: Ranks) -> _Made:
    """Return the options and the run, at its start or where its checkpoint was taken."""
    options = flags.parser(
        "train",
        "Train a GPT-2 with any attention kernel of the suite, watched by monitors.",
        _EPILOG,
        what_is_trained=_WHAT,
        how_a_step_is_taken=_HOW,
        the_run=_RUN,
    ).parse_args(list(argv))
    options.rate = _MUON_RATE if options.rate is None and options.optimizer == "muon" else options.rate
    flags.fill(options)
    backend = _backend(options.backend)
    sizes = flags.configuration(options)
    schedule = Schedule(options.steps, options.rate, options.warm_up)
    recipe = Recipe(schedule, options.optimizer, options.precision, _parts(options, ranks.size))
    batches = batches_of(options.data, sizes.vocabulary, sizes.context, options.sequences, options.seed)
    given = {name: value for name, value in vars(options).items() if name not in _FREE}
    if (options.out / LOG).exists() and not options.resume:
        raise UsageError(f"{options.out} holds a run already; go on with --resume or name another --out")
    steps = Steps(_model(options, sizes, backend), batches, recipe, ranks)
    training = Training(steps, {**given, **asdict(sizes), "data": batches.digest(1)}, options.out)
    if options.resume:
        training.resume()
    elif ranks.first:
        options.out.mkdir(parents=True, exist_ok=True)
    if ranks.first:
        _introduce(options, steps, training.done, batches)
    return options, training


def _backend(name: str) -> Backend:
    """Return the backend, set up; under torchrun on the device numbered as this process' place on its machine."""
    backend = BACKENDS[name]
    if (reason := backend.unavailable()) is not None:
        raise UsageError(f"--backend {name}: {reason}")
    backend.set_up()
    if backend.device != "cpu" and "LOCAL_RANK" in os.environ:
        place, there = int(os.environ["LOCAL_RANK"]), torch.accelerator.device_count()
        if place >= there:
            raise UsageError(f"torchrun started more processes than the {there} {name} devices of this machine")
        torch.accelerator.set_device_index(place)
    return backend


def _parts(options: argparse.Namespace, ranks: int) -> int:
    """Return in how many parts a batch is processed by all processes; settle `at_once` where it was not given."""
    if options.sequences % ranks:
        raise UsageError(f"--sequences {options.sequences} must be a multiple of the {ranks} processes")
    each = options.sequences // ranks
    if options.at_once is None:
        options.at_once = math.gcd(each, _AT_ONCE[options.preset])
    if each % options.at_once:
        raise UsageError(f"--at-once {options.at_once} does not divide the {each} sequences of a process")
    return int(options.sequences // options.at_once)


def _model(options: argparse.Namespace, sizes: Configuration, backend: Backend) -> GPT2:
    head = _head("--kernel", options.kernel, options, sizes, backend)
    kernels = [[head] * sizes.heads for _ in range(sizes.layers)]
    for item in split(options.in_layers):
        match = re.fullmatch(r"([0-9]+)(?:\.([0-9]+))?=(.+)", item)
        if match is None:
            raise UsageError(f"--in-layers {item}: expected LAYER=KERNEL or LAYER.HEAD=KERNEL")
        layer, at = int(match[1]), int(match[2] or 1)
        if not (1 <= layer <= sizes.layers and 1 <= at <= sizes.heads):
            raise UsageError(f"--in-layers {item}: the model has {sizes.layers} layers of {sizes.heads} heads, from 1")
        head = _head("--in-layers", match[3], options, sizes, backend)
        heads = slice(None) if match[2] is None else slice(at - 1, at)
        kernels[layer - 1][heads] = [head] * len(kernels[layer - 1][heads])
    with torch.device(backend.device):
        return GPT2(sizes, tuple(map(tuple, kernels)), backend.arithmetic, options.seed)


def _head(flag: str, name: str, options: argparse.Namespace, sizes: Configuration, backend: Backend) -> HeadKernel:
    """Return a kernel as heads of these sizes use it; UsageError, ValueError: there is none that takes such heads."""
    kernel: Kernel = external_kernel(name) if ":" in name else backend.kernel(name)
    if ":" in name and options.backward == "emulated":
        kernel = replace(kernel, has_backward=False)
    probe = torch.zeros(1, sizes.heads, 2, sizes.d)
    refusal = kernel.refusal(AttentionInputs(probe, probe, probe, probe, Formats.of(BF16), causal=True))
    if refusal is not None:
        raise UsageError(f"{flag} {kernel.name}: {refusal}")
    if not kernel.composed or kernel.declaration is None:
        return HeadKernel(kernel)
    head = HeadKernel(kernel.declaration)
    return replace(head, inputs=Cast(FP32)) if kernel.declaration.plan == FP32_PLAN else head


def _introduce(options: argparse.Namespace, steps: Steps, done: int, batches: Batches) -> None:
    data = "the text that ships" if options.data is None else options.data
    parameters = sum(weight.numel() for weight in steps.weights)
    print(
        f"{options.preset}: {options.layers} layers, {options.heads} heads, width {options.width},"
        f" {parameters:,} parameters; {options.kernel} on {options.backend}, linear layers in {options.precision};"
        f" {options.optimizer}, {options.sequences} sequences of {options.context} tokens a step"
        f" on {steps.ranks.size} process{'es' if steps.ranks.size > 1 else ''};"
        f" {len(batches.tokens):,} tokens of {data}"
    )
    if options.resume:
        print(f"going on after step {done} of {options.steps}")
    sys.stdout.flush()


def _train(training: Training, options: argparse.Namespace, ranks: Ranks, asked: Callable[[], bool]) -> None:
    """Train, and show each report with the time and the tokens since the last."""
    step, since, low = training.done, time.perf_counter(), 0
    for progress in training.reports(options.report_every, options.checkpoint_every, asked):
        if not ranks.first:
            continue
        each = (time.perf_counter() - since) / (progress.step - step)
        step, since = progress.step, time.perf_counter()
        print(
            f"step {step}  loss {progress.loss:.4f}  rate {progress.rate:.2e}  max logit {progress.max_logit:.1f}"
            f"  drift {progress.drift:+.2e}  sign diversity {progress.sign_diversity:.2f}"
            f"  {each:.3g} s a step  {options.sequences * options.context / each:,.0f} tokens/s",
            flush=True,
        )
        low = low + 1 if progress.sign_diversity < COLLAPSED_DIVERSITY else 0
        if low == COLLAPSED_REPORTS:  # once in each collapse
            print(_WARNING, flush=True)


def _end(training: Training, options: argparse.Namespace, ranks: Ranks) -> int:
    """Say how the run ended; return its exit code."""
    if training.exploded:
        text = f"the loss exploded at step {training.done}; q, k, v, dO of {len(training.captured)} of the last steps"
        text += f" are in {options.out}: pytest tests/matrix --captured {options.out}"
        code = FAILED
    elif training.interrupted:
        text = f"interrupted after step {training.done}; {options.out / CHECKPOINT} has it all: go on with --resume"
        code = INTERRUPTED
    else:
        text, code = f"done: {training.done} steps; {options.out / CHECKPOINT}", PASSED
    if ranks.first:
        print(text, flush=True)
    return code
