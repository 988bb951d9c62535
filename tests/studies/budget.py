"""`python -m tiebreak.studies.budget`: Say after how long a run with a budget names each planted defect.

The cases come in the order that `--budget` has them in, on one core, until the kernel fails in one. Seconds are of CPU
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
from tiebreak.matrix.scheduling import ORDER
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import CRASHED, FAILED
from tiebreak.studies.pages import PageTable, measured_at, read_rows, write_rows
from tiebreak.studies.power import EXPERIMENTS, run_one
from tiebreak.studies.study import Study

NAMED = Path(__file__).with_name("named.csv")


@dataclass(frozen=True)
class NamedRow:
    """A row of named.csv."""

    defect: str
    case: str  # the first in the budget's order in which it fails; empty: in none
    cells: int  # that were run until then
    seconds: float  # of CPU time, for all of them


def run_until_named(defect: str) -> NamedRow:
    """Run a defect, by its name, through the cases in the budget's order until it fails."""
    cases = dict.fromkeys(name for name in (*ORDER, *EXPERIMENTS) if name in EXPERIMENTS)
    began, bench, fmt = time.process_time(), Workbench(Settings()), DEFECTS[defect].fmt.name
    for cells, case in enumerate(cases, 1):
        if run_one(defect, case, fmt, bench).outcome in (FAILED, CRASHED):
            return NamedRow(defect, case, cells, round(time.process_time() - began, 1))
    return NamedRow(defect, "", len(cases), round(time.process_time() - began, 1))


STUDY = Study("budget", run_until_named, seconds=6.0)


def report() -> Iterator[str]:
    """Yield what the page says of the frozen rows."""
    rows = read_rows(NAMED, NamedRow)
    seconds = [row.seconds for row in rows if row.case]
    yield (
        f"{len(seconds)} of {len(rows)} fail within {math.ceil(max(seconds))} CPU seconds of one core, half within"
        f" {median(seconds):.1f} ([`named.csv`](../tests/studies/named.csv), measured at {measured_at(NAMED)})."
    )


TABLES = [PageTable("power.md", "make studies STUDY=budget", report)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all defects, freeze the rows, renew the page; return 0, 2 for bad usage, 130 after Ctrl-C."""
    options = STUDY.parser(__doc__).parse_args(arguments)
    write_rows(NAMED, list(STUDY.results(DEFECTS, options).values()))
    TABLES[0].renew()
    return 0


if __name__ == "__main__":
    sys.exit(main())
