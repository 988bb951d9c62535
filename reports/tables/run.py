"""Tables of a run for the terminal: kernels across, cases down, what tables show of a cell with its marks."""

import re
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field

from tiebreak.reports.records.record import OUTCOMES, SKIPPED, Record, Run
from tiebreak.reports.tables.grids import aside, broken, grid_text
from tiebreak.reports.tables.marks import LEGEND, cell_text
from tiebreak.reports.tables.plans import explanation_text
from tiebreak.reports.tables.rerun import runnable
from tiebreak.reports.tables.training import training_tables

_CELL_WIDTH = 10  # of a column of the table, with its gap
_NAMED = 3  # of cells that ended alike; the table shows them all
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?")


@dataclass(frozen=True)
class _Grid:
    """One backend's and format's records of one kind of experiment as a grid."""

    title: str
    absent: str  # stands where there is no record
    cells: dict[tuple[str, str], Record] = field(default_factory=dict)  # by kernel and case

    def render(self, width: int | None, tablefmt: str) -> str:
        """The grid, split into as many tables as the width asks for."""
        kernels, cases = (list(dict.fromkeys(names)) for names in zip(*self.cells, strict=True))
        first = max(map(len, cases)) + 2
        columns = len(kernels) if width is None else max(1, (width - first) // _CELL_WIDTH)
        parts = [aside(self.title, tablefmt)]
        for start in range(0, len(kernels), columns):
            shown = kernels[start : start + columns]
            rows = [[case, *(self._text(kernel, case) for kernel in shown)] for case in cases]
            headers = ["case", *(broken(kernel) if width else kernel for kernel in shown)]
            parts.append(grid_text(rows, headers, tablefmt))
        return "\n\n".join(parts)

    def _text(self, kernel: str, case: str) -> str:
        record = self.cells.get((kernel, case))
        return self.absent if record is None else cell_text(record)


def tables(run: Run, width: int | None = 120, tablefmt: str = "simple", absent: str = "missing") -> str:
    """Tables of a run, one a backend, format and kind of experiment; training runs last, in tables of their own.

    Args:
        run: its records in the order that kernels and cases shall have.
        width: of the terminal, in columns; wider tables are split. None: no limit.
        tablefmt: tabulate's name of the table's style.
        absent: stands where there is no record.

    Returns:
        The tables with their legends; empty without records.
    """
    grids: dict[tuple[str, str, str], _Grid] = {}
    where = run.told_of
    for record in run.records:
        if record.experiment in run.pooled:
            continue
        key = (record.experiment, record.backend, record.format)
        grid = grids.setdefault(key, _Grid(f"{where(record.backend)}, {record.format}", absent))
        grid.cells[record.kernel, record.case] = record
    parts: list[str] = []
    for kind in dict.fromkeys(kind for kind, _, _ in grids):
        parts += [grid.render(width, tablefmt) for (each, _, _), grid in grids.items() if each == kind]
        about = run.experiments.get(kind)
        if about is not None and about.legend:
            parts.append(aside(about.legend, tablefmt))
    if trained := training_tables([run], tablefmt):
        parts.append(trained)
    return "\n\n".join([*parts, *([aside(LEGEND, tablefmt)] if parts else [])])


def fallen(records: Sequence[Record]) -> str:
    """Every cell that does not pass: what fell, why, and the command that reruns it; then what is excused."""
    lines = []
    for alike in _alike([record for record in records if not record.passes and record.outcome != SKIPPED]):
        first = alike[0]
        names = ", ".join(record.id for record in alike[:_NAMED])
        more = f", and {len(alike) - _NAMED} more" if len(alike) > _NAMED else ""
        lines.append(f"{first.outcome} {names}{more}")
        lines += [f"    {reason}" for reason in first.reasons]
        if any(record.reasons != first.reasons for record in alike):
            lines.append(f"    so all {len(alike)}, with other numbers")
        lines.append(f"    rerun{' the first' if len(alike) > 1 else ''}: {runnable(first.command)}")
    lines += [f"excused {record.id}: {record.excused} ({'; '.join(record.reasons)})"
              for record in records if record.excused is not None]  # fmt: skip
    return "\n".join(lines)


def _alike(records: Iterable[Record]) -> list[list[Record]]:
    """Records that one line will do for: of one kernel, without a result, for one reason but for its numbers."""
    groups: dict[Hashable, list[Record]] = {}
    for record in records:
        reasons = tuple(_NUMBER.sub("#", reason) for reason in record.reasons)
        alone = record.id if record.shown is not None else None
        key = (record.backend, record.kernel, record.format, record.outcome, reasons, alone)
        groups.setdefault(key, []).append(record)
    return list(groups.values())


def counted(number: int, word: str) -> str:
    """The number with its noun: 1 cell, 2,000 cells."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def counts(records: Sequence[Record]) -> str:
    """How many cells there are of each outcome."""
    outcomes = Counter(record.outcome for record in records if record.excused is None)
    parts = [f"{outcomes[name]} {name.replace('_', ' ')}" for name in OUTCOMES if outcomes[name]]
    if excused := sum(record.excused is not None for record in records):
        parts.append(f"{excused} excused")
    return ": ".join([counted(len(records), "cell"), *([", ".join(parts)] if parts else [])])


def summary(run: Run) -> str:
    """Counts by outcome, reasons of skips, and the plans that undeclared kernels follow."""
    lines = [counts(run.records)]
    skips: dict[str, int] = {}
    for record in run.records:
        if record.skipped is not None:
            reason = f"{record.backend}-{record.kernel}: {record.skipped}"
            skips[reason] = skips.get(reason, 0) + 1
    lines += [f"skipped ({count}) {reason}" for reason, count in skips.items()]
    lines += [f"backend {name} did not run: {reason}" for name, reason in run.unavailable.items()]
    lines += [f"{kernel}: {explanation_text(plan)}" for kernel, plan in run.explanations.items()]
    if not run.complete:
        lines.append("INCOMPLETE: the run was interrupted; these are the cells that were done")
    if run.not_run:
        lines.append(f"not run: {counted(len(run.not_run), 'cell')} that never started")
    if run.running:
        lines.append(f"did not finish: {', '.join(run.running)}")
    return "\n".join(lines)
