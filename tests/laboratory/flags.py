"""Flags that several of the laboratory's verbs take, and what a preset says of those that are not given."""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2.model import PRESETS, Configuration
from tiebreak.laboratory.reduced import parse_attention, parse_reduction
from tiebreak.reports.cli import Parser, positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split

SIZES = ("layers", "heads", "width", "context")  # of the model, each with a flag
Options = Mapping[str, Mapping[str, Any]]  # by flag: what argparse is told of it
NUMBER: Mapping[str, Any] = {"type": positive, "metavar": "N"}
FOLDER: Mapping[str, Any] = {"type": Path, "metavar": "DIR"}
NAME: Mapping[str, Any] = {"metavar": "NAME"}
_Value = TypeVar("_Value")

# arXiv 2510.04212, section 3.1: 524,288 tokens a step, AdamW at 1e-3 after 2,000 steps, bf16 mixed precision. The paper
# does not print its length (it fails after several thousand steps): nanoGPT's.
_PAPER = {"steps": 600_000, "sequences": 512, "warm_up": 2000, "rate": 1e-3, "precision": "bf16",
          "report_every": 10, "checkpoint_every": 500}  # fmt: skip
# In fp32, so that attention's rounding is all that separates two runs.
_TOY = {"steps": 1000, "sequences": 8, "warm_up": 100, "rate": 1e-3, "precision": "fp32",
        "report_every": 10, "checkpoint_every": 100}  # fmt: skip
#: By preset: what an option is that was not given.
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    preset: {**{size: getattr(PRESETS[preset], size) for size in SIZES}, **recipe}
    for preset, recipe in (("gpt2_small", _PAPER), ("gpt2_medium", _PAPER), ("tiny", _TOY))
}
PRESET_LINES = "\n".join(
    f"preset {preset}: {', '.join(f'{name} {value}' for name, value in own.items())}"
    for preset, own in DEFAULTS.items()
)


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
    for name, value in DEFAULTS[options.preset].items():
        if name in options and getattr(options, name) is None:
            setattr(options, name, value)
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


def comma_list(kind: str, parse: Callable[[str], _Value], default: str, about: str) -> Mapping[str, Any]:
    """Return what argparse is told of an option that takes a comma list of `kind`: every name parsed, and once."""

    def parsed(text: str) -> tuple[_Value, ...]:
        values = tuple(dict.fromkeys(map(parse, split(text))))
        if not values:
            raise ValueError(f"no {kind} named")
        return values

    return {"type": checked(parsed), "metavar": "LIST", "default": default, "help": about}


def above_zero(text: str) -> float:
    """Return the number that a text says; ValueError: it says none that is finite and above 0."""
    if not 0 < (number := float(text)) < float("inf"):
        raise ValueError(f"expected a number above 0, not {text}")
    return number


def formats(default: str) -> Mapping[str, Any]:
    """Return what argparse is told of an option that takes formats of products."""
    about = "of linear layers' products: E8M7 is bf16, E8M5 rounds to even, E8M5:rtz cuts off as arXiv 2405.18710 does"
    return comma_list("format", reduction_name, default, about)


def emulated_kernel(name: str) -> str:
    """Return a kernel's name; ValueError: the emulation has no such kernel."""
    EMULATION.kernel(name)
    return name


def reduction_name(text: str) -> str:
    """Return a format of products as files and tables name it; ValueError: it is none."""
    return parse_reduction(text).name


#: Which model is trained on what.
MODEL: Options = {
    "--preset": {
        "type": lambda text: text.replace("-", "_"),  # gpt2-small is gpt2_small
        "choices": PRESETS,
        "default": "tiny",
        "help": "sizes and recipe, see below",
    },
    **{f"--{size}": {**NUMBER, "help": "in place of the preset's"} for size in SIZES},
    "--data": {**FOLDER, "help": "with nanoGPT's train.bin; default: the text that ships"},
}
#: How many steps are taken over how much.
LENGTH: Options = {
    "--steps": {**NUMBER, "help": "of the whole run"},
    "--sequences": {**NUMBER, "help": "of a batch"},
    "--warm-up": {**NUMBER, "help": "steps, then a cosine to a hundredth"},
}
RATE: Mapping[str, Any] = {"type": checked(above_zero), "metavar": "RATE", "help": "highest learning rate"}
ATTENTION: Options = {
    "--attention": {
        "type": checked(lambda text: text if parse_attention(text) is None else reduction_name(text)),
        "metavar": "FORMAT",
        "default": "E8M7",
        "help": "what attention rounds to, or same: as the products; E8M7 is bf16, as in arXiv 2405.18710",
    }
}
