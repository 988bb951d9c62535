"""`wgmma`: products of four warps at once, with operands in shared memory, that are done when somebody has waited.

Sums are computed where they are asked for. What a card might not have yet is an error: a register, or a place of shared
memory, that a product is still at work on, or that it does not see without a fence.
"""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARPGROUP
from tiebreak.backends.ptx.operands import Run, names_of, reader
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.parsing import Instruction
from tiebreak.backends.ptx.products import multiplied, product_of
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
    at = threads.instruction
    (layout,) = {int(each) & ~_FIELD for each in descriptors}
    if layout >> 49 & 15 or layout >> 61 not in _WIDTHS:  # a base offset, another mode
        raise at.refused()
    width = _WIDTHS[layout >> 61]
    starts, number = np.unique((descriptors & np.uint64(_FIELD)).astype(np.int64) * 16, return_inverse=True)
    places = starts[:, None, None] + _offsets(*shape, TYPES[kind].itemsize, turned, layout)
    places ^= places >> 3 & width - 16  # the swizzle is one of addresses: a descriptor may begin within a row
    block, column = owner
    return threads.shared.operands(places[number], block, TYPES[kind], at, column).astype(np.float32)


def _product(at: Instruction, _: re.Match[str]) -> Run:
    product, (sums, of_a, of_b, keeps, *flags) = product_of(at, "sm_90"), at.operands
    held, names = isinstance(of_a, tuple), names_of(sums)
    turned = [flag == "1" for flag in flags[2:]]
    a_turned, b_turned = (turned or [False, False]) if not held else (False, *(turned or [False]))
    if flags[:2] != ["1", "1"] or any(name not in at.types for name in names):  # negated operands
        raise at.refused()
    a_reads = [reader(name, "u32" if held else "u64", at) for name in names_of(of_a)]
    b_read, keep = reader(of_b, "u64", at), reader(keeps, "pred", at)

    def multiply(threads: Threads, mask: Array) -> Array | None:
        groups, waits = threads.gathered(mask, WARPGROUP)
        owner = block, _ = groups.nonzero()
        if not len(block):
            return waits
        everyone = len(block) == groups.size
        numbers = slice(None) if everyone else groups.ravel().nonzero()[0]

        def taken(values: Sequence[Array]) -> list[Array]:
            """Return registers of the threads that multiply, (warpgroups, threads)."""
            return [threads.full(value).reshape(-1, WARPGROUP)[numbers] for value in values]

        a, (keeps,), (columns,) = (
            taken([read(threads) for read in a_reads]),
            taken([keep(threads)]),
            taken([b_read(threads)]),
        )
        c = [value if keeps.all() else np.where(keeps, value, np.uint32(0)) for value in taken(threads.sums(names))]
        right = tiles(threads, columns[:, 0], owner, (product.n, product.k), product.b, turned=b_turned)
        if held:
            left = product.left(a)
        else:
            left = tiles(threads, a[0][:, 0], owner, (_ROWS, product.k), product.a, turned=a_turned)
        pairs = np.arange(len(right) * _ROWS // 16), np.repeat(np.arange(len(right)), _ROWS // 16)
        d = multiplied(left.reshape(-1, 16, product.k), right, pairs, product.sums(c), product.core)
        values = np.empty((len(names), groups.size, WARPGROUP), np.uint32)
        for value, made in zip(values, product.registers(d, (-1, WARPGROUP)), strict=True):
            value[numbers] = made
        shown = threads.everyone if everyone else np.repeat(groups, WARPGROUP, 1)
        threads.bring(names, values.reshape(-1, *threads.shape), shown, names_of(of_a) if held else ())
        return waits

    return multiply


def _synchronise(at: Instruction, match: re.Match[str]) -> Run:
    def meet(threads: Threads, mask: Array) -> Array | None:
        groups, waits = threads.gathered(mask, WARPGROUP)
        shown = np.pad(groups, ((0, 0), (0, 1)))  # without copies
        if match[1] == "commit_group":
            threads.shared.products += shown
        elif match[1] == "wait_group":
            others = threads.shape[1] > WARPGROUP  # may still be at work
            done = np.where(shown, threads.shared.products - int(str(at.operands[0])), 0)
            threads.complete(done, others=others)
        else:
            threads.fence(np.repeat(groups, WARPGROUP, 1))
        return waits

    return meet


def _proxy_fence(_: Instruction, __: re.Match[str]) -> Run:
    return lambda threads, mask: threads.shared.fence(threads.full(mask).max(1, keepdims=True))


BINDERS: Mapping[str, Callable[[Instruction, re.Match[str]], Run]] = {
    r"wgmma\.mma_async\..*": _product,
    r"wgmma\.(fence|commit_group|wait_group)\.sync\.aligned": _synchronise,
    r"fence\.proxy\.async(?:\.shared::cta)?": _proxy_fence,
}
