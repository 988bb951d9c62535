"""Checks: each one question asked of a result. One is found by being in a module here, or plugged in."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from tiebreak.matrix.result import Result
from tiebreak.plugins import Door
from tiebreak.reports.records.record import IN_TIME, RUNS, Answer, LimitRecord


@dataclass(frozen=True)
class Check:
    name: str
    about: str  # what it asks, in one line
    ask: Callable[[Result], Answer | None]  # None: it has nothing to ask of this result
    judges: bool = False  # whether it is about the cell's rounding: what is held has met such a one
    wrong: bool = False  # whether a kernel that does not meet it computes something else than attention, or nothing
    limits: tuple[LimitRecord, ...] = ()  # that measures have to keep to for it to be met
    more: bool = False  # whether more than they decides whether it is


# Of a kernel that did not run to its end there is no result that could be asked.
_ALWAYS = (
    Check(RUNS, "the kernel ran to its end", lambda result: None, wrong=True),
    Check(IN_TIME, "the kernel ran in the time that a cell has", lambda result: None, wrong=True),
)


@cache
def checks() -> Mapping[str, Check]:
    modules = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    asked = [value for module in modules for value in vars(module).values() if isinstance(value, Check)]
    own = {check.name: check for check in (*_ALWAYS, *sorted(asked, key=lambda check: check.name))}
    return Door("tiebreak.checks", Check, own).usable()


def judging() -> frozenset[str]:
    return frozenset(name for name, check in checks().items() if check.judges)


def ask_all(result: Result) -> dict[str, Answer]:
    answers = {name: check.ask(result) for name, check in checks().items()}
    return {name: answer for name, answer in answers.items() if answer is not None}
