"""`mma.sync` and `ldmatrix`: which thread holds which element (PTX ISA, Matrix Fragments for mma and for ldmatrix)."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tiebreak.backends.emulation.tensor_cores import TensorCore, core_of, tensor_core_matmul
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.parsing import Instruction

_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col(?:\.satfinite)?\.(f32|s32)\.(\w+)\.(\w+)\.\2")
_FORMATS = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_LANE = np.arange(WARP)
_GROUP, _IN_GROUP = _LANE >> 2, _LANE & 3
# Rows and columns of the four numbers of C and D that a lane holds.
_SUM_ROWS = _GROUP[:, None] + np.array([0, 0, 8, 8])
_SUM_COLUMNS = 2 * _IN_GROUP[:, None] + np.array([0, 1, 0, 1])


@dataclass(frozen=True)
class Product:
    """One kind of `mma.sync`: 16 x 8 sums of k products each."""

    k: int  # products of a sum
    a: str  # types of the operands
    b: str
    core: TensorCore | None  # how the products are added up; None: exactly, being integers

    @cached_property
    def _places(self) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
        """Rows and columns of A's, and of B's, elements: (lanes, registers, elements of a register)."""
        size = 32 // (8 * TYPES[self.a].itemsize)  # elements of a register
        along = size * _IN_GROUP[:, None, None] + np.arange(size)
        register = np.arange(self.k // (2 * size))[None, :, None]
        rows = _GROUP[:, None, None] + 8 * (register & 1) + 0 * along
        of_a = rows, along + 4 * size * (register >> 1)
        register = np.arange(self.k // (4 * size))[None, :, None]
        return of_a, (along + 4 * size * register, _GROUP[:, None, None] + 0 * along + 0 * register)

    def __call__(self, a: Sequence[Array], b: Sequence[Array], c: Sequence[Array]) -> list[Array]:
        """D = A B + C of every warp, from registers to registers: uint32 of (blocks, threads) each."""
        of_a, of_b = self._places
        left = _tile(a, TYPES[self.a], (16, self.k), of_a)
        right = _tile(b, TYPES[self.b], (self.k, 8), of_b)
        addend = _tile(c, TYPES["s32" if self.core is None else "f32"], (16, 8), (_SUM_ROWS, _SUM_COLUMNS))
        if self.core is None:
            total = (left.astype(np.float64) @ right.astype(np.float64)).astype(np.int64) + addend
            result = total.astype(np.int32)  # wraps
        else:
            a_tile, b_tile, c_tile = (torch.from_numpy(np.asarray(x, np.float32)) for x in (left, right, addend))
            result = tensor_core_matmul(a_tile, b_tile, c_tile, self.core).numpy()
        lanes = result.view(np.uint32)[:, _SUM_ROWS, _SUM_COLUMNS].reshape(*c[0].shape, 4)
        return [np.ascontiguousarray(lanes[..., at]) for at in range(4)]


def _tile(
    registers: Sequence[Array], dtype: np.dtype[Any], shape: tuple[int, int], places: tuple[Array, Array]
) -> Array:
    """(warps, rows, columns) of what the lanes of each warp hold."""
    (rows, columns), held = places, np.stack(registers, -1).view(dtype)
    tile: Array = np.empty((held.shape[0] * held.shape[1] // WARP, *shape), dtype)
    tile[:, rows, columns] = held.reshape(-1, *rows.shape)
    return tile


def product_of(instruction: Instruction, card: str) -> Product:
    """The product that a card computes by this instruction.

    Raises:
        CannotRunError: it is not known.
    """
    match = _MMA.fullmatch(instruction.opcode)
    if match is None:
        raise instruction.refused()
    k, result, a, b = match.groups()
    if result == "s32" and {a, b} <= {"s8", "u8"}:
        return Product(int(k), a, b, None)
    try:
        return Product(int(k), a, b, core_of(card, _FORMATS[a], _FORMATS[b]))
    except (KeyError, ValueError) as error:
        raise instruction.refused() from error


def shared_out(rows: Array, count: int, *, transposed: bool) -> list[Array]:
    """`ldmatrix`: of (blocks, threads, 8) rows of matrices, uint16, what lies in `count` registers of every thread."""
    matrices = rows.reshape(rows.shape[0], -1, 4, 8, 8)[:, :, :count]
    matrices = matrices.swapaxes(-1, -2) if transposed else matrices
    pairs = np.ascontiguousarray(matrices).view(np.uint32)  # two columns side by side
    shape = rows.shape[:2]
    return [np.ascontiguousarray(pairs[:, :, at, _GROUP, _IN_GROUP]).reshape(shape) for at in range(count)]
