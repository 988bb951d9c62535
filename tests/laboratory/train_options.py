"""The options of `tiebreak lab train`, with the defaults of each preset."""

import argparse
import math
import os
import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NoReturn

from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.gpt2.model import PRESETS, Configuration
from tiebreak.cases.gpt2.optimizers import OPTIMIZERS
from tiebreak.laboratory.training import PRECISIONS
from tiebreak.reports.cli import Parser, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split

SIZES = ("layers", "heads", "width", "context")  # of the model, each with a flag
_MUON_RATE = 5e-4


@dataclass(frozen=True)
class Defaults:
    """What a run of a preset does unless told otherwise."""

    steps: int  # of the whole run
    sequences: int  # of a batch
    at_once: int  # sequences of one forward pass, at most
    warm_up: int  # steps
    rate: float  # AdamW's highest
    precision: str  # of the linear layers
    report_every: int  # steps
    checkpoint_every: int  # steps


# arXiv 2510.04212, section 3.1: 524,288 tokens a step, AdamW at 1e-3 after 2,000 steps, bf16 mixed precision. The paper
# does not print its length (it fails after several thousand steps): nanoGPT's.
_PAPER = Defaults(600_000, 512, 16, 2000, 1e-3, "bf16", report_every=10, checkpoint_every=500)
# In fp32, so that attention's rounding is all that separates two runs.
_TOY = Defaults(1000, 8, 8, 100, 1e-3, "fp32", report_every=10, checkpoint_every=100)
# `at_once` depends on the processes.
_FILLED = tuple(default.name for default in fields(Defaults) if default.name != "at_once")
DEFAULTS = {"gpt2_small": _PAPER, "gpt2_medium": replace(_PAPER, at_once=8), "tiny": _TOY}


class _Parser(Parser):
    """Complains in an exception: under torchrun one process tells for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help says more")


_EPILOG = """several GPUs: torchrun --nproc-per-node N --no-python tiebreak lab train ...
exit codes: 0 done, 1 the loss exploded, 2 bad usage, data or checkpoint, 130 interrupted"""


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The options, those not given at the preset's defaults.

    Raises:
        UsageError: an option that does not exist, or a number that makes no sense; one line.
    """
    options = _parser().parse_args(argv)
    if options.rate is None and options.optimizer == "muon":
        options.rate = _MUON_RATE
    fill(options)
    _check(options)
    return options


def fill(options: argparse.Namespace) -> None:
    """Give the options that a command has and its user did not name the values of the preset."""
    given = vars(options)
    for values, names in ((DEFAULTS[options.preset], _FILLED), (PRESETS[options.preset], SIZES)):
        for name in names:
            if name in given and given[name] is None:
                given[name] = getattr(values, name)


def configuration(options: argparse.Namespace) -> Configuration:
    """The sizes of the model.

    Raises:
        ValueError: heads that don't divide the width.
    """
    return replace(PRESETS[options.preset], **{name: getattr(options, name) for name in SIZES})


def in_layers(text: str, sizes: Configuration) -> dict[tuple[int, tuple[int, ...]], str]:
    """Kernels' names by layer and heads, both from 0, out of a list such as `2=standard,3.1=flash@fp32`.

    Raises:
        UsageError: not such a list, or a layer or head that the model lacks.
    """
    kernels: dict[tuple[int, tuple[int, ...]], str] = {}
    for item in split(text):
        match = re.fullmatch(r"([0-9]+)(?:\.([0-9]+))?=(.+)", item)
        if match is None:
            raise UsageError(f"--in-layers {item}: expected LAYER=KERNEL or LAYER.HEAD=KERNEL")
        layer, head = int(match[1]), int(match[2] or 1)
        if not (1 <= layer <= sizes.layers and 1 <= head <= sizes.heads):
            raise UsageError(f"--in-layers {item}: the model has {sizes.layers} layers of {sizes.heads} heads, from 1")
        heads = tuple(range(sizes.heads)) if match[2] is None else (head - 1,)
        kernels[layer - 1, heads] = match[3]
    return kernels


