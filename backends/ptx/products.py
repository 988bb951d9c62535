"""`mma.sync` and `ldmatrix`: which thread holds which element (PTX ISA, Matrix Fragments for mma and for ldmatrix)."""

import re
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
_MIXING = np.random.default_rng(0).integers(2**63, size=WARP * 8, dtype=np.uint64) * 2 + 1  # odd: no bit is lost
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

    def __call__(self, a: Array, b: Array, c: Array) -> Array:
        """Return D = A B + C of every warp, from registers to registers: uint32, (..., threads, registers)."""
        held = [x.reshape(-1, WARP * x.shape[-1]) for x in (a, b, c)]
        first, number = _distinct(np.concatenate(held, 1))
        kinds, shapes = (self.a, self.b, "f32"), ((16, self.k), (self.k, 8), (16, 8))
        left, right, sums = map(_tile, (x[first] for x in held), kinds, shapes, self._places)
        d = tensor_core_matmul(left, right, sums, self.core).numpy().view(np.uint32)
        rows, columns = self._places[2]
        return d[:, rows, columns][number].reshape(c.shape)


def _distinct(rows: Array) -> tuple[Array, Array]:
    """Return where distinct rows, uint32, stand first, and the number of each row's: padding is much the same."""
    keys = np.ascontiguousarray(rows).view(np.uint64)
    _, first, number = np.unique(keys @ _MIXING[: keys.shape[1]], return_index=True, return_inverse=True)
    if np.array_equal(keys[first[number]], keys):
        return first, number
    return np.arange(len(rows)), np.arange(len(rows))  # two have one hash


def _tile(held: Array, kind: str, shape: tuple[int, int], places: _Places) -> torch.Tensor:
    """Return the tile that the lanes of each warp hold together, (warps, rows, columns), fp32."""
    values: Any = held.view(TYPES[kind])
    tile = np.empty((len(held), *shape), np.float32)
    tile[:, places[0], places[1]] = values.reshape(-1, *np.broadcast_shapes(places[0].shape, places[1].shape))
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
