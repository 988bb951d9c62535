"""Products of a warp: which thread holds which element (PTX ISA, Matrix Fragments for mma, wgmma and ldmatrix)."""

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

_MMA = re.compile(
    r"mma\.sync\.aligned\.m16n(8)k(\d+)\.row\.col\.f32\.(\w+)\.(\w+)\.f32"
    r"|wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k(\d+)\.f32\.(\w+)\.(\w+)"
)
FORMATS = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
_GROUP, _IN_GROUP = (np.arange(WARP) >> 2)[:, None, None], (np.arange(WARP) & 3)[:, None, None]
_MIXING = np.random.default_rng(0).integers(2**63, size=2**12, dtype=np.uint64) * 2 + 1  # odd: no bit is lost
_Places = tuple[Array, Array]  # rows and columns: (lanes, registers, elements of a register)


@dataclass(frozen=True)
class Product:
    """One kind of product: 16 x n sums of k products each, which a warp holds."""

    k: int  # products of a sum
    a: str  # types of the operands
    b: str
    core: TensorCore  # how the products are added up
    n: int = 8

    @cached_property
    def _places(self) -> tuple[_Places, _Places, _Places]:
        """The places of A's, B's and C's elements in the registers of a warp."""
        size = 4 // TYPES[self.a].itemsize  # elements of a register
        register, along = np.arange(self.n // 2)[None, :, None], size * _IN_GROUP + np.arange(size)
        of_a, of_b = register[:, : self.k // (2 * size)], register[:, : self.k // (4 * size)]
        return (
            (_GROUP + 8 * (of_a & 1) + 0 * along, along + 4 * size * (of_a >> 1)),
            (along + 4 * size * of_b, _GROUP + 0 * along + 0 * of_b),
            (_GROUP + 8 * (register >> 1 & 1), 8 * (register >> 2) + 2 * _IN_GROUP + (register & 1)),
        )

    def __call__(self, a: Array, b: Array, c: Array) -> Array:
        """Return D = A B + C of every warp, from registers to registers: uint32, (..., threads, registers)."""
        held = [x.reshape(-1, WARP * x.shape[-1]) for x in (a, b, c)]
        first, number = _distinct(np.concatenate(held, 1))
        right = _tile(held[1][first], self.b, (self.k, self.n), self._places[1])
        sums = _tile(held[2][first], "f32", (16, self.n), self._places[2])
        tiles = [torch.from_numpy(x) for x in (self.rows(held[0][first]), right, sums)]
        d = tensor_core_matmul(tiles[0], tiles[1], tiles[2], self.core).numpy()
        return self._registers(d)[number].reshape(c.shape)

    def of_tiles(self, left: Array, right: Array, which: Array, c: Array) -> Array:
        """Return D = A B + C of every warp as `multiplied`, where C and D are registers, uint32 (..., registers)."""
        sums = _tile(c.reshape(len(left), -1), "f32", (16, self.n), self._places[2])
        return self._registers(multiplied(left, right, which, sums, self.core)).reshape(c.shape)

    def rows(self, held: Array) -> Array:
        """Return the rows of A that warps hold in registers, (warps, 16, k), fp32."""
        return _tile(held, self.a, (16, self.k), self._places[0])

    def _registers(self, d: Array) -> Array:
        return d.view(np.uint32)[:, self._places[2][0][..., 0], self._places[2][1][..., 0]]


def multiplied(left: Array, right: Array, which: Array, sums: Array, core: TensorCore) -> Array:
    """Return left @ right[which] + sums, fp32, all (some, 16, ...), where `right` may have fewer: each product once."""
    parts = [x.reshape(len(left), -1).view(np.uint32) for x in (left, sums)]
    first, number = _distinct(np.concatenate([*parts, np.repeat(which.astype(np.uint32), 2).reshape(-1, 2)], 1))
    a, b, c = map(torch.from_numpy, (left[first], right[which[first]], sums[first]))
    made: Array = tensor_core_matmul(a, b, c, core).numpy()[number]
    return made


def _distinct(rows: Array) -> tuple[Array, Array]:
    """Return where distinct rows, uint32, stand first, and the number of each row's: padding is much the same."""
    keys = np.ascontiguousarray(rows).view(np.uint64)
    _, first, number = np.unique(keys @ _MIXING[: keys.shape[1]], return_index=True, return_inverse=True)
    if np.array_equal(keys[first[number]], keys):
        return first, number
    return np.arange(len(rows)), np.arange(len(rows))  # two have one hash


def _tile(held: Array, kind: str, shape: tuple[int, int], places: _Places) -> Array:
    """Return the tile that the lanes of each warp hold together, (warps, rows, columns), fp32."""
    values: Any = held.view(TYPES[kind])
    tile = np.empty((len(held), *shape), np.float32)
    tile[:, places[0], places[1]] = values.reshape(-1, *np.broadcast_shapes(places[0].shape, places[1].shape))
    return tile


def product_of(instruction: Instruction, card: str) -> Product:
    """Return the product that a card computes by this instruction; raise CannotRunError if it is unknown."""
    match = _MMA.fullmatch(instruction.opcode)
    n, k, a, b = filter(None, match.groups()) if match else ("8", "0", "", "")
    try:
        return Product(int(k), a, b, core_of(card, FORMATS[a], FORMATS[b]), int(n))
    except (KeyError, ValueError) as error:
        raise instruction.refused() from error


def load_matrices(rows: Array, count: int, *, transposed: bool) -> list[Array]:
    """Compute `ldmatrix`: from rows of matrices, uint16 (blocks, threads, 8), the `count` registers of every thread."""
    matrices = rows.reshape(rows.shape[0], -1, 4, 8, 8)[:, :, :count]
    matrices = matrices.swapaxes(-1, -2) if transposed else matrices
    pairs = np.ascontiguousarray(matrices).view(np.uint32)  # two columns side by side
    return [pairs[:, :, at].reshape(*rows.shape[:2]) for at in range(count)]


def matrix_rows(registers: Sequence[Array], *, transposed: bool) -> list[Array]:
    """Compute `stmatrix`: from registers the four words of the row whose address a thread names, uint32 each."""
    shape, lane = registers[0].shape, np.arange(WARP) % (8 * len(registers))
    held = np.stack([x.reshape(len(x), -1, WARP) for x in registers], 2)
    matrices = held.view(np.uint16).reshape(*held.shape[:3], 8, 8)
    words = np.ascontiguousarray(matrices.swapaxes(-1, -2) if transposed else matrices).view(np.uint32)
    return [words[:, :, lane // 8, lane % 8, word].reshape(shape) for word in range(4)]
