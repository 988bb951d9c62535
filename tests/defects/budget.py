"""`python -m tiebreak.defects.budget`: after how long a run with a budget names each planted defect.

The cases come in the order that `--budget` has them in, on one core, until the kernel falls in one. Seconds are of CPU
time: what else the machine does is not counted. A run that is stopped goes on where it was.
"""

import argparse
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from tiebreak.backends.provenance import commit
from tiebreak.defects.planted import DEFECTS
from tiebreak.defects.power import CAUGHT, EXPERIMENTS, PAGE, CaughtRow, PlantedCell, linked, run_one
from tiebreak.matrix.budget import ORDER_FILE
from tiebreak.matrix.memory import keep_memory
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.programs.pages.tables import read_rows, renew, table, write_rows
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import INTERRUPTED, Parser
from tiebreak.reports.records.record import CRASHED, FELL
from tiebreak.reports.tables.run import counted

SOURCE = "python -m tiebreak.defects.budget"
NAMED = Path(__file__).with_name("named.csv")
_WORST = 8
_SECONDS = 6.0  # of a defect, about: for the first word on how long it takes
_WORKER_GIB = 2.0


@dataclass(frozen=True)
class NamedRow:
    """A row of named.csv."""

    defect: str
    case: str  # the first in the budget's order in which it falls; empty: in none
    cells: int  # that were run until then
    seconds: float  # of CPU time, for all of them


@dataclass(frozen=True)
class Part:
    """A defect that was run."""

    commit: str | None  # of the suite
    row: dict[str, Any]  # the fields of its NamedRow


def run_part(defect: str) -> Part:
    """Run a defect, in a process of its own."""
    torch.set_num_threads(1)
    keep_memory()
    return Part(commit(), asdict(named(defect)))


def named(defect: str) -> NamedRow:
    """Run a defect through the cases in the budget's order until it falls."""
    order = ORDER_FILE.read_text(encoding="utf-8").split()
    began, bench = time.process_time(), Workbench(Settings())
    cases = [*order, *(name for name in EXPERIMENTS if name not in order)]
    for cells, case in enumerate(cases, 1):
        record = run_one(PlantedCell(defect, case, DEFECTS[defect].fmt.name), bench)
        if record.outcome in (FELL, CRASHED):
            return NamedRow(defect, case, cells, round(time.process_time() - began, 1))
    return NamedRow(defect, "", len(cases), round(time.process_time() - began, 1))


def worst(caught: Sequence[CaughtRow]) -> list[str]:
    """The defects that fall by most checks, in the order of the table."""
    return [row.defect for row in sorted(caught, key=lambda row: -len(row.checks.split()))][:_WORST]


def report(rows: Sequence[NamedRow], caught: Sequence[CaughtRow]) -> Iterator[str]:
    """What the page says."""
    found = [row for row in rows if row.case]
    seconds = [row.seconds for row in found]
    yield (
        f"{len(found)} of {len(rows)} fall within {math.ceil(max(seconds))} CPU seconds of one core, half within"
        f" {median(seconds):.1f}. The {_WORST} that fall by most checks:"
    )
    yield ""
    by_name = {row.defect: row for row in rows}
    chosen = [by_name[name] for name in worst(caught)]
    lines = ((linked(row.defect), f"`{row.case}`", str(row.cells), f"{row.seconds:.1f}") for row in chosen)
    yield from table(("defect", "falls first in", "cells run", "CPU seconds"), lines, right=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all, and renew the file and the page.

    Args:
        arguments: of the command line, those of the process by default.

    Returns:
        0, 2 for bad usage, 130 after Ctrl-C.
    """
    parser = Parser(prog=SOURCE, description="Say after how long a budget names each planted defect. Resumes.")
    add_options(parser, "named.jsonl", "defect")
    options = parser.parse_args(arguments)
    try:
        parts = [part for part in read_parts(options.out, Part) if part.commit == commit()]
    except (ValueError, OSError) as error:
        parser.error(str(error))
    left = [name for name in DEFECTS if name not in {part.row["defect"] for part in parts}]
    if not _run(left, options, parts):
        return INTERRUPTED
    rows = {part.row["defect"]: NamedRow(**part.row) for part in parts}
    write_rows(NAMED, NamedRow, (rows[name] for name in DEFECTS))
    renew(PAGE, SOURCE, report(list(rows.values()), read_rows(CAUGHT, CaughtRow)))
    return 0


def _run(left: Sequence[str], options: argparse.Namespace, parts: list[Part]) -> bool:
    outlook, seconds = counted(len(left), "defect"), len(left) * _SECONDS
    return run_parts(run_part, left, options, _progress, parts, outlook=outlook, seconds=seconds, gib=_WORKER_GIB)


def _progress(part: Part) -> str:
    return "{defect}: {case} after {seconds} s".format_map(part.row)


if __name__ == "__main__":
    sys.exit(main())
