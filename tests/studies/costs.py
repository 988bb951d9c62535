"""`python -m tiebreak.studies.costs`: Measure what cells of a kernel cost on a backend, and renew order.csv.

Seconds are of CPU time, of one core. What the kernel can't run keeps what it had.
"""

import csv
import sys
import time
from collections.abc import Sequence

from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.scheduling import TABLE
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.cli import Parser


def seconds(cell: Cell) -> float | None:
    """Return what a cell takes that shares nothing with others; None: it can't run."""
    began = time.process_time()
    record = run_cell(cell, Workbench(Settings()))
    return None if record.skipped else time.process_time() - began


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the cells one after the other, the first once more than it counts; return 0, 2 for bad usage."""
    parser = Parser(prog="python -m tiebreak.studies.costs", description="Measure what cells cost; renew order.csv.")
    parser.add_argument("kernel", metavar="TARGET", help="a user's, as `tiebreak check` takes it")
    parser.add_argument("--backend", default="cpu", help="one (default: cpu)")
    parser.add_argument("--cases", help="as `tiebreak check` takes them")
    options = parser.parse_args(arguments)
    chosen, _ = cells(Selection(options.backend, kernel=(options.kernel,), cases=options.cases))
    with TABLE.open(encoding="utf-8", newline="") as file:
        rows = {row["case"]: row for row in csv.DictReader(file)}
    seconds(chosen[0])  # what is imported only once
    for cell in chosen:
        if (spent := seconds(cell)) is not None:
            rows.setdefault(cell.experiment.name, {"case": cell.experiment.name})[cell.backend.pace] = f"{spent:.2g}"
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, next(iter(rows.values())), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())
    return 0


if __name__ == "__main__":
    sys.exit(main())
