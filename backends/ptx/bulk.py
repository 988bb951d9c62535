"""Copies of boxes between a tensor and shared memory (PTX ISA, cp.async.bulk.tensor): a thread asks for the whole.

Bytes are copied where they are asked for. A load's are there for who has waited for its mbarrier, and a store's are
read until its group has been waited for.
"""

import re
from collections.abc import Callable, Mapping

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.barriers import barrier_at
from tiebreak.backends.ptx.operands import Read, Run, idle, place_of, reader
from tiebreak.backends.ptx.parsing import Address, Instruction
from tiebreak.backends.ptx.threads import TensorMap, Threads

_WORD = 4  # bytes
_WIDTHS = 16, 32, 64, 128  # bytes of a swizzled row, by a map's mode


def _copy(at: Instruction, match: re.Match[str]) -> Run:
    """Bind copies of a tensor's boxes, and of so many bytes: a box of a tensor that all memory is."""
    loads, adds = match[1].startswith("shared"), at.opcode.startswith("cp.reduce")
    boxed, shared = (at.operands[1], at.operands[0]) if loads else (at.operands[0], at.operands[1])
    place, in_line = place_of(shared, at), isinstance(boxed, Address)
    arrives = place_of(at.operands[3 if in_line else 2], at) if loads else None
    if in_line:
        number, start = reader(at.operands[2], "u32", at), place_of(boxed, at)
        corner: list[Read] = [lambda threads: start(threads) // _WORD]
    else:
        name, *names = re.findall(r"[%\w$]+", str(boxed))
        number, corner = reader(name, "u64", at), [reader(each, "s32", at) for each in names]

    def copy(threads: Threads, mask: Array) -> None:
        shown = threads.full(mask)
        numbers = threads.full(number(threads))
        for which in np.unique(numbers[shown]).tolist():
            block, thread = (shown & (numbers == which)).nonzero()
            box = TensorMap(0, (2**60,), (_WORD,), (which // _WORD,)) if in_line else threads.maps[which]
            corners = np.stack([threads.full(read(threads))[block, thread] for read in corner], 1).astype(np.int64)
            addresses, inside, places = _boxes(box, corners, place(threads)[block, thread], at)
            unsigned = np.dtype(f"u{box.strides[0]}")
            if arrives is None:
                column = np.full(len(block), threads.shared.products.shape[1] - 1)
                values = threads.shared.operands(places, block, unsigned, at, column)
                if adds:
                    threads.memory.add(addresses, inside, values, "f32", at)
                else:
                    threads.memory.write(addresses, inside, values, at)
                continue
            if box.nan:
                raise at.refused()
            granules, owner = threads.shared.bring(
                places, block, threads.memory.read(addresses, inside, unsigned, at), at
            )
            at_barrier = arrives(threads)[block, thread]
            for address in np.unique(at_barrier).tolist():
                counts = np.bincount(block, at_barrier == address, len(mask)).astype(np.int64)
                chosen = np.repeat(at_barrier == address, len(granules) // len(block))
                barrier = barrier_at(threads, address, counts > 0)
                barrier.bring(granules[chosen], owner[chosen], counts * places[0].size * unsigned.itemsize)

    return copy


def _boxes(box: TensorMap, corners: Array, starts: Array, at: Instruction) -> tuple[Array, Array, Array]:
    """Return addresses of elements, (boxes, elements), if the tensor has them, and their places in shared memory."""
    size, width = box.strides[0], _WIDTHS[box.swizzle]
    if corners.shape[1] != len(box.box) or (box.swizzle and box.box[0] * size != width):
        raise at.refused()
    elements = np.arange(int(np.prod(box.box)))
    addresses, rest = np.full((len(corners), elements.size), box.start), elements
    inside = np.ones(addresses.shape, bool)
    for axis, (length, of_tensor, stride) in enumerate(zip(box.box, box.lengths, box.strides, strict=True)):
        along = corners[:, axis, None] + rest % length
        addresses, inside, rest = (
            addresses + along * stride,
            inside & (along >= 0) & (along < of_tensor),
            rest // length,
        )
    places = starts[:, None] + elements * size
    return addresses, inside, places ^ places >> 3 & width - 16


def _group(at: Instruction, match: re.Match[str]) -> Run:
    """Bind what closes a group of stores, and waits for it; the threads of a block are taken for one."""

    def meet(threads: Threads, mask: Array) -> None:
        blocks, groups = threads.full(mask).any(1), threads.shared.products
        if match[1] == "commit_group":
            groups[:, -1] += blocks
        else:
            done = np.zeros_like(groups)
            done[:, -1] = np.where(blocks, groups[:, -1] - int(str(at.operands[0])), 0)
            threads.shared.complete(done, others=False)

    return meet


_TENSOR, _HINT = r"cp\.async\.bulk\.tensor\.[1-5]d\.", r"(?:\.L2::cache_hint)?"
BINDERS: Mapping[str, Callable[[Instruction, re.Match[str]], Run]] = {
    rf"{_TENSOR}(shared::cta\.global)(?:\.tile)?\.mbarrier::complete_tx::bytes{_HINT}": _copy,
    r"cp\.async\.bulk\.(shared::cluster\.global)\.mbarrier::complete_tx::bytes": _copy,  # its own block's memory
    r"cp\.reduce\.async\.bulk\.(global\.shared::cta)\.bulk_group\.add\.f32": _copy,
    rf"{_TENSOR}(global\.shared::cta)(?:\.tile)?\.bulk_group{_HINT}": _copy,
    r"cp\.async\.bulk\.(commit_group|wait_group)(?:\.read)?": _group,
    r"griddepcontrol\.(?:wait|launch_dependents)": idle,  # a launch is over when the next one begins
    r"prefetch\.tensormap|fence\.mbarrier_init\.release\.cluster|setmaxnreg\.(?:inc|dec)\.sync\.aligned\.u32": idle,
}
