"""`tcgen05`: products that one thread asks for, which are done when a barrier says so.

A product is computed where it is asked for. Its sums count as there, and its operands as read, for who has waited for
the barrier that a commit arrives at (PTX ISA, Tensorcore 5th Generation Family Instructions).
"""

import re
from collections.abc import Callable, Mapping

import numpy as np

from tiebreak.backends.emulation.tensor_cores import core_of
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP
from tiebreak.backends.ptx.operands import Read, Run, idle, names_of, place_of, reader, writer
from tiebreak.backends.ptx.operations import TYPES
from tiebreak.backends.ptx.parsing import Address, Instruction
from tiebreak.backends.ptx.products import FORMATS, multiplied
from tiebreak.backends.ptx.tensor_memory import COLUMNS, LANES, Spot
from tiebreak.backends.ptx.threads import Threads
from tiebreak.backends.ptx.warpgroups import tiles

_Match = re.Match[str]
_KINDS = {"f16": ("f16", "bf16"), "f8f6f4": ("e4m3", "e5m2")}  # operands' types, by their number in the descriptor
_UNKNOWN = 0xE080604F  # bits of that descriptor: sparse, negated, saturated, and what else is not done


def _elect(at: Instruction, _: _Match) -> Run:
    number, predicate = map(str.strip, str(at.operands[0]).split("|"))
    write, choose = writer(number, at), writer(predicate, at)

    def elect(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        write(threads, 0, np.zeros((1, 1), np.uint32), mask)
        choose(threads, 0, threads.get("%laneid") == 0, mask)

    return elect


def _ballot(at: Instruction, _: _Match) -> Run:
    write, reads = writer(at.operands[0], at), reader(at.operands[1], "pred", at)

    def vote(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        lanes = threads.full(reads(threads)).reshape(len(mask), -1, WARP)
        votes = np.packbits(lanes, -1, bitorder="little").view(np.uint32)
        write(threads, 0, np.repeat(votes, WARP, -1).reshape(threads.shape), mask)

    return vote


def _allocate(at: Instruction, _: _Match) -> Run:
    place, counts = place_of(at.operands[0], at), reader(at.operands[1], "u32", at)

    def allocate(threads: Threads, mask: Array) -> None:
        threads.warps(mask, at)
        columns = int(np.where(mask, counts(threads), 0).max())
        first = np.full(threads.shape, threads.tensor.allocated, np.uint32)
        threads.tensor.allocated += columns
        if threads.tensor.allocated > COLUMNS:
            raise at.refused()
        threads.shared.write(place(threads), threads.full(mask & (threads.get("%laneid") == 0)), first, at)

    return allocate


def _move(at: Instruction, match: _Match) -> Run:
    """Bind `tcgen05.ld` and `st`: a thread has its lane, or two threads a lane, each so many columns of it."""
    loads, halved, count = match[1] == "ld", match[2] == "16x32bx2", int(match[3])
    address, registers = (at.operands[1], at.operands[0]) if loads else (at.operands[0], at.operands[-1])
    apart = int(str(at.operands[2 if loads else 1]), 0) if halved else 0  # columns between those of both
    place, lane = place_of(address, at), np.arange(WARP)[None, :, None]
    write = writer(registers, at) if loads else None
    reads = [] if loads else [reader(name, "u32", at) for name in names_of(registers)]

    def move(threads: Threads, mask: Array) -> None:
        block, warp = threads.warps(mask, at).nonzero()
        if not len(block):
            return
        first = place(threads).reshape(len(mask), -1, WARP)[block, warp, :1, None]
        column = (first & 0xFFFF) + lane // 16 * apart + np.arange(count)
        spot = Spot(block[:, None, None], (first >> 16) + (lane % 16 if halved else lane), column)
        if (spot.lane // WARP != warp[:, None, None] % 4).any() or column.max() >= COLUMNS:
            raise at.refused()
        if write is None:
            held = np.stack([threads.full(read(threads)) for read in reads], -1).reshape(len(mask), -1, WARP, count)
            threads.tensor.store(spot, held[block, warp], threads.shared.phases[block][..., None], at)
            return
        words = np.zeros((count, *threads.shape), np.uint32)
        words.reshape(count, len(mask), -1, WARP)[:, block, warp] = np.moveaxis(threads.tensor.load(spot, at), -1, 0)
        for number in range(count):
            write(threads, number, words[number], mask)

    return move


def _wait(at: Instruction, _: _Match) -> Run:
    def wait(threads: Threads, mask: Array) -> None:
        threads.tensor.stored(*threads.warps(mask, at).nonzero())

    return wait


def _one(threads: Threads, mask: Array, at: Instruction) -> tuple[Array, Array]:
    """Return the blocks of which a thread, one alone, executes an instruction, and which."""
    shown = threads.full(mask)
    if (shown.sum(1) > 1).any():
        raise at.refused()
    block, thread = shown.nonzero()
    return block, thread


def _product(at: Instruction, match: _Match) -> Run:
    d, a, b, described, *hidden, added = at.operands
    in_memory = isinstance(a, Address)  # in tensor memory
    of_d, of_a = place_of(d, at), place_of(a, at) if in_memory else reader(a, "u64", at)
    of_b, describes, adds = reader(b, "u64", at), reader(described, "u32", at), reader(added, "pred", at)
    hides = [reader(name, "u32", at) for operand in hidden for name in names_of(operand)]  # lanes of D

    def multiply(threads: Threads, mask: Array) -> None:
        block, thread = _one(threads, mask, at)
        if not len(block):
            return

        def taken(read: Read) -> Array:
            values: Array = threads.full(read(threads))[block, thread]
            return values

        (shape,) = set(taken(describes).tolist())
        try:
            a_kind, b_kind = (_KINDS[match[1]][shape >> start & 7] for start in (7, 10))
            core = core_of("sm_100", FORMATS[a_kind], FORMATS[b_kind])
        except (IndexError, ValueError) as error:
            raise at.refused() from error
        m, n, k = (shape >> 24 & 31) * 16, (shape >> 17 & 63) * 8, 32 // TYPES[a_kind].itemsize
        if any(taken(read).any() for read in hides):
            raise at.refused()
        if shape & _UNKNOWN or shape >> 4 & 3 != 1 or m not in (64, LANES):  # sums in fp32
            raise at.refused()
        group, phase = threads.shared.products[block, :1, None] + 1, threads.shared.phases[block][..., None]
        owner = block, np.zeros_like(block)
        row = np.arange(m) if m == LANES else np.arange(m) // 16 * WARP + np.arange(m) % 16

        def spot(read: Read, columns: int) -> Spot:
            first = taken(read)[:, None, None]
            lane, column = (first >> 16) + row[None, :, None], (first & 0xFFFF) + np.arange(columns)
            if lane.max() >= LANES or column.max() >= COLUMNS:
                raise at.refused()
            return Spot(block[:, None, None], lane, column)

        right = tiles(threads, taken(of_b), owner, (n, k), b_kind, turned=bool(shape >> 16 & 1))
        if in_memory:
            words = threads.tensor.take(spot(of_a, k * TYPES[a_kind].itemsize // 4), phase, group, at)
            left = np.ascontiguousarray(words).view(TYPES[a_kind]).astype(np.float32)
        else:
            left = tiles(threads, taken(of_a), owner, (m, k), a_kind, turned=bool(shape >> 15 & 1))
        sums, to, keeps = np.zeros((len(block), m, n), np.float32), spot(of_d, n), taken(adds)
        if keeps.any():
            kept = Spot(*(x[keeps] if len(x) == len(keeps) else x for x in to))
            sums[keeps] = threads.tensor.take(kept, phase[keeps], group[keeps], at).view(np.float32)
        pairs = np.arange(len(block) * m // 16), np.repeat(np.arange(len(block)), m // 16)
        made = multiplied(left.reshape(-1, 16, k), right, pairs, sums.reshape(-1, 16, n), core)
        threads.tensor.bring(to, made.reshape(-1, m, n).view(np.uint32), group)

    return multiply


BINDERS: Mapping[str, Callable[[Instruction, _Match], Run]] = {
    r"elect\.sync": _elect,
    r"vote\.sync\.ballot\.b32": _ballot,
    r"tcgen05\.alloc\.cta_group::1\.sync\.aligned\.shared::cta\.b32": _allocate,
    r"tcgen05\.(?:relinquish_alloc_permit|dealloc)\.cta_group::1\.sync\.aligned(?:\.b32)?": idle,
    r"tcgen05\.fence::(?:before|after)_thread_sync": idle,  # an order that instructions have here
    r"tcgen05\.(ld|st)\.sync\.aligned\.(32x32b|16x32bx2)\.x(\d+)\.b32": _move,
    r"tcgen05\.wait::st\.sync\.aligned": _wait,
    r"tcgen05\.wait::ld\.sync\.aligned": idle,  # Triton's code reads registers before it waits for them
    r"tcgen05\.mma\.cta_group::1\.kind::(f16|f8f6f4)(?:\.collector::a::discard)?": _product,
}
