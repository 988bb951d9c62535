"""`wgmma`: products of four warps at once, with operands in shared memory, that are done when somebody has waited.

Sums are computed where they are asked for. What a card might not have yet is an error: a register, or a place of shared
memory, that a product is still at work on, or that it does not see without a fence.
"""

from collections.abc import Sequence

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARPGROUP
from tiebreak.backends.ptx.operands import OpcodeRow, names_of
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.products import KINDS, multiplied, product_of
from tiebreak.backends.ptx.threads import Threads

_ROWS = 64  # of the product of a warpgroup
_WIDTHS = {0: 16, 2: 128, 4: 64, 6: 32}  # bytes of a swizzled row, by bits 61 to 63 of a descriptor, on sm_100 too
_FIELD = 0x3FFF  # bits of an address, or of an offset, in 16 bytes


def _offsets(count: int, k: int, size: int, turned: bool, descriptor: int) -> Array:
    """Return the place, in bytes, of every element (count, k) of an operand before the swizzle.

    Eight swizzled rows are a matrix, and a descriptor has the strides between these (PTX ISA, wgmma, Strides). If
    `turned`, neighbours along rows or columns lie side by side, otherwise neighbours along k.
    """
    width, leading, stride = _WIDTHS[descriptor >> 61], *((descriptor >> at & _FIELD) << 4 for at in (16, 32))
    outer, along = np.arange(count)[:, None], np.arange(k)[None]
    if turned:
        each = width // size  # elements of a swizzled row
        far, deep = (leading, stride) if width > 16 else (stride, leading)
        return outer % each * size + outer // each * far + along % 8 * width + along // 8 * deep
    beside = along * size if width > 16 else along * size // 16 * leading + along * size % 16
    return outer % 8 * width + outer // 8 * stride + beside


def tiles(
    threads: Threads, descriptors: Array, owner: Sequence[Array], shape: tuple[int, int], kind: str, turned: bool
) -> Array:
    """Return what descriptors name, fp32 (descriptors, rows or columns, k); `owner`: its block, and who reads it."""
    (layout,) = {int(each) & ~_FIELD for each in descriptors}
    if layout >> 49 & 15 or layout >> 61 not in _WIDTHS:  # a base offset, another mode
        raise threads.instruction.refused()
    width = _WIDTHS[layout >> 61]
    starts, number = np.unique((descriptors & np.uint64(_FIELD)).astype(np.int64) * 16, return_inverse=True)
    places = starts[:, None, None] + _offsets(*shape, TYPES[kind].itemsize, turned, layout)
    places ^= places >> 3 & width - 16  # the swizzle is one of addresses: a descriptor may begin within a row
    block, column = owner
    return threads.shared.operands(places[number], block, TYPES[kind], column).astype(np.float32)


def _multiply(
    threads: Threads,
    mask: Array,
    of_a: list[Array],
    of_b: Array,
    keeps: Array,
    *turned: int,
    **kinds: str,
) -> Array | None:
    """Multiply where all four warps have come: A is in registers, or named by a descriptor as B is."""
    names, a_names = map(names_of, threads.instruction.operands[:2])
    groups, waits = threads.gathered(mask, WARPGROUP)
    owner = block, _ = groups.nonzero()
    if not len(block):
        return waits
    product, held = product_of("sm_90", **kinds), len(a_names) > 1
    *a_turned, b_turned = turned or (0, 0)
    numbers = slice(None) if groups.all() else groups.ravel().nonzero()[0]

    def taken(value: Array) -> Array:
        """Return a register of the threads that multiply, (warpgroups, threads)."""
        return threads.full(value).reshape(-1, WARPGROUP)[numbers]

    a, keep, columns = [taken(value) for value in of_a], taken(keeps), taken(of_b)[:, 0]
    c = [taken(value) if keep.all() else np.where(keep, taken(value), np.uint32(0)) for value in threads.sums(names)]
    right = tiles(threads, columns, owner, (product.n, product.k), product.b, turned=b_turned == 1)
    if held:
        left = product.left([value.astype(np.uint32) for value in a])
    else:
        left = tiles(threads, a[0][:, 0], owner, (_ROWS, product.k), product.a, turned=a_turned == [1])
    pairs = np.arange(len(right) * _ROWS // 16), np.repeat(np.arange(len(right)), _ROWS // 16)
    d = multiplied(left.reshape(-1, 16, product.k), right, pairs, product.sums(c), product.core)
    values = np.empty((len(names), groups.size, WARPGROUP), np.uint32)
    for value, made in zip(values, product.registers(d, (-1, WARPGROUP)), strict=True):
        value[numbers] = made
    threads.bring(names, values.reshape(-1, *threads.shape), groups, a_names if held else ())
    return waits


def _fence(threads: Threads, mask: Array) -> Array | None:
    groups, waits = threads.gathered(mask, WARPGROUP)
    threads.fence(np.repeat(groups, WARPGROUP, 1))
    return waits


def _show_writes(threads: Threads, mask: Array) -> None:
    """Let products see what threads wrote."""
    threads.shared.fence(mask.max(1, keepdims=True))


ROWS = (
    OpcodeRow(
        rf"wgmma\.mma_async\.sync\.aligned\.m64n(?P<n>\d+)k(?P<k>\d+)\.f32\.{KINDS}",
        "- u64* u64 pred =1 =1 n? n?",
        _multiply,
    ),
    OpcodeRow(r"wgmma\.fence\.sync\.aligned", "", _fence),
    OpcodeRow(r"fence\.proxy\.async(?:\.shared::cta)?", "", _show_writes),
)
