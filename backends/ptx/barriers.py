"""Barriers that threads come to from several places: by number, and `mbarrier`, which copies and products end, too.

Who waited for one is taken to be in a new phase of its block: that it orders the accesses of some threads alone is not
followed, but what a copy or a product brings, or still reads, is.
"""

import re
from collections.abc import Callable, Mapping

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP, SharedMemoryError
from tiebreak.backends.ptx.operands import Run, place_of, reader, writer
from tiebreak.backends.ptx.parsing import Address, Instruction
from tiebreak.backends.ptx.threads import Threads

_Match = re.Match[str]


def _of_number(at: Instruction, match: _Match) -> Run:
    """Bind `bar.sync` and `bar.arrive`: of so many threads, or of the block's."""
    number, count = reader(at.operands[0], "u32", at), int(str((*at.operands, 0)[1]), 0)
    together, stays = WARP if match[1] == "bar" else 1, match[2] == "sync"  # threads that have to come together

    def meet(threads: Threads, mask: Array) -> Array | None:
        numbers, (groups, partly) = number(threads), threads.gathered(mask, together)
        shown, waits = np.repeat(groups, together, 1), np.zeros(threads.shape, bool) if partly is None else partly
        for value in np.unique(numbers[shown] if numbers.shape == shown.shape else numbers).tolist():
            here = shown & (numbers == value)
            barrier = threads.named.setdefault(value, _Meeting(threads.shape))
            threads.shared.phases += barrier.come(here, count or threads.shape[1], stays=stays)[:, None]
            waits |= barrier.leave(here)
        return waits

    return meet


class _Meeting:
    """A barrier of threads in some blocks."""

    def __init__(self, shape: tuple[int, int]) -> None:
        """Have nobody come to it."""
        self._came, self._phase = np.zeros(shape[0], np.int64), np.zeros(shape[0], np.int64)
        self._since = np.full(shape, -1)  # the phase in which a thread came, that has not left since

    def come(self, here: Array, count: int, *, stays: bool) -> Array:
        """Let threads come, the last of `count` of which ends a phase; return in which blocks."""
        new = here & (self._since < 0)
        if stays:
            self._since = np.where(new, self._phase[:, None], self._since)
        self._came += new.sum(1)
        over: Array = self._came >= count
        self._phase += over
        self._came[over] = 0
        return over

    def leave(self, here: Array) -> Array:
        """Let threads go whose phase is over; return the others."""
        late: Array = here & (self._since == self._phase[:, None])
        self._since[here & ~late] = -1
        return late


def _mbarrier(at: Instruction, match: _Match) -> Run:
    """Bind `mbarrier`, and a commit of tcgen05, which arrives at one when the products before it are done."""
    does = match[1] or "commit"
    number_of = next(number for number, operand in enumerate(at.operands) if isinstance(operand, Address))
    place, behind = place_of(at.operands[number_of], at), at.operands[number_of + 1 :]
    number = reader(behind[0] if behind else "1", "u32", at)  # arrivals, bytes, or a parity
    done = writer(at.operands[0], at) if does == "try_wait.parity" else None

    def act(threads: Threads, mask: Array) -> Array | None:
        shown, addresses, waits = threads.full(mask), place(threads), np.zeros(threads.shape, bool)
        numbers = threads.full(number(threads)).astype(np.int64)
        for address in np.unique(addresses[shown]).tolist():
            here = shown & (addresses == address)
            if does == "init":
                barrier = threads.barriers.setdefault(address, _Barrier(len(mask)))
                barrier.start(here.any(1), np.where(here, numbers, 0).max(1))
                continue
            barrier = barrier_at(threads, address, here.any(1))
            if does == "inval":
                barrier.valid &= ~here.any(1)
            elif does == "try_wait.parity":
                waits |= barrier.wait(threads, here, numbers)
            else:
                barrier.arrive(threads, here, numbers, does)
        if done is not None:
            done(threads, 0, np.ones((1, 1), bool), shown & ~waits)
        return waits

    return act


