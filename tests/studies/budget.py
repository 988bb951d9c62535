"""`python -m tiebreak.studies.budget`: Say after how long a run with a budget names each planted defect.

The cases come in the order that `--budget` has them in, on one core, until the kernel falls in one. Seconds are of CPU
time: what else the machine does is not counted.
"""

import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from tiebreak.defects.planted import DEFECTS
from tiebreak.matrix.budget import ORDER_FILE
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import CRASHED, FELL
from tiebreak.studies.pages import PageTable, measured_at, read_rows, table, write_rows
from tiebreak.studies.power import CAUGHT, EXPERIMENTS, CaughtRow, linked, run_one
from tiebreak.studies.study import Study

NAMED = Path(__file__).with_name("named.csv")
_WORST = 20


@dataclass(frozen=True)
class Planted:
    """A defect that is to be named."""

    defect: str


@dataclass(frozen=True)
class NamedRow:
    """A row of named.csv."""

    defect: str
    case: str  # the first in the budget's order in which it falls; empty: in none
    cells: int  # that were run until then
    seconds: float  # of CPU time, for all of them


def run_until_named(task: Planted) -> NamedRow:
    """Run a defect through the cases in the budget's order until it falls."""
    cases = dict.fromkeys([*ORDER_FILE.read_text(encoding="utf-8").split(), *EXPERIMENTS])
    began, bench, fmt = time.process_time(), Workbench(Settings()), DEFECTS[task.defect].fmt.name
    for cells, case in enumerate(cases, 1):
        if run_one(task.defect, case, fmt, bench).outcome in (FELL, CRASHED):
            return NamedRow(task.defect, case, cells, round(time.process_time() - began, 1))
    return NamedRow(task.defect, "", len(cases), round(time.process_time() - began, 1))


STUDY = Study("budget", run_until_named, Planted, NamedRow, seconds=6.0)


def report(rows: Sequence[NamedRow], caught: Sequence[CaughtRow]) -> Iterator[str]:
    """Yield what the page says: the share that is named, and the defects that fall by most checks."""
    seconds = [row.seconds for row in rows if row.case]
    yield (
        f"{len(seconds)} of {len(rows)} fall within {math.ceil(max(seconds))} CPU seconds of one core, half within"
        f" {median(seconds):.1f}. The {_WORST} that fall by most checks:"
    )
    yield ""
    by_name = {row.defect: row for row in rows}
    worst = sorted(caught, key=lambda row: -len(row.checks.split()))[:_WORST]
    chosen = (by_name[row.defect] for row in worst)
    lines = ((linked(row.defect), f"`{row.case}`", str(row.cells), f"{row.seconds:.1f}") for row in chosen)
    yield from table(("defect", "falls first in", "cells run", "CPU seconds"), lines, right=False)


def _frozen() -> Iterator[str]:
    yield from report(read_rows(NAMED, NamedRow), read_rows(CAUGHT, CaughtRow))
    yield from ("", f"Measured at {measured_at(NAMED)}.")


TABLES = [PageTable("power.md", "make studies STUDY=budget", _frozen)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all defects, freeze the rows, renew the page; return 0, 2 for bad usage, 130 after Ctrl-C."""
    options = STUDY.parser(__doc__).parse_args(arguments)
    write_rows(NAMED, list(STUDY.results(map(Planted, DEFECTS), options).values()))
    TABLES[0].renew()
    return 0


if __name__ == "__main__":
    sys.exit(main())
