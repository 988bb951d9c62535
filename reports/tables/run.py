"""Tables of a run for the terminal: kernels across, cases down, what tables show of a cell with its marks."""

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import product
from textwrap import shorten

from tiebreak.reports.names import first_few
from tiebreak.reports.records.order import grouped, kernel_places
from tiebreak.reports.records.record import OUTCOMES, SCRIPT, TRACEBACK, Record, Run, record_id
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.texts import LEGEND, cell_text, explanation_texts
from tiebreak.reports.tables.training import training_tables
from tiebreak.reports.terminal import runnable

_NAMED = 3  # of cells that ended alike; the table shows them all
_LINES, _BRIEF = 8, 200  # lines about cells that failed, and their characters, where little is to be said
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


def tables(run: Run) -> list[Part]:
    """Return the tables of a run, one a backend, format and kind of experiment, with legends; training runs last."""
    parts: list[Part] = []
    places = kernel_places([run])
    calls = (record for record in run.records if record.experiment not in run.pooled)
    for kind, of_kind in grouped(calls, lambda record: record.experiment).items():
        alike = grouped(of_kind, lambda record: (record.backend, record.format)).values()
        parts += [_grid(run, records, places) for records in alike]
        parts += [run.experiments[kind].legend] if kind in run.experiments else []
    parts += training_tables([run])
    return [*parts, LEGEND] if parts else []


def _grid(run: Run, records: Sequence[Record], places: Mapping[str, int]) -> Grid:
    """Return the records of one backend, format and kind of experiment: cases down, kernels across."""
    backend, fmt = records[0].backend, records[0].format
    cells = {(record.kernel, record.case): cell_text(record) for record in records}
    names, cases = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    kernels = sorted(names, key=places.__getitem__)
    for kernel, case in product(kernels, cases):
        if record_id(backend, kernel, case, fmt) in run.not_run:
            cells[kernel, case] = "not run"
    rows = [[case, *(cells.get((kernel, case), "") for kernel in kernels)] for case in cases]
    return Grid(["case", *kernels], rows, f"{run.backend_text(backend)}, {fmt}")


def again(record: Record, command: Callable[[str], str] = runnable) -> list[str]:
    """Return how a cell is run again: alone, in a debugger where a user's code raised, as a script; a line each."""
    words = command(record.command)
    words += "" if " -n " in words else " -n 0"  # unless it has a worker, which alone can be ended
    lines = [f"rerun: {words}"]
    if TRACEBACK in record.evidence and words.endswith(" -n 0"):
        lines.append(f"debug: {words} --pdb")
    return lines + ([f"script: {record.evidence[SCRIPT]}"] if SCRIPT in record.evidence else [])


def failures(records: Sequence[Record], command: Callable[[str], str] = runnable, *, traced: bool = False) -> list[str]:
    """Return an entry for each failed cell: what, why, and its rerun as `command` makes it; then what is excused.

    `traced`: with tracebacks, of the first.
    """
    entries = []
    for alike in grouped((record for record in records if record.fails), _likeness).values():
        first = alike[0]
        lines = [f"{first.outcome} {first_few([record.id for record in alike], _NAMED)}", *first.reasons]
        if any(record.reasons != first.reasons for record in alike):
            lines.append(f"so all {len(alike)}, with other numbers")
        lines += first.evidence.get(TRACEBACK, "").splitlines() if traced else []
        more = again(first, command)
        lines += [line.replace(":", " the first:", 1) for line in more] if len(alike) > 1 else more
        entries.append("\n    ".join(lines))
    return entries + [f"excused {record.id}: {record.excused} ({'; '.join(record.reasons)})"
                      for record in records if record.excused is not None]  # fmt: skip


def brief(records: Sequence[Record]) -> list[str]:
    """Return a line for cells that do not pass, about the first: what failed, and the first clause of why."""
    failures = [(each, next(iter(each.evidence.get("off", each.reasons)), "")) for each in records if each.fails]
    lines = []
    for (outcome, why), alike in grouped(failures, lambda pair: (pair[0].outcome, pair[1].partition("; ")[0])).items():
        names = first_few([record.id for record, _ in alike], _NAMED)
        lines.append(shorten(f"{outcome} {names}: {why}", _BRIEF, placeholder=" ..."))
    return lines[:_LINES] + [f"and {len(lines) - _LINES} more"] * (len(lines) > _LINES)


def _likeness(record: Record) -> Hashable:
    """Return a key equal for records that share a line: one kernel, no result, one reason but for its numbers."""
    reasons = tuple(_NUMBER.sub("#", reason) for reason in record.reasons)
    alone = record.id if record.shown is not None else None
    return record.backend, record.kernel, record.format, record.outcome, reasons, alone


def counted(number: int, word: str) -> str:
    """Return the number with its noun: 1 cell, 2,000 cells."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def counts(records: Sequence[Record], excused_as: str = "excused") -> str:
    """Return how many cells there are of each outcome; those that are excused count as that alone."""
    outcomes = Counter(record.outcome if record.excused is None else excused_as for record in records)
    parts = [f"{outcomes[name]} {name.replace('_', ' ')}" for name in (*OUTCOMES, excused_as) if outcomes[name]]
    return f"{counted(len(records), 'cell')}{': ' if parts else ''}{', '.join(parts)}"


def summary(run: Run) -> str:
    """Return counts by outcome, reasons of skips, and the plans that undeclared kernels follow."""
    lines = [counts(run.records)]
    skipped = (record for record in run.records if record.skipped is not None)
    skips = Counter(f"{record.backend}-{record.kernel}: {record.skipped}" for record in skipped)
    lines += [f"skipped ({count}) {reason}" for reason, count in skips.items()]
    lines += [f"backend {name} did not run: {reason}" for name, reason in run.unavailable.items()]
    lines += [f"{kernel}: {explained}" for kernel, explained in explanation_texts(run).items()]
    if not run.complete:
        lines.append("INCOMPLETE: the run was interrupted; these are the cells that were done")
    if run.not_run:
        lines.append(f"not run: {counted(len(run.not_run), 'cell')} that never started")
    if run.running:
        lines.append(f"did not finish: {', '.join(run.running)}")
    return "\n".join(lines)
