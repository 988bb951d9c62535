"""Audits as tables, one a kernel with a row a target: the same for the verb `audit`, for `show` and for the page."""

from collections.abc import Iterator

from tiebreak.reports.audit.record import Audit, Audits, kinds
from tiebreak.reports.records.order import grouped
from tiebreak.reports.tables.grids import aside, csv_text, fitted

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


def cells(audit: Audit) -> Iterator[tuple[str, ...]]:
    """The kinds of instructions, a cell a column after that of the target; none of what was not compiled."""
    for name in _COLUMNS if audit.skipped is None else ():
        *others, last = kinds(getattr(audit, name))
        counts = f" ({audit.fused}/{audit.separate})" if name == "contraction" else ""
        yield *others, last + counts


def about(audits: Audits) -> str:
    """Where the tables come from, in a sentence that no reader takes for a measurement."""
    return f"Compiled by Triton {audits.triton} and read from the assembly. Nothing in it ran on a GPU."


def audit_tables(audits: Audits, width: int | None = None, tablefmt: str = "simple") -> str:
    """One table a kernel, one row a target, then why what was skipped was, and the legend; see `grids.fitted`."""
    parts = []
    for kernel, own in grouped(audits.audits, lambda audit: audit.kernel).items():
        texts = [list(map(", ".join, cells(audit))) or ["skip"] * len(_COLUMNS) for audit in own]
        rows = [[f"{audit.target} ({audits.cards[audit.target]})", *row] for audit, row in zip(own, texts, strict=True)]
        parts += [aside(kernel, tablefmt), *fitted(rows, HEADERS, tablefmt, width)]
    skips = [f"skipped {audit.id}: {audit.skipped}" for audit in audits.audits if audit.skipped is not None]
    notes = ["\n".join(skips), f"{about(audits)}\n{LEGEND}"]
    return "\n\n".join([*parts, *(aside(note, tablefmt) for note in notes if note)])


def as_csv(audits: Audits) -> str:
    """The audits as CSV, a line each; a field of several kinds has them with bars between, one without any is empty."""
    names = list(Audit.__struct_fields__)
    rows = []
    for audit in audits.audits:
        values = {name: getattr(audit, name) for name in names}
        texts = {name: _BETWEEN.join(value) if isinstance(value, tuple) else value for name, value in values.items()}
        rows.append({"triton": audits.triton, "cards": audits.cards[audit.target], **texts})
    return csv_text(["triton", "cards", *names], rows)
