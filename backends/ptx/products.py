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

_MMA = re.compile(r"mma\.sync\.aligned\.m16n8k(\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32")
_FORMATS = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_GROUP, _IN_GROUP = (np.arange(WARP) >> 2)[:, None, None], (np.arange(WARP) & 3)[:, None, None]
_Places = tuple[Array, Array]  # rows and columns: (lanes, registers, elements of a register)


@dataclass(frozen=True)
class Product:
    """One kind of `mma.sync`: 16 x 8 sums of k products each."""

    k: int  # products of a sum
    a: str  # types of the operands
    b: str
    core: TensorCore  # how the products are added up

    @cached_property
    def _places(self) -> tuple[_Places, _Places, _Places]:
        """The places of A's, B's and C's elements in the registers of a warp."""
        size = 4 // TYPES[self.a].itemsize  # elements of a register
        register, along = np.arange(4)[None, :, None], size * _IN_GROUP + np.arange(size)
        of_a, of_b = register[:, : self.k // (2 * size)], register[:, : self.k // (4 * size)]
        return (
            (_GROUP + 8 * (of_a & 1) + 0 * along, along + 4 * size * (of_a >> 1)),
            (along + 4 * size * of_b, _GROUP + 0 * along + 0 * of_b),
            (_GROUP + 8 * (register >> 1), 2 * _IN_GROUP + (register & 1)),
        )

    def __call__(self, *operands: Sequence[Array]) -> list[Array]:
        """Return D = A B + C of every warp, from registers to registers: uint32 of (blocks, threads) each."""
        types, shapes = (self.a, self.b, "f32"), ((16, self.k), (self.k, 8), (16, 8))
        a, b, c = map(_tile, operands, types, shapes, self._places)
        rows, columns = self._places[2]
        lanes = tensor_core_matmul(a, b, c, self.core).numpy().view(np.uint32)[:, rows, columns]
        return [lanes[..., at, 0].reshape(operands[2][0].shape) for at in range(4)]


def _tile(registers: Sequence[Array], kind: str, shape: tuple[int, int], places: _Places) -> torch.Tensor:
    """Return the tile that the lanes of each warp hold together, (warps, rows, columns), fp32."""
    held: Any = np.stack(registers, -1).view(TYPES[kind])
    tile = np.empty((held.shape[0] * held.shape[1] // WARP, *shape), np.float32)
    tile[:, places[0], places[1]] = held.reshape(-1, *np.broadcast_shapes(places[0].shape, places[1].shape))
    return torch.from_numpy(tile)


def product_of(instruction: Instruction, card: str) -> Product:
    """Return the product that a card computes by this instruction; raise CannotRunError if it is unknown."""
    k, a, b = match.groups() if (match := _MMA.fullmatch(instruction.opcode)) else ("", "", "")
    try:
        return Product(int(k), a, b, core_of(card, _FORMATS[a], _FORMATS[b]))
    except (KeyError, ValueError) as error:
        raise instruction.refused() from error


def load_matrices(rows: Array, count: int, *, transposed: bool) -> list[Array]:
    """Compute `ldmatrix`: from rows of matrices, uint16 (blocks, threads, 8), the `count` registers of every thread."""
    matrices = rows.reshape(rows.shape[0], -1, 4, 8, 8)[:, :, :count]
    matrices = matrices.swapaxes(-1, -2) if transposed else matrices
    pairs = np.ascontiguousarray(matrices).view(np.uint32)  # two columns side by side
    return [pairs[:, :, at].reshape(*rows.shape[:2]) for at in range(count)]
