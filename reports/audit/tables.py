"""Audits as tables, one a kernel with a row a target: the same for the verb `audit`, for `show` and for the page."""

from functools import partial

from tiebreak.reports.audit.record import Audit, Audits, kinds
from tiebreak.reports.records.order import grouped
from tiebreak.reports.tables.grids import Grid, Part

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


def audit_tables(audits: Audits) -> list[Part]:
    """Return one table a kernel, one row a target, then why what was skipped was, where they come from, the legend."""
    parts: list[Part] = []
    for kernel, own in grouped(audits.audits, lambda audit: audit.kernel).items():
        rows = [
            [f"{audit.target} ({audits.cards[audit.target]})", *map(partial(_cell, audit), _COLUMNS)] for audit in own
        ]
        parts.append(Grid(HEADERS, rows, kernel))
    skips = [f"skipped {audit.id}: {audit.skipped}" for audit in audits.audits if audit.skipped is not None]
    # In a sentence that no reader takes for a measurement.
    about = f"Compiled by Triton {audits.triton} and read from the assembly. Nothing in it ran on a GPU."
    return [*parts, "\n".join(skips), f"{about}\n{LEGEND}"]


def _cell(audit: Audit, name: str) -> str:
    """Return the kinds of instructions of a column, a line each."""
    if audit.skipped is not None:
        return "skip"
    counts = f" ({audit.fused}/{audit.separate})" if name == "contraction" else ""
    return "\n".join(kinds(getattr(audit, name))) + counts


def csv_grid(audits: Audits) -> Grid:
    """Return a row an audit; what has none of a kind is empty."""
    names = Audit.__struct_fields__
    rows = []
    for audit in audits.audits:
        values = [getattr(audit, name) for name in names]
        texts = ["\n".join(value) if isinstance(value, tuple) else value for value in values]
        rows.append([audits.triton, audits.cards[audit.target], *texts])
    return Grid(["triton", "cards", *names], rows)
