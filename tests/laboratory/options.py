"""Options that several of the laboratory's verbs take, and what a preset says of those that are not given."""

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.model import PRESETS, Configuration
from tiebreak.laboratory.reduced_gpt2 import parse_attention
from tiebreak.reports.cli import Parser, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split

SIZES = ("layers", "heads", "width", "context")  # of the model, each with a flag
Options = Mapping[str, Mapping[str, Any]]  # by flag: what argparse is told of it
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
    """Return the parser of a verb.

    Args:
        verb: its name.
        description: what it does.
        epilog: what --help ends with.
        options: by the heading of their group, its words joined by `_`.
    """
    made = _Parser(
        prog=f"tiebreak lab {verb}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in options.items():
        group = made.add_argument_group(title.replace("_", " "))
        for flag, told in flags.items():
            group.add_argument(flag, **told)
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
    """Return the sizes of the model.

    Raises:
        ValueError: heads that don't divide the width.
    """
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
    """Return the number that a text says.

    Raises:
        ValueError: it says none, or none that is finite and above 0.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise ValueError(f"expected a number above 0, not {text}")
    return number


def emulated_kernel(name: str) -> str:
    """Return a kernel's name, if the emulation has it.

    Raises:
        ValueError: it has not; one line.
    """
    EMULATION.kernel(name)
    return name


def _attention(text: str) -> str:
    reduction = parse_attention(text)
    return text if reduction is None else reduction.name


def _by_preset(name: str) -> str:
    """Return the default of every preset, for the help."""
    presets_by_value: dict[str, list[str]] = {}
    for preset, defaults in DEFAULTS.items():
        presets_by_value.setdefault(str(getattr(defaults, name)), []).append(preset)
    return "default: " + ", ".join(f"{value} ({', '.join(presets)})" for value, presets in presets_by_value.items())


def takes_number(about: str, *, of_preset: str = "", **told: Any) -> Mapping[str, Any]:
    """Return what argparse is told of an option that takes a positive number.

    Args:
        about: its help.
        of_preset: the field of `Preset` that is its default; empty: none.
        told: what argparse is told beside.
    """
    if of_preset:
        about += f"; {_by_preset(of_preset)}"
    elif "default" in told:
        about += f"; default: {told['default']}"
    return {"type": positive, "metavar": "N", "help": about} | told


def takes_folder(about: str, default: Path | None = None) -> Mapping[str, Any]:
    """Return what argparse is told of an option that takes a folder."""
    return {
        "type": Path,
        "metavar": "DIR",
        "default": default,
        "help": about if default is None else f"{about}; default: {default}",
    }


def takes_name(about: str, default: str, metavar: str | None = "NAME", **told: Any) -> Mapping[str, Any]:
    """Return what argparse is told of an option that takes a name, or what `metavar` says."""
    return {"metavar": metavar, "default": default, "help": f"{about}; default: {default}"} | told


#: Which model is trained on what.
MODEL: Options = {
    "--preset": {
        "type": lambda text: text.replace("-", "_"),  # gpt2-small is gpt2_small
        "choices": PRESETS,
        "default": "tiny",
        "help": "sizes and recipe; default: tiny",
    },
    **{f"--{size}": takes_number("in place of the preset's") for size in SIZES},
    "--data": takes_folder("folder with nanoGPT's train.bin; default: the text that ships"),
}
#: How many steps are taken over how much.
LENGTH: Options = {
    "--steps": takes_number("of the whole run", of_preset="steps"),
    "--sequences": takes_number("of a batch", of_preset="sequences"),
    "--warm-up": takes_number("steps, then a cosine to a hundredth", of_preset="warm_up"),
}
RATE: Mapping[str, Any] = {
    "type": checked(above_zero),
    "metavar": "RATE",
    "help": f"highest learning rate; {_by_preset('rate')}",
}
ATTENTION: Options = {
    "--attention": takes_name(
        "what attention rounds to, or same: as the products; E8M7 is bf16, as in arXiv 2405.18710",
        "E8M7",
        "FORMAT",
        type=checked(_attention),
    )
}
WORKERS: Mapping[str, Any] = takes_number("processes (default: as many as the machine carries)")
