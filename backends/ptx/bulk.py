"""Copies of boxes between a tensor and shared memory (PTX ISA, cp.async.bulk.tensor): a thread asks for the whole.

Bytes are copied where they are asked for. A load's are there for who has waited for its mbarrier, and a store's are
read until its group has been waited for. So many bytes in a line are a box of a tensor that all memory is.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.barriers import barrier_at
from tiebreak.backends.ptx.memory import STORES
from tiebreak.backends.ptx.operands import OpcodeRow, idle
from tiebreak.backends.ptx.threads import TensorMap, Threads, by_number

_WORD = 4  # bytes
_WIDTHS = 16, 32, 64, 128  # bytes of a swizzled row, by a map's mode


Asked = tuple[Array, TensorMap, Sequence[Array]]  # threads, the box of each, and its corner


def _asked(threads: Threads, mask: Array, where: Array, how: Any) -> Iterator[Asked]:
    """Yield what threads ask for: boxes of maps by number, at corners, or from an address on so many bytes."""
    if isinstance(how, list):
        for number, shown in by_number(where, mask):
            yield shown, threads.maps[number], how
    else:
        for size, shown in by_number(how, mask):
            yield shown, TensorMap(0, (2**60,), (_WORD,), (size // _WORD,)), [where // _WORD]


def _load(threads: Threads, mask: Array, places: Array, where: Array, how: Any, barriers: Array) -> None:
    """Bring boxes, which have come when their barriers say so."""
    for asked in _asked(threads, mask, where, how):
        (block, _), at_barrier, box = asked[0].nonzero(), barriers[asked[0]], asked[1]
        if box.nan:
            raise threads.instruction.refused()
        addresses, inside, there = _boxes(threads, places, asked)
        values = threads.memory.read(addresses, inside, np.dtype(f"u{box.strides[0]}"))
        granules, owner = threads.shared.bring(there, block, values)
        for address in np.unique(at_barrier).tolist():
            counts = np.bincount(block, at_barrier == address, len(mask)).astype(np.int64)
            chosen = np.repeat(at_barrier == address, len(granules) // len(block))
            barrier = barrier_at(threads, address, counts > 0)
            barrier.bring(granules[chosen], owner[chosen], counts * values[0].nbytes)


def _store(threads: Threads, mask: Array, where: Array, how: Any, places: Array) -> None:
    for asked in _asked(threads, mask, where, how):
        threads.memory.write(*_taken(threads, places, asked))


def _add(threads: Threads, mask: Array, where: Array, places: Array, how: Any) -> None:
    for asked in _asked(threads, mask, where, how):
        addresses, inside, values = _taken(threads, places, asked)
        threads.memory.add(addresses, inside, values.view(np.float32), "f32")


def _taken(threads: Threads, places: Array, asked: Asked) -> tuple[Array, Array, Array]:
    """Return addresses of boxes' elements, if the tensor has them, and the bits that shared memory has of them."""
    addresses, inside, there = _boxes(threads, places, asked)
    block, unsigned = asked[0].nonzero()[0], np.dtype(f"u{asked[1].strides[0]}")
    column = np.full(len(block), threads.shared.groups.shape[1] + STORES)
    return addresses, inside, threads.shared.operands(there, block, unsigned, column)


def _boxes(threads: Threads, places: Array, asked: Asked) -> tuple[Array, Array, Array]:
    """Return addresses of elements, (boxes, elements), if the tensor has them, and their places in shared memory."""
    mask, box, corner = asked
    size, width = box.strides[0], _WIDTHS[box.swizzle]
    if len(corner) != len(box.box) or (box.swizzle and box.box[0] * size != width):
        raise threads.instruction.refused()
    elements = np.arange(int(np.prod(box.box)))
    addresses, rest, inside = np.array(box.start), elements, np.array(True)
    for first, length, of_tensor, stride in zip(corner, box.box, box.lengths, box.strides, strict=True):
        along = first[mask].astype(np.int64)[:, None] + rest % length
        addresses, inside = addresses + along * stride, inside & (along >= 0) & (along < of_tensor)
        rest = rest // length
    there = places[mask][:, None] + elements * size
    return addresses, inside, there ^ there >> 3 & width - 16


_TENSOR = r"cp\.async\.bulk\.tensor\.[1-5]d\."
_TILE, _BYTES, _HINT = r"(?:\.tile)?", r"\.mbarrier::complete_tx::bytes", r"(?:\.L2::cache_hint)?"
ROWS = (
    OpcodeRow(rf"{_TENSOR}shared::cta\.global{_TILE}{_BYTES}{_HINT}", "at u64 s32* at -?", _load),
    OpcodeRow(rf"cp\.async\.bulk\.shared::cluster\.global{_BYTES}", "at at u32 at", _load),  # its own block's memory
    OpcodeRow(rf"{_TENSOR}global\.shared::cta{_TILE}\.bulk_group{_HINT}", "u64 s32* at -?", _store),
    OpcodeRow(r"cp\.reduce\.async\.bulk\.global\.shared::cta\.bulk_group\.add\.f32", "at at u32", _add),
    OpcodeRow(r"griddepcontrol\.(?:wait|launch_dependents)", "", idle),  # a launch is over when the next one begins
    OpcodeRow(r"prefetch\.tensormap|fence\.mbarrier_init\.release\.cluster", "...", idle),
    OpcodeRow(r"setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32", "...", idle),
)
