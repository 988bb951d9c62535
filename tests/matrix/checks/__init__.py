"""Checks: each one question asked of a result. A check is found by being in a module of this folder."""

import math
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import IN_TIME, RUNS, Answer


@dataclass(frozen=True)
class Check:
    """One question."""

    name: str
    about: str  # what it asks, in one line
    ask: Callable[[Result], Answer | None]  # None: it has nothing to ask of this result
    judges: bool = False  # whether it is about the cell's rounding: what is held has met such a one
    wrong: bool = False  # whether a kernel that does not meet it computes something else than attention, or nothing


def _answered_elsewhere(result: Result) -> None:
    """A result there is only of a kernel that ran to its end."""
    del result


_ALWAYS = (
    Check(RUNS, "the kernel ran to its end", _answered_elsewhere, wrong=True),
    Check(IN_TIME, "the kernel ran in the time that a cell has", _answered_elsewhere, wrong=True),
)


@cache
def checks() -> Mapping[str, Check]:
    """Every check by name."""
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    asked = [value for module in modules for value in vars(module).values() if isinstance(value, Check)]
    return {check.name: check for check in (*_ALWAYS, *sorted(asked, key=lambda check: check.name))}


def ask_all(result: Result) -> dict[str, Answer]:
    """The answers to all checks that have something to ask, by name."""
    answers = {name: check.ask(result) for name, check in checks().items()}
    return {name: answer for name, answer in answers.items() if answer is not None}


def numbers(result: Result, *names: str) -> tuple[float, ...] | None:
    """The numbers of some measures; None if one of them is missing or NaN, which no check takes for a pass."""
    measured = [result.number(name) for name in names]
    known = tuple(number for number in measured if number is not None and not math.isnan(number))
    return known if len(known) == len(names) else None


def without_number(asked: str, *names: str) -> Answer:
    """The answer where there is no number to tell from."""
    return Answer(False, asked, f"there is no number for {' or '.join(names)}")
