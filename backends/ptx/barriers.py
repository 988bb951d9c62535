"""Barriers that threads come to from several places: by number, and `mbarrier`, which copies and products end, too.

Who waited for one is taken to be in a new phase of its block: that it orders the accesses of some threads alone is not
followed, but what a copy or a product brings, or still reads, is.
"""

from collections.abc import Callable

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP, SharedMemoryError
from tiebreak.backends.ptx.operands import OpcodeRow
from tiebreak.backends.ptx.threads import Threads, by_number

_ONE = np.ones((1, 1), np.int64)


def _meet(threads: Threads, mask: Array, numbers: Array, count: int = 0, *, name: str, way: str) -> Array:
    """Come to a barrier of so many threads, or of the block's, and wait there unless that is left to others."""
    together = WARP if name == "bar" else 1  # threads that have to come at once
    groups, partly = threads.gathered(mask, together)
    shown, waits = np.repeat(groups, together, 1), np.zeros(threads.shape, bool) if partly is None else partly
    for value, here in by_number(numbers, shown):
        barrier = threads.named.setdefault(value, _Meeting(threads.shape))
        over = barrier.come(here, count or threads.shape[1], stays=way == "sync")
        threads.shared.phases += over[:, None]
        waits |= barrier.leave(here)
    return waits


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


def _begin(threads: Threads, mask: Array, addresses: Array, counts: Array) -> None:
    for address, here in by_number(addresses, mask):
        barrier = threads.barriers.setdefault(address, _Barrier(len(mask)))
        barrier.start(here.any(1), np.where(here, counts, 0).max(1))


def _end(threads: Threads, mask: Array, addresses: Array) -> None:
    for address, here in by_number(addresses, mask):
        barrier_at(threads, address, here.any(1)).valid &= ~here.any(1)


def _wait(threads: Threads, mask: Array, write: Callable[..., None], addresses: Array, parities: Array) -> Array:
    waits = np.zeros(threads.shape, bool)
    for address, here in by_number(addresses, mask):
        waits |= barrier_at(threads, address, here.any(1)).wait(threads, here, parities)
    write(threads, np.ones((1, 1), bool), mask & ~waits)
    return waits


def _arrive(threads: Threads, mask: Array, addresses: Array, counts: Array = _ONE, *, way: str) -> None:
    for address, here in by_number(addresses, mask):
        barrier_at(threads, address, here.any(1)).arrive(threads, here, counts, way)


def barrier_at(threads: Threads, address: int, blocks: Array | np.bool) -> "_Barrier":
    """Return the `mbarrier` at an address of some blocks' shared memory.

    Raises:
        SharedMemoryError: there is none.
    """
    barrier = threads.barriers.get(address)
    if barrier is None or (blocks & ~barrier.valid).any():
        raise SharedMemoryError(f"finds no barrier at byte {address} of the block's shared memory")
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
        done = np.zeros_like(threads.shared.groups)
        done[:, 0] = np.where(blocks, self._group, 0)
        threads.complete(done)
        threads.shared.phases += (blocks & self._joins)[:, None]
        there = [blocks[owner] & (phase < self._phase[owner]) for _, owner, phase in self._brought]
        for (granules, _, _), arrived in zip(self._brought, there, strict=True):
            threads.shared.arrive(granules[arrived])
        self._brought = [brought for brought, arrived in zip(self._brought, there, strict=True) if not arrived.all()]
        return late

    def arrive(self, threads: Threads, here: Array, counts: Array, way: str) -> None:
        """Count arrivals of threads, or of a commit; or bytes that are expected, with an arrival or without."""
        blocks, expects = here.any(1), way.endswith("expect_tx")
        if way == "commit":
            threads.shared.groups[:, 0] += blocks
            self._group[blocks] = threads.shared.groups[blocks, 0]
        else:
            self._joins |= blocks
        self._bytes += np.where(here & expects, counts, 0).sum(1)
        self._missing -= np.where(here & (way != "expect_tx"), _ONE if expects else counts, 0).sum(1)
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


_SCOPE = r"(?:\.(?:acquire|release|relaxed)\.ct[ah])?\.shared(?:::cta)?\.b64"
ROWS = (
    OpcodeRow(r"(?P<name>bar|barrier)\.(?P<way>sync|arrive)", "u32 n?", _meet),
    OpcodeRow(rf"mbarrier\.init{_SCOPE}", "at s64", _begin),
    OpcodeRow(rf"mbarrier\.inval{_SCOPE}", "at", _end),
    OpcodeRow(rf"mbarrier\.(?P<way>arrive|arrive\.expect_tx){_SCOPE}", "- at s64?", _arrive),
    OpcodeRow(rf"mbarrier\.(?P<way>expect_tx){_SCOPE}", "at s64", _arrive),
    # It arrives when the products before it are done.
    OpcodeRow(r"tcgen05\.(?P<way>commit)\.cta_group::1\.mbarrier::arrive::one\.shared::cluster\.b64", "at", _arrive),
    OpcodeRow(rf"mbarrier\.try_wait\.parity{_SCOPE}", "to at s64 -?", _wait),
)
