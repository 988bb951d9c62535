"""Products of a warp: which thread holds which element (PTX ISA, Matrix Fragments for mma, wgmma and ldmatrix)."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tiebreak.backends.emulation.tensor_cores import TensorCore, core_of, tensor_core_matmul
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.kernel import CannotRunError

FORMATS = {"f16": "fp16", "bf16": "bf16", "tf32": "tf32", "e4m3": "fp8_e4m3", "e5m2": "fp8_e5m2"}
KINDS = rf"(?P<a>{'|'.join(FORMATS)})\.(?P<b>{'|'.join(FORMATS)})"  # in the names of products of fp32 sums


@dataclass(frozen=True)
class Product:
    """One kind of product: 16 x n sums of k products each, which a warp holds in registers, uint32 (..., threads)."""

    k: int  # products of a sum
    a: str  # types of the operands
    b: str
    core: TensorCore  # how the products are added up
    n: int = 8

    def left(self, registers: Sequence[Array]) -> Array:
        """Return A, fp32 (warps, 16, k)."""
        size = 4 // TYPES[self.a].itemsize  # elements of a register
        lanes = [x.reshape(-1, 8, 4, 1).view(TYPES[self.a]) for x in registers]
        tile = np.empty((len(lanes[0]), 2, 8, len(lanes) // 2, 4, size), np.float32)
        for number, x in enumerate(lanes):
            tile[:, number % 2, :, number // 2] = x
        return tile.reshape(-1, 16, self.k)

    def right(self, registers: Sequence[Array]) -> Array:
        """Return the columns of B, fp32 (warps, 8, k)."""
        lanes = [x.reshape(-1, 8, 4, 1).view(TYPES[self.b]) for x in registers]
        return np.stack(lanes, 2).astype(np.float32).reshape(-1, 8, self.k)

    def sums(self, registers: Sequence[Array]) -> Array:
        """Return C, fp32 (warps, 16, n)."""
        tile = np.empty((registers[0].size // WARP, 2, 8, self.n // 8, 4, 2), np.float32)
        for number, x in enumerate(registers):
            tile[:, number // 2 % 2, :, number // 4, :, number % 2] = x.reshape(-1, 8, 4).view(np.float32)
        return tile.reshape(-1, 16, self.n)

    def registers(self, sums: Array, shape: tuple[int, ...]) -> Iterator[Array]:
        """Yield the registers that have D, as `sums` takes C from them, of this shape."""
        tile = sums.view(np.uint32).reshape(-1, 2, 8, self.n // 8, 4, 2)
        for number in range(self.n // 2):
            yield tile[:, number // 2 % 2, :, number // 4, :, number % 2].reshape(shape)


def multiplied(left: Array, right: Array, pairs: tuple[Array, Array], sums: Array, core: TensorCore) -> Array:
    """Return left[i] @ right[j].T + sums of every pair of i and j, fp32 (pairs, 16, n).

    Rows that are alike and one after the other, as padding is, are multiplied once, and those that add nothing never.

    Args:
        left: (some, 16, k)
        right: (some, n, k)
        pairs: i and j.
        sums: what is there.
        core: how the products are added up.
    """
    made = sums + np.float32(0)  # what adding nothing leaves
    of_left, of_right = pairs
    # Zeros add nothing, except to Inf and NaN, and to what has more bits than a term keeps.
    skips = core.result is FP32 and core.fraction_bits > FP32.mantissa_bits and np.isfinite(left.sum() + right.sum())
    rows, columns = (_any(x != 0) | (not skips) for x in (left, right))
    tile, row = (rows[of_left] & _any(columns)[of_right, None]).nonzero()
    if not len(tile):
        return made
    differs = _differs(right)
    right, of_right = right[differs], (np.cumsum(differs) - 1)[of_right]
    shown = columns.any(0)
    a, b, c = left[of_left[tile], row], of_right[tile], made[tile, row] if shown.all() else made[tile, row][:, shown]
    new = _differs(a) | _differs(b[:, None]) | _differs(c)
    several = _rows_of(a[new], right[:, shown], b[new], c[new], core)
    whole = made if shown.all() else made[..., shown]
    whole[tile, row] = several[np.cumsum(new) - 1]
    made[..., shown] = whole
    return made


def _differs(x: Array) -> Array:
    """Return whether each is another, bit by bit, than the one before it."""
    words = x.reshape(len(x), -1).view(np.uint32)
    different = np.ones(len(x), bool)
    different[1:] = _any(words[1:] != words[:-1])
    return different


def _any(x: Array) -> Array:
    """Return `x.any(-1)`, in words of several: numpy begins anew for every row."""
    words = np.ascontiguousarray(x).view(f"u{math.gcd(x.shape[-1], 8)}")
    met: Array = functools.reduce(np.bitwise_or, np.moveaxis(words, -1, 0)) != 0
    return met


def _rows_of(a: Array, right: Array, b: Array, c: Array, core: TensorCore) -> Array:
    """Return a @ right[b].T + c, row by row, where rows of one b stand together: in tiles of them."""
    start = np.flatnonzero(_differs(b[:, None]))
    count = np.diff(start, append=len(b))
    height = min((2**power for power in range(8)), key=lambda rows: int((-(-count // rows)).sum()) * (rows + 1))
    tiles = -(-count // height)
    place = np.arange(len(b)) + np.repeat(height * (np.cumsum(tiles) - tiles) - start, count)
    there = np.zeros(height * tiles.sum(), np.int64)  # unused rows of a tile are like the first of all
    there[place] = np.arange(len(b))
    left, columns, sums = (
        torch.from_numpy(x)
        for x in (
            a[there].reshape(-1, height, a.shape[1]),
            right[np.repeat(b[start], tiles)].swapaxes(1, 2),
            c[there].reshape(-1, height, c.shape[1]),
        )
    )
    made: Array = tensor_core_matmul(left, columns, sums, core).numpy().reshape(-1, c.shape[1])[place]
    return made


@functools.cache
def product_of(card: str, k: str, a: str, b: str, n: str = "8") -> Product:
    """Return a product as a card computes it; raise CannotRunError if its bits are unknown."""
    try:
        return Product(int(k), a, b, core_of(card, FORMATS[a], FORMATS[b]), int(n))
    except ValueError as error:
        raise CannotRunError(str(error)) from error


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
