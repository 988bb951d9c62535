"""Audits as tables, one a kernel with a row a target: the same for the verb `audit`, for `show` and for the page."""

import csv
import io
from collections.abc import Iterator
from dataclasses import dataclass, fields

from tiebreak.reports.audit.record import Audit, Audits, kinds
from tiebreak.reports.tables.grids import aside, fitted

_COLUMNS = {
    "products": "matrix instruction",
    "operand_casts": "cast into a product",
    "output_casts": "cast to memory",
    "exponential": "exponential",
    "exponent": "exp of",
    "logarithm": "log",
    "division": "division",
    "contraction": "contraction",
    "flushes": "flushes",
    "mode": "mode",
}
HEADERS = ("target", *_COLUMNS.values())

LEGEND = (
    "matrix instruction: its K (k16), types of its operands -> of its accumulator\n"
    "cast into a product: of what a matrix product takes: P̄ (backward: P, dS)\n"
    "cast to memory: of what the kernel stores: O (backward: dQ, dK, dV; standard's softmax: P)\n"
    "exp of: the operation that formed the exponential's argument\n"
    "contraction: whether products and sums are fused into fma (fma/separate: how many of each)\n"
    "flushes: instructions that take subnormals for zero; mode: how additions and multiplications round\n"
    "none: no such instruction; skip: not compiled"
)
_BETWEEN = " | "  # in CSV: the kinds have commas and semicolons of their own


@dataclass(frozen=True)
class Row:
    """One target."""

    target: str
    cards: str  # what it stands for
    skipped: str | None  # why it was not compiled; then there are no cells
    cells: tuple[tuple[str, ...], ...]  # the kinds of instructions, one cell a column after that of the target

    @property
    def name(self) -> str:
        """The target and what it stands for."""
        return f"{self.target} ({self.cards})"

    @property
    def texts(self) -> tuple[str, ...]:
        """The cells in a line each."""
        return ("skip",) * len(_COLUMNS) if self.skipped is not None else tuple(map(", ".join, self.cells))


@dataclass(frozen=True)
class AuditGrid:
    """One kernel on every target."""

    kernel: str
    rows: tuple[Row, ...]


def audit_grids(audits: Audits) -> list[AuditGrid]:
    """A grid a kernel, kernels and targets in the order they come in."""
    rows: dict[str, list[Row]] = {}
    for one in audits.audits:
        cells = () if one.skipped is not None else tuple(_cells(one))
        rows.setdefault(one.kernel, []).append(Row(one.target, audits.cards[one.target], one.skipped, cells))
    return [AuditGrid(kernel, tuple(found)) for kernel, found in rows.items()]


def _cells(audit: Audit) -> Iterator[tuple[str, ...]]:
    for name in _COLUMNS:
        *others, last = kinds(getattr(audit, name))
        counts = f" ({audit.fused}/{audit.separate})" if name == "contraction" else ""
        yield *others, last + counts


def about(audits: Audits) -> str:
    """Where the tables come from, in a sentence that no reader takes for a measurement."""
    return f"Compiled by Triton {audits.triton} and read from the assembly. Nothing in it ran on a GPU."


def audit_tables(audits: Audits, width: int | None = None, tablefmt: str = "simple") -> str:
    """One table a kernel, one row a target, then why what was skipped was, and the legend.

    Args:
        audits: what to show.
        width: of the terminal, in columns; wider tables are split. None: no limit.
        tablefmt: tabulate's name of the table's style.

    Returns:
        The text.
    """
    parts = []
    for grid in audit_grids(audits):
        rows = [[row.name, *row.texts] for row in grid.rows]
        parts += [aside(grid.kernel, tablefmt), *fitted(rows, HEADERS, tablefmt, width)]
    skips = [f"skipped {one.id}: {one.skipped}" for one in audits.audits if one.skipped is not None]
    notes = ["\n".join(skips), f"{about(audits)}\n{LEGEND}"]
    return "\n\n".join([*parts, *(aside(note, tablefmt) for note in notes if note)])


def as_csv(audits: Audits) -> str:
    """The audits as CSV, a line each; a field of several kinds has them with bars between, one without any is empty."""
    out = io.StringIO()
    names = [field.name for field in fields(Audit)]
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["triton", "cards", *names])
    for one in audits.audits:
        values = [getattr(one, name) for name in names]
        texts = [_BETWEEN.join(value) if isinstance(value, tuple) else value for value in values]
        writer.writerow([audits.triton, audits.cards[one.target], *texts])
    return out.getvalue()