def barrier_at(threads: Threads, address: int, blocks: Array) -> "_Barrier":
    """Return the `mbarrier` at an address of some blocks' shared memory.

    Raises:
        SharedMemoryError: there is none.
    """
    barrier = threads.barriers.get(address)
    if barrier is None or (blocks & ~barrier.valid).any():
        raise SharedMemoryError(
            f"{threads.instruction} finds no barrier at byte {address} of the block's shared memory"
        )
    found: _Barrier = barrier
    return found


class _Barrier:
    """An `mbarrier` of some blocks."""

    def __init__(self, blocks: int) -> None:
        """Have none in any block."""
        self.valid = np.zeros(blocks, bool)
        # Phases that are over, and the last group of products that was committed to it.
        self._phase, self._group = np.zeros(blocks, np.int64), np.zeros(blocks, np.int32)
        self._count, self._missing, self._bytes = (np.zeros(blocks, np.int64) for _ in range(3))
        self._joins = np.zeros(blocks, bool)  # whether threads arrive, and not only products
        self._brought: list[tuple[Array, Array, Array]] = []  # granules, their blocks, and the phase that brings them

    def start(self, blocks: Array, counts: Array) -> None:
        """Expect so many arrivals in every phase."""
        self.valid |= blocks
        for state in (self._phase, self._group, self._bytes):
            state[blocks] = 0
        self._count[blocks] = self._missing[blocks] = counts[blocks]

    def wait(self, threads: Threads, here: Array, parities: Array) -> Array:
        """Return which threads have to wait; the others have what is done."""
        late: Array = here & ((self._phase[:, None] ^ parities) & 1 == 0)  # Triton gives -1, too: ptxas takes one bit
        blocks = np.asarray((here & ~late).any(1))
        done = np.zeros_like(threads.shared.products)
        done[:, 0] = np.where(blocks, self._group, 0)
        threads.complete(done)
        threads.shared.phases += (blocks & self._joins)[:, None]
        there = [blocks[owner] & (phase < self._phase[owner]) for _, owner, phase in self._brought]
        for (granules, _, _), arrived in zip(self._brought, there, strict=True):
            threads.shared.arrive(granules[arrived])
        self._brought = [brought for brought, arrived in zip(self._brought, there, strict=True) if not arrived.all()]
        return late

    def arrive(self, threads: Threads, here: Array, numbers: Array, does: str) -> None:
        """Count arrivals of threads, or of a commit; or bytes that are expected, with an arrival or without."""
        blocks = here.any(1)
        if does == "commit":
            threads.shared.products[:, 0] += blocks
            self._group[blocks] = threads.shared.products[blocks, 0]
        else:
            self._joins |= blocks
        expects = does.endswith("expect_tx")
        self._bytes += np.where(here & expects, numbers, 0).sum(1)
        self._missing -= np.where(here & (does != "expect_tx"), 1 if expects else numbers, 0).sum(1)
        self._settle()

    def bring(self, granules: Array, owner: Array, counts: Array) -> None:
        """Count bytes of a copy, (blocks,), which has brought granules of blocks."""
        self._brought.append((granules, owner, self._phase[owner]))
        self._bytes -= counts
        self._settle()

    def _settle(self) -> None:
        over = self.valid & (self._missing <= 0) & (self._bytes == 0)
        self._phase += over
        self._missing[over] = self._count[over]


BINDERS: Mapping[str, Callable[[Instruction, _Match], Run]] = {
    r"(bar|barrier)\.(sync|arrive)": _of_number,
    r"tcgen05\.commit\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64()": _mbarrier,
    r"mbarrier\.(init|inval|arrive|expect_tx|arrive\.expect_tx|try_wait\.parity)"
    r"(?:\.(?:acquire|release|relaxed)\.ct[ah])?\.shared(?:::cta)?\.b64": _mbarrier,
}
