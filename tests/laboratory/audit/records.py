"""The audit of compiled kernels: which instructions round, as a record, a file, a gate and tables.

The tables, one a kernel with a row a target, are the same for the verb `audit`, for `show` and for the page.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, get_type_hints

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.files import FileKind
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import Data, FieldError, FileData, Integer, Schema
from tiebreak.reports.records.order import grouped
from tiebreak.reports.tables.compare import distinct
from tiebreak.reports.tables.grids import Grid, Part, html

_UNGATED = ("target", "kernel", "skipped", "fused", "separate")
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

LEGEND = (
    "matrix instruction: its K (k16), types of its operands -> of its accumulator\n"
    "cast into a product: of what a matrix product takes: P̄ (backward: P, dS)\n"
    "cast to memory: of what the kernel stores: O (backward: dQ, dK, dV; standard's softmax: P)\n"
    "exp of: the operation that formed the exponential's argument\n"
    "contraction: whether products and sums are fused into fma (fma/separate: how many of each)\n"
    "flushes: instructions that take subnormals for zero; mode: how additions and multiplications round\n"
    "none: no such instruction; skip: not compiled"
)


class Audit(Data, frozen=True, omit_defaults=False):
    """The rounding that one kernel's assembly for one target shows. Lists are sorted, each kind once."""

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
    fused: Integer  # how many fma the softmax has; not gated: it changes with the schedule
    separate: Integer  # how many other multiplications and additions; not gated

    @classmethod
    def skip(cls, target: str, kernel: str, reason: str) -> "Audit":
        """Make the audit of a kernel that was not compiled."""
        nothing: dict[str, Any] = {name: () for name, kind in get_type_hints(cls).items() if kind == tuple[str, ...]}
        return cls(target=target, kernel=kernel, skipped=reason, mode="", fused=0, separate=0, **nothing)

    @property
    def id(self) -> str:
        """The target and the kernel."""
        return f"{self.target} {self.kernel}"


class Audits(FileData, frozen=True):
    """A file of audits."""

    schema: Schema  # version of this layout
    triton: str  # version of the compiler
    cards: Mapping[str, str]  # by target: what a user would buy
    audits: tuple[Audit, ...]  # one target's after the other's

    @property
    def kernels(self) -> list[str]:
        """The names of the kernels, each once."""
        return list(dict.fromkeys(audit.kernel for audit in self.audits))

    def check(self) -> None:
        """Compare audits with each other and the cards; FieldError: one kernel twice, or a target without its cards."""
        for name, often in Counter(audit.id for audit in self.audits).items():
            if often > 1:
                raise FieldError(f"{name} twice", "audits")
        for audit in self.audits:
            if audit.target not in self.cards:
                raise FieldError("missing", f"cards.{audit.target}")


def differences(expected: Sequence[Audit], compiled: Sequence[Audit]) -> list[str]:
    """List how audits differ from the expected ones, a line each: instructions, kernels that one side lacks."""
    old, new = ({audit.id: audit for audit in side} for side in (expected, compiled))
    lines = [f"{name}: expected, but not compiled" for name in old if name not in new]
    for name, audit in new.items():
        lines += _changes(old[name], audit) if name in old else [f"{name}: not in the expectation"]
    return lines


def _changes(old: Audit, new: Audit) -> list[str]:
    if (old.skipped is None) != (new.skipped is None):
        return [f"{new.id}: skipped: was {old.skipped or 'no'}, is {new.skipped or 'no'}"]
    pairs = {name: (getattr(old, name), getattr(new, name)) for name in Audit.__struct_fields__ if name not in _UNGATED}
    return [
        f"{new.id}: {name}: was {', '.join(kinds(was))}, is {', '.join(kinds(now))}"
        for name, (was, now) in pairs.items()
        if was != now
    ]


def kinds(value: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return a field as tables and messages show it: its kinds, or that there is none."""
    return (value,) if isinstance(value, str) else value or ("none",)


def check_update(path: Path, coming: Collection[tuple[str, str]]) -> None:
    """Raise UsageError, before minutes of compiling, if a file can't take the audits of targets and kernels to come."""
    store.check_writable(path.parent)
    for audit in store.load(path, Audits).audits if path.exists() else ():
        if (audit.target, audit.kernel) not in coming:
            raise UsageError(f"{path}: not updated: it has {audit.id}, not asked for; delete it to start over")


def audit_tables(audits: Audits) -> list[Part]:
    """Return a table a kernel, with a row a target, then reasons of skips, where they come from, the legend."""
    parts: list[Part] = []
    for kernel, group in grouped(audits.audits, lambda audit: audit.kernel).items():
        rows = [
            [f"{audit.target} ({audits.cards[audit.target]})", *map(partial(_cell, audit), _COLUMNS)] for audit in group
        ]
        parts.append(Grid(["target", *_COLUMNS.values()], rows, kernel))
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
    """Return a row an audit; a kind without entries is empty."""
    names = Audit.__struct_fields__
    rows = [
        [audits.triton, audits.cards[each.target], *(getattr(each, name) for name in names)] for each in audits.audits
    ]
    rows = [["\n".join(value) if isinstance(value, tuple) else value for value in row] for row in rows]
    return Grid(["triton", "cards", *names], rows)


def _on_page(files: Mapping[Path, Audits]) -> str:
    labels = distinct([f"Triton {audits.triton}" for audits in files.values()], list(files))
    parts = ['<h2 id="audit">Audit: what GPUs that need not be here would round</h2>']
    for label, audits in zip(labels, files.values(), strict=True):
        parts += [f"<h3>{escape(label)}</h3>"] if len(files) > 1 else []
        parts.append(html(audit_tables(audits)))
    return "\n".join(parts)


KIND = FileKind(
    Audits,
    "an audit of compiled kernels",
    told_by="audits",
    parts=audit_tables,
    grid=csv_grid,
    kernels=lambda audits: audits.kernels,
    only=lambda audits, names: replace(audits, audits=tuple(each for each in audits.audits if each.kernel in names)),
    page=_on_page,
)
