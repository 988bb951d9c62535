"""Options that several of the laboratory's verbs take, and what a preset says of those that are not given."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.model import PRESETS, Configuration
from tiebreak.laboratory.reduced import parse_reduction
from tiebreak.laboratory.reduced_gpt2 import parse_attention
from tiebreak.reports.cli import Parser, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split

SIZES = ("layers", "heads", "width", "context")  # of the model, each with a flag
Options = Mapping[str, Mapping[str, Any]]  # by flag: what argparse is told of it
NUMBER: Mapping[str, Any] = {"type": positive, "metavar": "N"}
FOLDER: Mapping[str, Any] = {"type": Path, "metavar": "DIR"}
NAME: Mapping[str, Any] = {"metavar": "NAME"}
_Value = TypeVar("_Value")


@dataclass(frozen=True)
class Preset:
    """What a run of a preset does unless told otherwise."""

    steps: int  # of the whole run
    sequences: int  # of a batch
    at_once: int  # sequences of one forward pass, at most; it depends on the processes, too
    warm_up: int  # steps
    rate: float  # AdamW's highest
    precision: str  # of the linear layers
    report_every: int  # steps
    checkpoint_every: int  # steps


# arXiv 2510.04212, section 3.1: 524,288 tokens a step, AdamW at 1e-3 after 2,000 steps, bf16 mixed precision. The paper
# does not print its length (it fails after several thousand steps): nanoGPT's.
_PAPER = Preset(600_000, 512, 16, 2000, 1e-3, "bf16", report_every=10, checkpoint_every=500)
# In fp32, so that attention's rounding is all that separates two runs.
_TOY = Preset(1000, 8, 8, 100, 1e-3, "fp32", report_every=10, checkpoint_every=100)
DEFAULTS = {"gpt2_small": _PAPER, "gpt2_medium": replace(_PAPER, at_once=8), "tiny": _TOY}


class _Parser(Parser):
    """Complains in an exception: under torchrun one process tells for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; --help says more")


def parser(verb: str, description: str, epilog: str, **options: Options) -> Parser:
    """Return the parser of a verb; options by the heading of their group, its words joined by `_`."""
    made = _Parser(
        prog=f"tiebreak lab {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in options.items():
        group = made.add_argument_group(title.replace("_", " "))
        for flag, told in flags.items():
            default = "; default: %(default)s" if told.get("default") else ""
            group.add_argument(flag, **{**told, "help": told["help"] + default})
    return made


def fill(options: argparse.Namespace) -> argparse.Namespace:
    """Return the options, those that a verb has and its user did not name at the preset's values."""
    given = vars(options)
    own = {each.name: getattr(DEFAULTS[options.preset], each.name) for each in fields(Preset) if each.name != "at_once"}
    for name, value in {**own, **{name: getattr(PRESETS[options.preset], name) for name in SIZES}}.items():
        if name in given and given[name] is None:
            given[name] = value
    return options


def configuration(options: argparse.Namespace) -> Configuration:
    """Return the sizes of the model; ValueError: heads that don't divide the width."""
    return replace(PRESETS[options.preset], **{name: getattr(options, name) for name in SIZES})


def checked(parse: Callable[[str], _Value]) -> Callable[[str], _Value]:
    """Return the type of an option: `parse`, whose ValueError is told to the user."""

    def parsed(text: str) -> _Value:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parsed


def comma_list(kind: str, parse: Callable[[str], _Value]) -> Callable[[str], tuple[_Value, ...]]:
    """Return the type of an option that takes a comma list of `kind`: every name parsed, and once."""

    def parsed(text: str) -> tuple[_Value, ...]:
        values = tuple(dict.fromkeys(map(parse, split(text))))
        if not values:
            raise ValueError(f"no {kind} named")
        return values

    return checked(parsed)


def above_zero(text: str) -> float:
    """Return the number that a text says; ValueError: it says none that is finite and above 0."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"expected a number above 0, not {text}")
    return number


def emulated_kernel(name: str) -> str:
    """Return a kernel's name; ValueError: the emulation has no such kernel."""
    EMULATION.kernel(name)
    return name


def reduction_name(text: str) -> str:
    """Return a format of products as files and tables name it; ValueError: it is none."""
    return parse_reduction(text).name


def _attention(text: str) -> str:
    reduction = parse_attention(text)
    return text if reduction is None else reduction.name


def of_preset(about: str, name: str) -> str:
    """Return the help of an option whose default a preset says."""
    presets_by_value: dict[str, list[str]] = {}
    for preset, defaults in DEFAULTS.items():
        presets_by_value.setdefault(str(getattr(defaults, name)), []).append(preset)
    values = ", ".join(f"{value} ({', '.join(presets)})" for value, presets in presets_by_value.items())
    return f"{about}; default: {values}"


#: Which model is trained on what.
MODEL: Options = {
    "--preset": {
        "type": lambda text: text.replace("-", "_"),  # gpt2-small is gpt2_small
        "choices": PRESETS,
        "default": "tiny",
        "help": "sizes and recipe",
    },
    **{f"--{size}": {**NUMBER, "help": "in place of the preset's"} for size in SIZES},
    "--data": {**FOLDER, "help": "with nanoGPT's train.bin; default: the text that ships"},
}
#: How many steps are taken over how much.
LENGTH: Options = {
    "--steps": {**NUMBER, "help": of_preset("of the whole run", "steps")},
    "--sequences": {**NUMBER, "help": of_preset("of a batch", "sequences")},
    "--warm-up": {**NUMBER, "help": of_preset("steps, then a cosine to a hundredth", "warm_up")},
}
RATE: Mapping[str, Any] = {
    "type": checked(above_zero),
    "metavar": "RATE",
    "help": of_preset("highest learning rate", "rate"),
}
ATTENTION: Options = {
    "--attention": {
        "type": checked(_attention),
        "metavar": "FORMAT",
        "default": "E8M7",
        "help": "what attention rounds to, or same: as the products; E8M7 is bf16, as in arXiv 2405.18710",
    }
}
