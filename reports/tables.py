"""Tables of a run for the terminal: kernels across, cases down, bias with its verdict."""

from collections.abc import Sequence
from dataclasses import dataclass

from tabulate import tabulate

from tiebreak.reports.records import CRASHED, FELL, HELD, INCONCLUSIVE, SKIPPED, Record, Run

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
        return "!crash!"
    text = _bias_text(record)
    if record.outcome == HELD:
        return text
    return f"?{text}?" if record.outcome == INCONCLUSIVE else f"!{text}!"


def _bias_text(record: Record) -> str:
    measures = record.measures
    assert measures is not None
    if measures.nonfinite:
        return "NaN"
    if measures.gain is not None and measures.gain < _SHRUNK:
        return f"x{measures.gain:.2g}" if measures.gain >= 0.01 else "x0"
    if measures.bias.mean is None:
        return "none"
    mark = {"biased": " B", "inconclusive": " ?"}.get(record.verdict or "", "")
    return f"{measures.bias.mean:+.2f}{mark}"


@dataclass(frozen=True)
class _Grid:
    """One backend's and format's records as a grid."""

    title: str
    kernels: list[str]
    cases: list[str]
    cells: dict[tuple[str, str], Record]

    def render(self, width: int, tablefmt: str) -> str:
        """The grid, split into as many tables as the width asks for."""
        first = max(len(case) for case in self.cases) + 2
        columns = max(1, (width - first) // _CELL_WIDTH)
        parts = [self.title]
        for start in range(0, len(self.kernels), columns):
            kernels = self.kernels[start : start + columns]
            rows = [[case, *(self._text(kernel, case) for kernel in kernels)] for case in self.cases]
            headers = ["case", *(_broken(kernel) for kernel in kernels)]
            aligned = ("left", *("right" for _ in kernels))
            parts.append(tabulate(rows, headers=headers, tablefmt=tablefmt, colalign=aligned, disable_numparse=True))
        return "\n\n".join(parts)

    def _text(self, kernel: str, case: str) -> str:
        record = self.cells.get((kernel, case))
        return "missing" if record is None else cell_text(record)


def _broken(name: str) -> str:
    """A column's heading on several lines."""
    return name.replace("@", "\n@").replace("_", "_\n").replace("_\n\n", "_\n")


def tables(records: Sequence[Record], width: int = 120, tablefmt: str = "simple") -> str:
    """Tables of records, one a backend and format, kernels and cases in the order they come in.

    Args:
        records: of one run.
        width: of the terminal, in columns; wider tables are split.
        tablefmt: tabulate's name of the table's style.

    Returns:
        The tables with their legend; empty without records.
    """
    grids: dict[tuple[str, str], _Grid] = {}
    for record in records:
        key = (record.backend, record.format)
        grid = grids.setdefault(key, _Grid(f"{record.backend}, {record.format}", [], [], {}))
        if record.kernel not in grid.kernels:
            grid.kernels.append(record.kernel)
        if record.case not in grid.cases:
            grid.cases.append(record.case)
        grid.cells[record.kernel, record.case] = record
    if not grids:
        return ""
    return "\n\n".join([*(grid.render(width, tablefmt) for grid in grids.values()), LEGEND])


def fallen(records: Sequence[Record]) -> str:
    """Every cell that did not hold: what fell, why, and the command that reruns that one cell."""
    lines = []
    for record in records:
        if record.outcome in (FELL, CRASHED, INCONCLUSIVE):
            lines.append(f"{record.outcome} {record.id}")
            lines += [f"    {reason}" for reason in record.reasons]
            lines.append(f"    rerun: {record.command}")
    return "\n".join(lines)


def summary(run: Run) -> str:
    """Counts by outcome, reasons of skips, and the plans that undeclared kernels follow."""
    counts = {name: sum(record.outcome == name for record in run.records) for name in
              (HELD, FELL, INCONCLUSIVE, CRASHED, SKIPPED)}  # fmt: skip
    lines = [f"{len(run.records)} cells: " + ", ".join(f"{count} {name}" for name, count in counts.items() if count)]
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
