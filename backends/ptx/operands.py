"""The operands of instructions: how threads read and write what they name."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.parsing import Address, Instruction, Operand
from tiebreak.backends.ptx.threads import Threads
from tiebreak.kernels.kernel import CannotRunError

#: What the threads of a mask, bool (blocks, threads), do; and which of them can't go on yet, having done nothing.
Run = Callable[[Threads, Array], Array | None]
Read = Callable[[Threads], Array]
_SPECIAL = re.compile(
    r"%(?:tid\.x|(?:n?cta|cluster)id\.[xyz]|laneid|cluster_ctarank)"
)  # a block is alone in its cluster


def idle(_: Instruction, __: re.Match[str]) -> Run:
    """Bind an instruction that changes nothing here."""
    return lambda threads, mask: None


def reader(operand: Operand, kind: str, at: Instruction) -> Read:
    """Return a function that reads an operand as numbers of a type; x2 gives (blocks, threads, 2)."""
    dtype, name = TYPES[kind.removesuffix("x2")], str(operand)
    size = dtype.itemsize * (2 if kind.endswith("x2") else 1)
    if name in at.types or _SPECIAL.fullmatch(name):
        return lambda threads: typed(threads.get(name), dtype, size)
    try:  # a number, of fp32 and fp64 its bits
        bits = int(re.sub("^0[fFdD]", "0x", name).rstrip("U"), 0)
    except ValueError as error:
        raise CannotRunError(f"{at} names {name}, which is not known here") from error
    constant = np.array([[bits % 2 ** (8 * size)]], f"u{size}")
    return lambda _: typed(constant != 0 if kind == "pred" else constant, dtype, size)


def typed(x: Array, dtype: np.dtype[Any], size: int) -> Array:
    """Return the numbers that a register's bits are: two where it is twice as wide as one."""
    if x.dtype == dtype:
        return x
    x = x if x.itemsize == size else x.astype(f"u{size}")
    return x.view(dtype) if dtype.itemsize == size else x[..., None].view(dtype)


def writer(operand: Operand, at: Instruction) -> Callable[[Threads, int, Array, Array], None]:
    """Return a function that writes one of an operand's registers, by its number; one called _ is discarded."""
    names = names_of(operand)
    if any(name not in at.types and name != "_" for name in names):
        raise at.refused()
    sizes = [TYPES[at.types[name]].itemsize if name != "_" else 0 for name in names]

    def write(threads: Threads, number: int, value: Array, mask: Array) -> None:
        if sizes[number]:
            threads.put(names[number], sizes[number], value, mask)

    return write


def names_of(operand: Operand) -> tuple[str, ...]:
    """Return the registers of an operand."""
    return operand if isinstance(operand, tuple) else (str(operand),)


def place_of(operand: Operand, at: Instruction) -> Read:
    """Return a function that reads an address, int64, of every thread."""
    assert isinstance(operand, Address)
    base, offset = reader(operand.base, "s64", at), operand.offset
    return lambda threads: threads.full(base(threads) + offset)
