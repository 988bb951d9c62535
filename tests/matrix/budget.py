"""A time for a whole run: the cells that tell most come first, and those that it has no room for are left out."""

import functools
import math
import re
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from tiebreak.matrix.experiment import Cell

#: Cases, the one that tells most in a second first: docs/power.md says what that rests on.
ORDER_FILE = Path(__file__).with_name("order.txt")
_SHARE = 0.9  # of the budget, for cells; the rest is for the start, and for what the records come to
_STUCK = 5.0  # seconds after which a cell that does not end with the budget hangs
_DEADLINE = "tiebreak_deadline"  # of a worker's input
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}

now = time.monotonic  # one clock for all processes of a machine


class BudgetSpentError(BaseException):
    """Ends a cell in the midst of its work; no `except Exception` of a kernel takes it."""


@dataclass(frozen=True)
class Budget:
    """What is left of the time of a run."""

    deadline: float | None = None  # on the clock of `now`; None: the run takes as long as it takes

    @classmethod
    def of(cls, worker_input: Mapping[str, Any], seconds: float | None) -> "Budget":
        """The budget of a worker with this input; of a process that is about to begin a run, without any."""
        if _DEADLINE in worker_input:
            return cls(worker_input[_DEADLINE])
        return cls(None if seconds is None else now() + _SHARE * seconds)

    @property
    def worker_input(self) -> dict[str, Any]:
        """What a worker is told of it."""
        return {_DEADLINE: self.deadline}

    @property
    def left(self) -> float:
        """Seconds."""
        return math.inf if self.deadline is None else self.deadline - now()

    def limit(self, seconds: float | None) -> float | None:
        """Seconds that a cell may take, given those without a budget: what hangs ends soon after the deadline."""
        if self.deadline is None:
            return seconds
        return min(math.inf if seconds is None else seconds, max(self.left, 0.0) + _STUCK)

    @contextmanager
    def over(self) -> Iterator[None]:
        """Begin no cell without a budget for it, and end one at the deadline where it is.

        Raises:
            BudgetSpentError: the budget is spent.
        """
        if self.left <= 0:
            raise BudgetSpentError
        if self.deadline is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, _end_the_cell)
        signal.setitimer(signal.ITIMER_REAL, self.left)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def _end_the_cell(signum: int, frame: FrameType | None) -> NoReturn:
    raise BudgetSpentError


def seconds_of(text: str) -> float | None:
    """Seconds of a time such as 60, 60s, 1.5m or 1h; None if it is none, or less than a second."""
    matched = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh]?)", text.strip())
    seconds = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0
    return seconds if seconds >= 1 else None


WITHOUT = Budget()


@functools.cache
def _order() -> tuple[Mapping[str, int], frozenset[str]]:
    text = ORDER_FILE.read_text(encoding="utf-8")
    return {name: place for place, name in enumerate(text.split())}, frozenset(text.partition("\n\n")[0].split())


def needed() -> frozenset[str]:
    """The cases without which a verdict on a kernel says little: those above the order's empty line."""
    return _order()[1]


def rank(cell: Cell) -> tuple[int, float]:
    """Where a budget has a cell: the least first; behind those of the order the cheapest."""
    order, _ = _order()
    return order.get(cell.experiment.name, len(order)), cell.experiment.cost(cell.backend)
