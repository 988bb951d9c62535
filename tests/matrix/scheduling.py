"""Which worker runs which cell, when, and for how long; with a budget, the cells that tell most come first."""

import csv
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tiebreak.cases.case import JOINED
from tiebreak.matrix.experiment import Cell
from tiebreak.reports.records.order import grouped

_QUEUED = 2  # tests that a worker has before it, at least
#: By case: CPU seconds of its cell on backends of each pace; empty: not measured. The case that tells most in a second
#: comes first: docs/power.md says what that rests on, and how the seconds were measured.
TABLE = Path(__file__).with_name("order.csv")
_ROWS = csv.DictReader(TABLE.read_text(encoding="utf-8").splitlines())
_COSTS = {row.pop("case"): {pace: float(seconds) for pace, seconds in row.items() if seconds} for row in _ROWS}
ORDER = {name: place for place, name in enumerate(_COSTS)}
_NATIVE = "native"  # the pace that every case of the table was measured at
_USUAL = median(row[_NATIVE] for row in _COSTS.values())  # seconds of a case that the table lacks
_LISTED = 0.8  # of the default budget, for the list of cells: other kernels and machines are slower
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def cell_id(nodeid: str) -> str:
    """Return the id of a cell, from pytest's name of its test; empty for any other test."""
    _, separator, name = nodeid.partition("::test_cell[")
    return name.removesuffix("]") if separator else ""


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """A scheduler that groups cells by what they share, other tests by file if it shares, else each alone.

    The longest groups come first: one that starts last would keep its worker busy while the others are idle. A few
    short groups of users' kernels come before them: a kernel that hangs is noticed before its long cells run.
    """

    def __init__(
        self,
        config: pytest.Config,
        log: Any,
        cells: Mapping[str, Cell],
        rank: Callable[[Cell], tuple[float, ...]] | None = None,
        another_try: Callable[[str, str], bool] = lambda worker, nodeid: False,
    ) -> None:
        super().__init__(config, log)
        self.another_try = another_try  # whether what a worker ran as it died is run again
        self.retried: set[str] = set()  # tests that run again: each alone in a process, behind all others
        self.rank = rank  # where a cell comes, instead of the order by length: the least first
        self.cells = cells  # by id
        self.together: frozenset[str] = frozenset()  # files of tests that share what takes long to make
        self.leaving: set[Any] = set()  # workers that end themselves: no cell of theirs is to blame

    def _split_scope(self, nodeid: str) -> str:
        if nodeid in self.retried:
            return f"{nodeid} again"
        cell, file = self.cells.get(cell_id(nodeid)), nodeid.partition("::")[0]
        if cell is not None and (group := cell.experiment.group(cell.fmt)) is not None:
            return f"{file}::{group}"
        return file if file in self.together else nodeid

    def _rank(self, tests: Collection[str]) -> tuple[float, ...]:
        """Return the rank of a group: the least comes first."""
        cells = [cell for test in tests if (cell := self.cells.get(cell_id(test))) is not None]
        if self.rank is not None:
            return min(map(self.rank, cells), default=())
        early = any(cell.kernel.external and "backward" in cell.experiment.tags for cell in cells)
        return not early, -sum(map(cost, cells))

    def _assign_work_unit(self, node: Any) -> None:
        """Give a worker the next group; before the very first, put the queue that xdist has filled in order."""
        if not any(self.assigned_work.values()):
            groups = dict(self.workqueue)
            for scope in sorted(groups, key=lambda scope: self._rank(groups[scope])):
                self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)

    def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
        """Forget the finished groups: xdist 3.8 counts through all that a worker ever had, at every test."""
        del duration
        test = self.registered_collections[node][item_index]
        workload, scope = self.assigned_work[node], self._split_scope(test)
        workload[scope][test] = True
        if all(workload[scope].values()):
            del workload[scope]
        self._reschedule(node)

    def remove_node(self, node: Any) -> str | None:
        """Return the test that killed a worker and has no other try; the others get the rest of its work.

        xdist 3.8 would queue that test again, and finished groups too, whose completion it then awaits forever.
        """
        workload = self.assigned_work.pop(node)
        left = [(scope, test) for scope, unit in workload.items() for test, done in unit.items() if not done]
        killer = left.pop(0)[1] if left and node not in self.leaving else None
        for scope, test in left:
            self.workqueue.setdefault(scope, {})[test] = False
        if killer is not None and self.another_try(node.gateway.id, killer):
            self.retried.add(killer)
            self.workqueue[self._split_scope(killer)] = {killer: False}
            killer = None
        for other in self.nodes:
            self._reschedule(other)
        return killer

    def _reschedule(self, node: Any) -> None:
        """Keep a worker busy: it runs its last test only when it knows the next or that there is none.

        xdist 3.8 hands out one group at a time, after which a replacement with a group of one test waits forever.
        """
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= _QUEUED:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()


def seconds_of(text: str) -> float | None:
    """Return the seconds of a time such as 60, 60s, 1.5m or 1h; None if it is none, or less than a second."""
    matched = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh]?)", text.strip())
    seconds = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0
    return seconds if seconds >= 1 else None


def cost(cell: Cell) -> float:
    """Return the CPU seconds that a cell takes, about; of a case that was not measured, as others do on its backend."""
    name, pace = cell.experiment.name, cell.backend.pace
    row = _COSTS.get(name) or _COSTS.get(name.partition(JOINED)[0]) or {_NATIVE: _USUAL}
    return row[pace] if pace in row else row[_NATIVE] * _slower(pace)


@cache
def _slower(pace: str) -> float:
    """Return how many times as long as at the native pace a cell usually takes."""
    return median(row[pace] / row[_NATIVE] for row in _COSTS.values() if pace in row)


def rank(cell: Cell) -> tuple[int, float]:
    """Return where a budget has a cell, the least first: behind those of the order the cheapest."""
    return ORDER.get(cell.experiment.name, len(ORDER)), cost(cell)


def expected(cell: Cell) -> float:
    """Return the CPU seconds that a cell takes, about; none where it is known that the kernel takes no such input."""
    return 0.0 if cell.experiment.refused(cell) else cost(cell)


def beyond(cells: Iterable[Cell]) -> frozenset[str]:
    """Return the ids of cells that a check leaves out by default: those that tell least, where there is a budget."""
    left_out = set[str]()
    slow = (cell for cell in cells if cell.backend.budget is not None)
    for group in grouped(slow, lambda cell: (cell.backend.name, cell.kernel.name)).values():
        left = _LISTED * (group[0].backend.budget or math.inf)
        for cell in sorted(group, key=rank):
            if (seconds := expected(cell)) > left:
                left_out.add(cell.id)
            else:
                left -= seconds
    return frozenset(left_out)


@dataclass
class Pace:
    """The ratio of the time that cells of a run take to what is known of them; 1 until some have shown it."""

    took: float = 1.0  # seconds, by all cells together
    known: float = 1.0  # that they were known to take

    def add(self, usual: float, took: float) -> None:
        """Add a cell, its usual time and the time that it took, in seconds."""
        self.known, self.took = self.known + usual, self.took + took

    def expected(self, usual: float) -> float:
        """Return about how many seconds a cell will take that usually takes `usual`."""
        return usual * self.took / self.known