def parts(options: argparse.Namespace, ranks: int) -> int:
    """How many parts a batch is processed in, by all processes together; settles `at_once` where it was not given.

    Raises:
        UsageError: the processes, or the sequences at once, don't divide the batch.
    """
    if options.sequences % ranks:
        raise UsageError(f"--sequences {options.sequences} must be a multiple of the {ranks} processes")
    each = options.sequences // ranks
    if options.at_once is None:
        options.at_once = math.gcd(each, DEFAULTS[options.preset].at_once)
    if each % options.at_once:
        raise UsageError(f"--at-once {options.at_once} does not divide the {each} sequences of a process")
    return int(options.sequences // options.at_once)


def _check(options: argparse.Namespace) -> None:
    if not (math.isfinite(options.rate) and options.rate > 0):
        raise UsageError(f"--rate must be above 0, not {options.rate}")
    if not 0 <= options.seed < 2**32:
        raise UsageError(f"--seed must be in [0, 2**32), not {options.seed}")


def _preset(name: str) -> str:
    return name.replace("-", "_")  # gpt2-small is gpt2_small


def _by_preset(name: str) -> str:
    """The default of every preset, for the help."""
    presets_by_value: dict[str, list[str]] = {}
    for preset, defaults in DEFAULTS.items():
        presets_by_value.setdefault(str(getattr(defaults, name)), []).append(preset)
    return "default: " + ", ".join(f"{value} ({', '.join(presets)})" for value, presets in presets_by_value.items())


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tiebreak lab train",
        description="Train a GPT-2 with any attention kernel of the suite, watched by monitors.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_what(parser)
    _add_steps(parser)
    _add_run(parser)
    return parser


def add_model(group: argparse._ArgumentGroup) -> None:
    """The options that say which model is trained on what."""
    group.add_argument(
        "--preset", type=_preset, choices=PRESETS, default="tiny", help="sizes and recipe; default: tiny"
    )
    for name in SIZES:
        group.add_argument(f"--{name}", type=positive, metavar="N", help="in place of the preset's")
    group.add_argument(
        "--data", type=Path, metavar="DIR", help="folder with nanoGPT's train.bin; default: the text that ships"
    )


def add_length(group: argparse._ArgumentGroup) -> None:
    """The options that say how many steps are taken over how much."""
    group.add_argument("--steps", type=positive, metavar="N", help=f"of the whole run; {_by_preset('steps')}")
    group.add_argument("--sequences", type=positive, metavar="N", help=f"of a batch; {_by_preset('sequences')}")
    group.add_argument(
        "--warm-up", type=positive, metavar="N", help=f"steps, then a cosine to a hundredth; {_by_preset('warm_up')}"
    )


def _add_what(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is trained")
    add_model(group)
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, batches and noise; default: 0")
    group.add_argument(
        "--kernel",
        default="flash@paper",
        metavar="NAME",
        help="of attention: standard, fair, rule@plan, the backend's own, or path/to/file.py:function; "
        "default: flash@paper",
    )
    group.add_argument(
        "--in-layers",
        default="",
        metavar="LIST",
        help="other kernels in some layers or heads, counted from 1: 2=standard,3.1=flash@fp32 is standard attention in"
        " layer 2 and fp32 in head 1 of layer 3",
    )
    group.add_argument(
        "--backward",
        choices=("own", "emulated"),
        default="own",
        help="what a kernel of yours trains with: its own backward pass, or this suite's in fp32; default: own",
    )
    group.add_argument("--backend", choices=BACKENDS, default="cpu", help="what everything runs on; default: cpu")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how a step is taken")
    add_length(group)
    group.add_argument(
        "--at-once",
        type=positive,
        metavar="N",
        help="sequences of one forward pass, the gradients of several are added up; default: the most that divides "
        f"a process' share, of at most {', '.join(f'{each.at_once} ({name})' for name, each in DEFAULTS.items())}",
    )
    group.add_argument(
        "--optimizer",
        choices=OPTIMIZERS,
        default="adamw",
        help="muon: on the matrices of the blocks, AdamW on the rest; default: adamw",
    )
    group.add_argument(
        "--rate", type=float, metavar="RATE", help=f"highest learning rate; {_by_preset('rate')}; muon: {_MUON_RATE}"
    )
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help=f"of the linear layers; weights stay in fp32, attention rounds as its kernel says; "
        f"{_by_preset('precision')}",
    )


def _add_run(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the run")
    group.add_argument(
        "--out",
        type=Path,
        default=Path("out", "train"),
        metavar="DIR",
        help=f"for log, checkpoint and, should the loss explode, the last attention inputs; "
        f"default: {os.path.join('out', 'train')}",
    )
    group.add_argument("--resume", action="store_true", help="go on from the checkpoint in --out")
    group.add_argument(
        "--report-every", type=positive, metavar="N", help=f"steps; monitors look then; {_by_preset('report_every')}"
    )
    group.add_argument(
        "--checkpoint-every",
        type=positive,
        metavar="N",
        help=f"steps; a killed run loses no more; {_by_preset('checkpoint_every')}",
    )
