"""`tcgen05`: products that one thread asks for, which are done when a barrier says so.

A product is computed where it is asked for. Its sums count as there, and its operands as read, for who has waited for
the barrier that a commit arrives at (PTX ISA, Tensorcore 5th Generation Family Instructions).
"""

from typing import Any

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP
from tiebreak.backends.ptx.operands import OpcodeRow, idle
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.parsing import Address
from tiebreak.backends.ptx.products import multiplied, product_of
from tiebreak.backends.ptx.tensor_memory import COLUMNS, LANES, Spot
from tiebreak.backends.ptx.threads import Threads
from tiebreak.backends.ptx.warpgroups import tiles

_KINDS = {"f16": ("f16", "bf16"), "f8f6f4": ("e4m3", "e5m2")}  # operands' types, by their number in the descriptor
_UNKNOWN = 0xE080604F  # bits of that descriptor: sparse, negated, saturated, and what else is not done


def _allocate(threads: Threads, mask: Array, place: Array, counts: Array) -> None:
    first = np.full(threads.shape, threads.tensor.allocated, np.uint32)
    threads.tensor.allocated += int(np.where(mask, counts, 0).max())
    if threads.tensor.allocated > COLUMNS:
        raise threads.instruction.refused()
    threads.shared.write(place, mask & (threads.get("%laneid") == 0), first)


def _spot(threads: Threads, mask: Array, first: Array, count: int, apart: int | None) -> Spot:
    """Return so many columns of each lane of a warp, or those of half of the lanes twice, so many columns apart."""
    block, warp = threads.warps(mask).nonzero()
    lane, start = np.arange(WARP)[None, :, None], threads.lanes(first)[block, warp, :1, None]
    column = (start & 0xFFFF) + lane // 16 * (apart or 0) + np.arange(count)
    spot = Spot(block[:, None, None], (start >> 16) + (lane if apart is None else lane % 16), column)
    if (spot.lane // WARP != warp[:, None, None] % 4).any() or column.max(initial=0) >= COLUMNS:
        raise threads.instruction.refused()
    return spot


def _load(threads: Threads, mask: Array, first: Array, apart: int | None = None, *, count: str) -> list[Array]:
    spot, warps = _spot(threads, mask, first, int(count), apart), threads.warps(mask)
    words = np.zeros((int(count), *warps.shape, WARP), np.uint32)
    words[:, warps] = np.moveaxis(threads.tensor.load(spot), -1, 0)
    return list(words.reshape(-1, *threads.shape))


def _store(threads: Threads, mask: Array, first: Array, *operands: Any, count: str) -> None:
    *apart, registers = operands
    spot = _spot(threads, mask, first, int(count), *(apart or [None]))
    words = threads.lanes(np.stack(registers, -1))[threads.warps(mask)]
    threads.tensor.store(spot, words, threads.shared.phases[spot.block, 0])


def _await_stores(threads: Threads, mask: Array) -> None:
    threads.tensor.stored(*threads.warps(mask).nonzero())


def _multiply(
    threads: Threads, mask: Array, d: Array, a: Array, b: Array, described: Array, *hidden: Any, kind: str
) -> None:
    """Multiply what one thread of a block names, in shared or tensor memory, into tensor memory."""
    *hides, adds = hidden  # lanes of D, and whether it is added to
    if (mask.sum(1) > 1).any():
        raise threads.instruction.refused()
    block = mask.nonzero()[0]
    if not len(block):
        return
    (shape,) = set(described[mask].tolist())
    of_a, of_b = (shape >> start & 7 for start in (7, 10))
    m, n = (shape >> 24 & 31) * 16, (shape >> 17 & 63) * 8
    unknown = shape & _UNKNOWN or shape >> 4 & 3 != 1 or m not in (64, LANES) or max(of_a, of_b) > 1  # sums in fp32
    if unknown or any(lanes[mask].any() for each in hides for lanes in each):
        raise threads.instruction.refused()
    a_kind, b_kind = (_KINDS[kind][number] for number in (of_a, of_b))
    k = 32 // TYPES[a_kind].itemsize
    product = product_of("sm_100", str(k), a_kind, b_kind, str(n))
    group, phase = threads.shared.groups[block, :1, None] + 1, threads.shared.phases[block][..., None]
    owner, row = (block, np.zeros_like(block)), np.arange(m)

    def spot(places: Array, columns: int) -> Spot:
        first = places[mask][:, None, None]
        lanes = row if m == LANES else row // 16 * WARP + row % 16
        lane, column = (first >> 16) + lanes[:, None], (first & 0xFFFF) + np.arange(columns)
        if lane.max() >= LANES or column.max() >= COLUMNS:
            raise threads.instruction.refused()
        return Spot(block[:, None, None], lane, column)

    right = tiles(threads, b[mask], owner, (n, k), b_kind, turned=bool(shape >> 16 & 1))
    if isinstance(threads.instruction.operands[1], Address):
        words = threads.tensor.take(spot(a, 8), phase, group)
        left = np.ascontiguousarray(words).view(TYPES[a_kind]).astype(np.float32)
    else:
        left = tiles(threads, a[mask], owner, (m, k), a_kind, turned=bool(shape >> 15 & 1))
    sums, to, keeps = np.zeros((len(block), m, n), np.float32), spot(d, n), adds[mask]
    if keeps.any():
        kept = Spot(*(x[keeps] if len(x) == len(keeps) else x for x in to))
        sums[keeps] = threads.tensor.take(kept, phase[keeps], group[keeps]).view(np.float32)
    pairs = np.arange(len(block) * m // 16), np.repeat(np.arange(len(block)), m // 16)
    made = multiplied(left.reshape(-1, 16, k), right, pairs, sums.reshape(-1, 16, n), product.core)
    threads.tensor.bring(to, made.reshape(-1, m, n).view(np.uint32), group)


_ALIGNED = r"\.cta_group::1\.sync\.aligned"
ROWS = (
    OpcodeRow(rf"tcgen05\.alloc{_ALIGNED}\.shared::cta\.b32", "at u32", _allocate),
    OpcodeRow(rf"tcgen05\.(?:relinquish_alloc_permit|dealloc){_ALIGNED}(?:\.b32)?", "...", idle),
    OpcodeRow(r"tcgen05\.fence::(?:before|after)_thread_sync", "", idle),  # an order that instructions have here
    OpcodeRow(r"tcgen05\.ld\.sync\.aligned\.32x32b\.x(?P<count>\d+)\.b32", "w at", _load),
    OpcodeRow(r"tcgen05\.ld\.sync\.aligned\.16x32bx2\.x(?P<count>\d+)\.b32", "w at n", _load),
    OpcodeRow(r"tcgen05\.st\.sync\.aligned\.32x32b\.x(?P<count>\d+)\.b32", "at u32*", _store),
    OpcodeRow(r"tcgen05\.st\.sync\.aligned\.16x32bx2\.x(?P<count>\d+)\.b32", "at n u32*", _store),
    OpcodeRow(r"tcgen05\.wait::st\.sync\.aligned", "", _await_stores),
    OpcodeRow(r"tcgen05\.wait::ld\.sync\.aligned", "", idle),  # Triton's code reads registers before it waits for them
    OpcodeRow(
        r"tcgen05\.mma\.cta_group::1\.kind::(?P<kind>f16|f8f6f4)(?:\.collector::a::discard)?",
        "at u64 u64 u32 u32*? pred",
        _multiply,
    ),
)
