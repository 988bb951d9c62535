"""The audit of compiled kernels: which instructions round, as a record, a file, a table and a gate."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from tiebreak.reports.decode import FieldError, decoder
from tiebreak.reports.errors import UsageError
from tiebreak.reports.grids import aside, grid_text
from tiebreak.reports.store import UnreadableRecordsError, write_text

SCHEMA = 1

LEGEND = (
    "Read from the assembly; nothing ran. into a product: casts of what a matrix product takes (P̄; backward: P, dS).\n"
    "to memory: casts of what the kernel stores (O; backward: dQ, dK, dV; standard's softmax: P). exp of: the operation"
    " that formed\nthe exponential's argument. contraction: whether products and sums are fused into fma (fma/separate:"
    " how many of each).\n-: no such instruction."
)


@dataclass(frozen=True)
class Audit:
    """What one kernel's assembly for one target says of its rounding. Lists are sorted and hold every kind once."""

    target: str  # the architecture: sm_90, gfx942
    kernel: str  # name of the kernel and its settings
    skipped: str | None  # why it was not compiled; then all lists are empty
    products: tuple[str, ...]  # matrix instructions: K, types of the operands -> type of the accumulator
    operand_casts: tuple[str, ...]  # how values that enter a matrix product are cast
    output_casts: tuple[str, ...]  # how values that are stored are cast
    exponential: tuple[str, ...]  # instructions
    exponent: tuple[str, ...]  # what formed the exponential's argument: fma, mul, add
    logarithm: tuple[str, ...]  # instructions
    division: tuple[str, ...]  # instructions
    contraction: tuple[str, ...]  # fma; left to ptxas, which may fuse what is not marked as rounded
    flushes: tuple[str, ...]  # instructions that take subnormals for zero
    mode: str  # who sets the rounding mode of additions and multiplications, and which it is
    fused: int  # how many fma the softmax has; not gated: it changes with the schedule
    separate: int  # how many multiplications and additions beside them; not gated

    @classmethod
    def skip(cls, target: str, kernel: str, reason: str) -> "Audit":
        """The record of a kernel that was not compiled."""
        nothing: dict[str, Any] = {field.name: () for field in fields(cls) if field.type == tuple[str, ...]}
        return cls(target=target, kernel=kernel, skipped=reason, mode="", fused=0, separate=0, **nothing)

    @property
    def id(self) -> str:
        """Target and kernel."""
        return f"{self.target} {self.kernel}"


@dataclass(frozen=True)
class Audits:
    """A file of audits."""

    schema: int  # version of this layout
    triton: str  # version of the compiler
    audits: tuple[Audit, ...]  # sorted by target and kernel


_COUNTS = ("fused", "separate")
_GATED = tuple(field.name for field in fields(Audit) if field.name not in ("target", "kernel", "skipped", *_COUNTS))
_HEADERS = {
    "products": "products",
    "operand_casts": "into a product",
    "output_casts": "to memory",
    "exponential": "exponential",
    "exponent": "exp of",
    "logarithm": "log",
    "division": "division",
    "contraction": "contraction",
    "flushes": "flushes",
    "mode": "mode",
}


def read(path: Path) -> Audits:
    """Read a file of audits.

    Raises:
        UnreadableRecordsError: no readable file, no JSON, a field that is missing, unknown or of the wrong kind,
            another schema, two audits of one kernel.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
        audits: Audits = decoder(Audits)(plain)
    except OSError as error:
        raise UnreadableRecordsError(f"{path}: {error.strerror or error}") from error
    except FieldError as error:
        raise UnreadableRecordsError(f"{path}: {error}") from None
    except (ValueError, RecursionError) as error:
        raise UnreadableRecordsError(f"{path}: not JSON ({str(error) or 'nested too deeply'})") from None
    if audits.schema != SCHEMA:
        raise UnreadableRecordsError(
            f"{path}: schema: {audits.schema} is not {SCHEMA}, the one that this tiebreak reads"
        )
    names = [audit.id for audit in audits.audits]
    for name in names:
        if names.count(name) > 1:
            raise UnreadableRecordsError(f"{path}: audits: {name} twice")
    return audits


def write(audits: Audits, path: Path) -> None:
    """Write a file of audits, whole or not at all.

    Raises:
        tiebreak.reports.store.UnwritableFolderError: it can't be written; an older file stays.
    """
    write_text(json.dumps(asdict(audits), indent=1, allow_nan=False) + "\n", path)


def table(audits: Sequence[Audit], cards: Mapping[str, str], tablefmt: str = "simple") -> str:
    """One table a kernel, one row a target, with the legend.

    Args:
        audits: in the order of the rows.
        cards: what each target stands for.
        tablefmt: tabulate's name of the table's style.

    Returns:
        The tables, then why what was skipped was.
    """
    parts = []
    for kernel in dict.fromkeys(audit.kernel for audit in audits):
        chosen = [audit for audit in audits if audit.kernel == kernel]
        rows = [[f"{one.target} ({cards[one.target]})", *_cells(one)] for one in chosen]
        parts += [aside(kernel, tablefmt), grid_text(rows, ["target", *_HEADERS.values()], tablefmt)]
    skips = [f"skipped {audit.id}: {audit.skipped}" for audit in audits if audit.skipped is not None]
    return "\n\n".join([*parts, *([aside("\n".join(skips), tablefmt)] if skips else []), aside(LEGEND, tablefmt)])


def _cells(audit: Audit) -> Iterator[str]:
    for name in _HEADERS:
        value: Any = getattr(audit, name)
        if audit.skipped is not None:
            yield "skip"
        else:
            counts = f" ({audit.fused}/{audit.separate})" if name == "contraction" else ""
            yield _said(value) + counts


def differences(expected: Sequence[Audit], found: Sequence[Audit]) -> list[str]:
    """Where audits are not what was expected, a line each.

    Args:
        expected: what was committed.
        found: what was compiled.

    Returns:
        Instructions that changed, kernels that were skipped on one side alone, and those that one side lacks; none if
        all agree.
    """
    old, new = ({audit.id: audit for audit in side} for side in (expected, found))
    lines = [f"{name}: expected, but not compiled" for name in old if name not in new]
    for name, audit in new.items():
        lines += _changes(old[name], audit) if name in old else [f"{name}: not in the expectation"]
    return lines


def _changes(old: Audit, new: Audit) -> list[str]:
    if old.skipped is not None and new.skipped is not None:
        return []
    if old.skipped is not None or new.skipped is not None:
        return [f"{new.id}: skipped: was {_or_no(old.skipped)}, is {_or_no(new.skipped)}"]
    return [
        f"{new.id}: {name}: was {_said(getattr(old, name))}, is {_said(getattr(new, name))}"
        for name in _GATED
        if getattr(old, name) != getattr(new, name)
    ]


def _or_no(reason: str | None) -> str:
    return "no" if reason is None else reason


def _said(value: str | tuple[str, ...]) -> str:
    return value if isinstance(value, str) else ", ".join(value) or "none"


def update(audits: Audits, path: Path) -> None:
    """Make audits the expectation.

    Raises:
        UsageError: the file has audits that these lack.
        tiebreak.reports.store.UnreadableRecordsError: there is a file at `path` that is no file of audits.
        tiebreak.reports.store.UnwritableFolderError: it can't be written; the old one stays.
    """
    if path.exists():
        names = {audit.id for audit in audits.audits}
        outside = [audit.id for audit in read(path).audits if audit.id not in names]
        if outside:
            raise UsageError(
                f"{path}: not updated: it has {outside[0]}, which was not compiled; delete it to start over"
            )
    write(audits, path)
