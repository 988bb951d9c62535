"""Tables of a run for the terminal: kernels across, cases down, bias with its verdict."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from tiebreak.reports.grids import aside, broken, grid_text
from tiebreak.reports.records import (
    BIASED,
    CRASHED,
    FELL,
    HELD,
    INCONCLUSIVE,
    OUTCOMES,
    SKIPPED,
    TIMED_OUT,
    UNDECIDED,
    MeasuresRecord,
    Record,
    Run,
)
from tiebreak.reports.training import training_tables

LEGEND = (
    "bias of O in ulps, + away from zero. B: biased (99.9 % beyond 0.05 ulp), ?: not known yet, no mark: unbiased;\n"
    "NaN: NaN or Inf where the reference is finite; x..: output shrinks to that share. A cell in !..! fell:"
    " its claim, its plan's\nprediction or its accuracy did not hold. skip: can't run there, see below."
)
_CELL_WIDTH = 9  # of a column of the table, with its gap
_SHRUNK = 0.9  # an output of less than this share of the reference is shown as such


def cell_text(record: Record) -> str:
    """One cell of the table: bias, verdict and outcome, as the legend says."""
    if record.outcome == SKIPPED:
        return "skip"
    if record.measures is None:
        return "!time!" if record.outcome == TIMED_OUT else "!crash!"
    text = bias_text(record.measures, record.verdict)
    if record.outcome == HELD:
        return text
    return f"?{text}?" if record.outcome == INCONCLUSIVE else f"!{text}!"


def bias_text(measures: MeasuresRecord, verdict: str | None) -> str:
    """The bias with its verdict, or what there is in its place."""
    if measures.nonfinite:
        return "NaN"
    if measures.gain is not None and measures.gain < _SHRUNK:
        return f"x{measures.gain:.2g}" if measures.gain >= 0.01 else "x0"
    if measures.bias.mean is None:
        return "none"
    return f"{measures.bias.mean:+.2f}{verdict_mark(verdict)}"


def verdict_mark(verdict: str | None) -> str:
    """What stands behind a bias: B for biased, ? for not known yet."""
    return {BIASED: " B", UNDECIDED: " ?"}.get(verdict or "", "")


@dataclass(frozen=True)
class _Grid:
    """One backend's and format's records as a grid."""

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


def tables(
    records: Sequence[Record], width: int | None = 120, tablefmt: str = "simple", absent: str = "missing"
) -> str:
    """Tables of records, one a backend and format, kernels and cases in the order they come in; then training runs.

    Args:
        records: of one run.
        width: of the terminal, in columns; wider tables are split. None: no limit.
        tablefmt: tabulate's name of the table's style.
        absent: stands where there is no record.

    Returns:
        The tables with their legend; empty without records.
    """
    grids: dict[tuple[str, str], _Grid] = {}
    for record in records:
        if record.trained:
            continue
        key = (record.backend, record.format)
        grid = grids.setdefault(key, _Grid(f"{record.backend}, {record.format}", absent))
        grid.cells[record.kernel, record.case] = record
    parts = [grid.render(width, tablefmt) for grid in grids.values()]
    if parts:
        parts.append(aside(LEGEND, tablefmt))
    trained = training_tables(records, tablefmt)
    return "\n\n".join([*parts, *([trained] if trained else [])])


def fallen(records: Sequence[Record]) -> str:
    """Every cell that did not hold: what fell, why, and the command that reruns that one cell."""
    lines = []
    for record in records:
        if record.outcome in (FELL, CRASHED, TIMED_OUT, INCONCLUSIVE):
            lines.append(f"{record.outcome} {record.id}")
            lines += [f"    {reason}" for reason in record.reasons]
            lines.append(f"    rerun: {record.command}")
    return "\n".join(lines)


def counted(number: int, word: str) -> str:
    """The number with its noun: 1 cell, 2 cells."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def counts(records: Sequence[Record]) -> str:
    """How many cells there are of each outcome."""
    found = Counter(record.outcome for record in records)
    parts = [f"{found[name]} {name.replace('_', ' ')}" for name in OUTCOMES if found[name]]
    return ": ".join([counted(len(records), "cell"), *([", ".join(parts)] if parts else [])])


def summary(run: Run) -> str:
    """Counts by outcome, reasons of skips, and the plans that undeclared kernels follow."""
    lines = [counts(run.records)]
    skips: dict[str, int] = {}
    for record in run.records:
        if record.outcome == SKIPPED:
            reason = f"{record.backend}-{record.kernel}: {'; '.join(record.reasons)}"
            skips[reason] = skips.get(reason, 0) + 1
    lines += [f"skipped ({count}) {reason}" for reason, count in skips.items()]
    lines += [f"backend {name} did not run: {reason}" for name, reason in run.unavailable.items()]
    lines += [f"{kernel}: {text}" for kernel, text in run.explanations.items()]
    if not run.complete:
        lines.append("INCOMPLETE: the run was interrupted; these are the cells that were done")
    return "\n".join(lines)
