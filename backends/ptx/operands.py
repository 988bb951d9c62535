"""The operands of instructions: how threads read and write what they name, and rows of tables that say which.

A row has the name of instructions, a word for each of their operands, and a function. The words are
    a type      every thread's number, of registers in braces the one that they are together; with * a list of them
    at          an address in brackets, int64, as which such a one is read whatever its word is
    n           a number in the text
    w           registers that the function's result is written to
    to          registers that the function is given a function to write to
    =1|2        one of these texts is expected
    -           an operand that is ignored; ... ignores all that follow
and an operand whose word has a ? may be left out.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.parsing import Address, Instruction, Operand
from tiebreak.backends.ptx.threads import Threads
from tiebreak.kernels.kernel import CannotRunError

#: What the threads of a mask, bool (blocks, threads), do; and which of them can't go on yet, having done nothing.
Run = Callable[[Threads, Array], Array | None]
Read = Callable[[Threads], Any]
# A block is alone in its cluster.
_SPECIAL = re.compile(r"%(?:tid\.x|(?:n?cta|cluster)id\.[xyz]|laneid|cluster_ctarank)")
_OF_WARPS = re.compile(r"(?!wgmma|bar\.sync|barrier).*\.sync\b")  # whose threads have to come together


class OpcodeRow(NamedTuple):
    """Some instructions that memory or other threads take part in."""

    name: str  # a regular expression; its named groups are words of the function
    operands: str  # words; {} stands for a group
    act: Callable[..., Any]  # of threads, a mask, and what was read; returns what is written, or who has to wait


def idle(*_: object, **__: object) -> None:
    """Change nothing."""


def bound_to(row: OpcodeRow, at: Instruction, **groups: str | None) -> Run:
    """Return what an instruction does whose name a row has; raise CannotRunError if its operands are others."""
    kinds, write, reads = row.operands.format(**groups).split(), None, list[Read]()
    for kind in [kind for kind in kinds if kind[-1] == "?"]:
        if len(kinds) > len(at.operands):
            kinds.remove(kind)
    if kinds[-1:] != ["..."] and len(kinds) != len(at.operands):
        raise at.refused()
    for operand, kind in zip(at.operands, kinds, strict=False):
        if kind[0] == "=" and operand not in kind[1:].split("|"):
            raise at.refused()
        if kind == "w":
            write = writer(operand, at)
        elif kind not in ("-", "-?", "...") and kind[0] != "=":
            reads.append(_argument(operand, kind.rstrip("?"), at))

    of_warps = _OF_WARPS.match(at.opcode) is not None

    def run(threads: Threads, mask: Array) -> Array | None:
        if of_warps:
            threads.warps(mask)
        made = row.act(threads, mask, *[read(threads) for read in reads], **groups)
        if write is None:
            waits: Array | None = made
            return waits
        write(threads, made, mask)
        return None

    return run


def _argument(operand: Operand, kind: str, at: Instruction) -> Read:
    """Return a function that reads what a row's function is given for an operand."""
    if kind == "n":
        number = int(str(operand), 0)
        return lambda _: number
    if kind == "to":
        write = writer(operand, at)
        return lambda _: write
    if kind == "at" and not isinstance(operand, Address):
        raise at.refused()
    several, kind = kind[-1] == "*", kind.rstrip("*")
    if several:
        reads = [reader(name, kind, at) for name in names_of(operand)]
        return lambda threads: [threads.full(read(threads)) for read in reads]
    read = reader(operand, kind, at)
    return lambda threads: threads.full(read(threads))


def reader(operand: Operand, kind: str, at: Instruction) -> Read:
    """Return a function that reads an operand as numbers of a type, which broadcast to (blocks, threads); x2: two."""
    if isinstance(operand, Address):
        base, offset = reader(operand.base, "s64", at), operand.offset
        return lambda threads: base(threads) + offset
    dtype = TYPES[kind.removesuffix("x2")]
    size = dtype.itemsize * (2 if kind.endswith("x2") else 1)
    if isinstance(operand, tuple):
        parts = [reader(name, f"u{8 * size // len(operand)}", at) for name in operand]
        return lambda threads: typed(
            np.stack(np.broadcast_arrays(*(part(threads) for part in parts)), -1).view(f"u{size}")[..., 0], dtype, size
        )
    if operand in at.types or _SPECIAL.fullmatch(operand):
        return lambda threads: typed(threads.get(operand), dtype, size)
    try:  # a number, of fp32 and fp64 its bits
        bits = int(re.sub("^0[fFdD]", "0x", operand).rstrip("U"), 0)
    except ValueError as error:
        raise CannotRunError(f"{at} names {operand}, which is not known here") from error
    constant = np.array([[bits % 2 ** (8 * size)]], f"u{size}")
    return lambda _: typed(constant != 0 if kind == "pred" else constant, dtype, size)


def typed(x: Array, dtype: np.dtype[Any], size: int) -> Array:
    """Return the numbers that a register's bits are: two where it is twice as wide as one."""
    if x.dtype == dtype:
        return x
    x = x if x.itemsize == size else x.astype(f"u{size}")
    return x.view(dtype) if dtype.itemsize == size else x[..., None].view(dtype)


def writer(operand: Operand, at: Instruction) -> Callable[[Threads, Any, Array], None]:
    """Return a function that writes an operand: arrays to its registers in turn, or an array in equal parts to all.

    What goes to the register _ is discarded.
    """
    names = names_of(operand)
    if any(name not in at.types and name != "_" for name in names):
        raise at.refused()
    sizes = [TYPES[at.types[name]].itemsize if name != "_" else 0 for name in names]

    def write(threads: Threads, made: Any, mask: Array) -> None:
        if isinstance(made, np.ndarray):
            made = (made,) if len(names) == 1 else _parts(made, len(names))
        for name, size, value in zip(names, sizes, made, strict=True):
            if size:
                threads.put(name, size, value, mask)

    return write


def _parts(whole: Array, count: int) -> list[Array]:
    """Return numbers in as many parts, the lowest first."""
    parts = np.ascontiguousarray(whole)[..., None].view(f"u{whole.itemsize // count}")
    return [np.ascontiguousarray(parts[..., number]) for number in range(count)]


def names_of(operand: Operand) -> tuple[str, ...]:
    """Return the registers of an operand."""
    return operand if isinstance(operand, tuple) else (str(operand),)
