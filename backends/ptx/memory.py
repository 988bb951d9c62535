"""The memory of a launch: the host's at real addresses, and the shared memory of every block.

A shared word has a history: who wrote and who read it last, and in which phase, which a barrier ends. So a read of what
nobody wrote, a race between two threads of a block, and a read of what an asynchronous copy may still be bringing are
errors, although here the threads of a block run in lock step and would never notice. Blocks that do the same have one
history.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from triton._C.libtriton import interpreter as native

from tiebreak.backends.interpreter.memory import KernelMemory
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.operations import OPERATIONS

WARP = 32  # threads
WARPGROUP = 4 * WARP
STORES, COPIES = -2, -1  # columns of groups
_SEVERAL = 32  # instead of a lane: several threads of a warp
_EVERYONE = 1 << 10  # instead of a warp: several warps
_ATOMIC = _EVERYONE << 6 | _SEVERAL | 1  # who updates in one go
# A history is a number: from the right who (a lane, 6 bits, and a warp, 11), the phase of the warp and of the block.
_OF_WARP, _PHASE_OF_WARP, _PHASE = 6, 17, 40
_NOBODY, _ORDERED = -1, -2  # an mbarrier orders it
_BY_BARRIER = 1 << 30  # instead of the number of a group of copies: whoever has waited for the mbarrier has what came


class SharedMemoryError(RuntimeError):
    """A race, or a read of memory that nothing wrote; one line with the instruction."""


class Global:
    """The host's memory, of which a kernel may touch only its arguments; addresses are int64."""

    def __init__(self, allowed: KernelMemory) -> None:
        self._allowed = allowed

    def read(self, addresses: Array, mask: Array, dtype: np.dtype[Any]) -> Array:
        """Return unsigned integers; zeros where the mask hides them."""
        self._allowed.check(addresses.view(np.uint64), mask, dtype.itemsize, "reads")
        values: Array = native.load(addresses.view(np.uint64), mask, np.zeros(addresses.shape, dtype), dtype)
        return values

    def write(self, addresses: Array, mask: Array, values: Array) -> None:
        """Write unsigned integers; where two threads write to one place, the later thread wins."""
        self._allowed.check(addresses.view(np.uint64), mask, values.itemsize, "writes")
        native.store(addresses.view(np.uint64), values, mask)

    def add(self, addresses: Array, mask: Array, values: Array, kind: str) -> None:
        """Add numbers of a type to places: the first block's first, which is one of many orders.

        Subnormal numbers are flushed (PTX ISA, red, and cp.reduce.async.bulk).
        """
        compute = OPERATIONS["add.rn.ftz.f32" if kind == "f32" else f"add.{kind}"].compute
        addresses, values, unsigned = addresses[mask], values[mask], np.dtype(f"u{values.itemsize}")
        for chosen in _turns(addresses):
            where, shown = addresses[chosen], np.ones(chosen.shape, bool)
            total = compute(self.read(where, shown, unsigned).view(values.dtype), values[chosen])
            self.write(where, shown, total.astype(values.dtype).view(unsigned))


class Shared:
    """The shared memory of some blocks, and its access history. Addresses and masks are (blocks, threads)."""

    def __init__(self, blocks: int, threads: int, size: int, granule: int) -> None:
        """Allocate `size` bytes a block; the history is per granule, the smallest access in bytes."""
        self._size, self._granule = -(-size // 16) * 16, granule
        self._bytes = np.zeros((blocks, self._size), np.uint8)
        self._alike, count = True, self._size // granule  # whether there is one history: all blocks have done the same
        self._writers, self._readers = np.full(count, _NOBODY), np.full(count, _NOBODY)
        self._pending = np.zeros(count, np.int32)  # the group of copies that may still bring it
        self._unfenced = np.zeros(count, bool)  # whether a product does not see yet what was written
        # Groups that the threads of a block have closed: of each warpgroup's products, the first for tcgen05's; of
        # stores to global memory; of copies from there. And the group that may still read a granule.
        self.groups = np.zeros((blocks, max(1, threads // WARPGROUP) + 2), np.int32)
        self._asked = False  # whether any has read
        self._multiplied = np.zeros((self.groups.shape[1], count), np.int32)
        self.phases = np.zeros((blocks, 1), np.int64)  # a barrier of a block begins a new one,
        self.phases_of_warps = np.zeros((blocks, threads // WARP), np.int64)  # and so does one of a warp
        thread = np.arange(threads)
        self._who = thread // WARP << _OF_WARP | thread % WARP

    def _histories(self, *given: Array) -> int:
        """Return how many there are: 1, until what is `given`, (blocks, ...), or the phases differ among blocks."""
        if self._alike:
            counts = self.phases, self.phases_of_warps, self.groups
            self._alike = all(bool((x[1:] == x[:1]).all()) for x in (*given, *counts))
            if not self._alike:
                for name in ("_writers", "_readers", "_pending", "_unfenced", "_multiplied"):
                    setattr(self, name, np.tile(getattr(self, name), len(self._bytes)))
        return 1 if self._alike else len(self._bytes)

    def complete(self, groups: Array, *, others: bool) -> None:
        """End groups up to a number, (blocks, columns).

        What copies brought counts as written now, by whoever asked for it. What products read, others, if there are
        `others`, may read until a barrier.
        """
        several = self._histories(groups)
        phases = self.phases[:several] << _PHASE
        for column in np.flatnonzero(groups.any(0)):
            copies = column == groups.shape[1] - 1
            under_way = (self._pending if copies else self._multiplied[column]).reshape(several, -1)
            done = (under_way > 0) & (under_way <= groups[:several, column, None])
            if copies or others:
                accesses = (self._writers if copies else self._readers).reshape(done.shape)
                who = accesses[done] & (1 << _PHASE) - 1 if copies else _EVERYONE << _OF_WARP
                accesses[done] = who | np.broadcast_to(phases, done.shape)[done]
            under_way[done] = 0

    def fence(self, blocks: Array) -> None:
        """Let products see what was written so far, and no copy is still bringing."""
        several = self._histories(blocks)
        self._unfenced.reshape(several, -1)[...] &= (self._pending.reshape(several, -1) > 0) | ~blocks[:several]

    def operands(self, places: Array, block: Array, dtype: np.dtype[Any], column: Array) -> Array:
        """Return numbers at places in bytes, (some, ...), which are read until somebody waits.

        `block` says where each of some is, and `column` which of the groups of products reads it.
        """
        shape, held = places.shape, self._bytes.view(dtype)
        first, rest = np.arange(len(self._bytes))[:, None], len(block) % len(self._bytes)
        of_blocks = [first] if rest else [x.reshape(len(first), -1) for x in (block, places, column)]
        alike = self._histories(of_blocks[0] - first, *of_blocks[1:]) == 1
        if alike:
            block, places, column = (x[: len(x) // len(first)] for x in (block, places, column))
        self._refuse_outside(places, dtype.itemsize)
        where = places // dtype.itemsize
        values: Array = (held[:, where.ravel()] if alike else held[_along(block, places), where]).reshape(shape)
        granules, owner, now = self._beside(places, block, dtype.itemsize)
        self._refuse_read(self._writers[granules], granules, now)
        self._refuse(self._unfenced[granules], granules, "reads what was written, and no fence.proxy.async since")
        self._asked, columns = True, np.repeat(column, granules.size // len(places))
        self._multiplied[columns, granules] = self.groups[owner, columns] + 1
        return values

    def bring(self, places: Array, block: Array, values: Array) -> tuple[Array, Array]:
        """Write what is there for who waits for an mbarrier; return its granules, and the block of each."""
        self._refuse_outside(places, values.itemsize)
        self._histories(np.arange(len(self._bytes)))
        granules, owner, now = self._beside(places, block, values.itemsize)
        self._refuse_write(granules, now)
        self._bytes.view(values.dtype)[_along(block, places), places // values.itemsize] = values
        self._writers[granules], self._pending[granules], self._unfenced[granules] = _ORDERED, _BY_BARRIER, False
        return granules, owner

    def arrive(self, granules: Array) -> None:
        """Let everyone have what was brought."""
        self._pending[granules] = 0

    def _beside(self, places: Array, block: Array, size: int) -> tuple[Array, Array, Array]:
        """Return granules of numbers at places in blocks, their blocks, and when no thread accesses them."""
        first = (places + self._size * _along(block, places)) // self._granule
        granules = (first[..., None] + np.arange(max(1, size // self._granule))).ravel()
        owner = granules * self._granule // self._size
        return granules, owner, self.phases[owner, 0] << _PHASE | _EVERYONE << _OF_WARP

    def _refuse_outside(self, places: Array, size: int) -> None:
        if ((places < 0) | (places + size > self._size) | (places % size != 0)).any():
            raise SharedMemoryError("goes beyond the shared memory, or is not aligned")

    def read(self, addresses: Array, mask: Array, dtype: np.dtype[Any]) -> Array:
        """Return unsigned integers; zeros where the mask hides them."""
        places = self._record_read(addresses, mask, dtype.itemsize)
        values = _taken(self._bytes.view(dtype), places // dtype.itemsize)
        return values if mask.all() else np.where(mask, values, dtype.type(0))

    def rows(self, addresses: Array, mask: Array) -> Array:
        """Return rows of eight 16-bit numbers that the lanes of a warp read together: (blocks, threads, 8).

        A row that nobody has written is NaN: who multiplies it need not keep the result.
        """
        places, shown, granules, _ = self._locate(addresses, mask, 16)
        written = np.ones(shown.shape, bool)
        written[shown] = (self._writers[granules] != _NOBODY).reshape(-1, 16 // self._granule).any(1)
        self._record_read(addresses, mask & written, 16, _SEVERAL)
        rows = _taken(self._bytes.view(np.uint16).reshape(len(self._bytes), -1, 8), places // 16)
        return rows if written.all() else np.where(written[..., None], rows, np.uint16(0xFFFF))

    def write(self, addresses: Array, mask: Array, values: Array, *, copied: bool = False) -> None:
        """Write unsigned integers; `copied` ones arrive when their group has been waited for."""
        places, shown, granules, now = self._locate(addresses, mask, values.itemsize)
        self._refuse_write(granules, now)
        held = self._bytes.view(values.dtype)
        if len(shown) < len(mask):
            held[:, places[shown] // values.itemsize] = values if shown.all() else values[:, shown[0]]
        else:
            held[mask.nonzero()[0], places[mask] // values.itemsize] = values[mask]
        self._writers[granules], self._unfenced[granules] = now, True
        self._pending[granules] = self.groups[granules * self._granule // self._size, COPIES] + 1 if copied else 0

    def update(self, addresses: Array, mask: Array, values: Array, compute: Callable[..., Array]) -> Array:
        """Replace numbers by what is computed of them and threads', one thread after the other; return those before.

        Threads that do so don't race with one another.
        """
        _, _, granules, now = self._locate(addresses, mask, values.itemsize)
        now = now & -1 << _PHASE | _ATOMIC
        first = self._writers[granules] != now
        self._refuse_read(self._writers[granules[first]], granules[first], now[first])
        self._refuse_write(granules[first], now[first])
        self._writers[granules], self._unfenced[granules] = now, True
        held, block = self._bytes.view(values.dtype), mask.nonzero()[0]
        place, given, before = addresses[mask] // values.itemsize, values[mask], np.zeros_like(values)
        old = np.zeros_like(given)
        for chosen in _turns(block * self._size + place):
            old[chosen] = held[block[chosen], place[chosen]]
            held[block[chosen], place[chosen]] = compute(old[chosen], given[chosen])
        before[mask] = old
        return before

    def _record_read(self, addresses: Array, mask: Array, size: int, lanes: int = 0) -> Array:
        """Check a read and record it; return its places as `_locate` does."""
        places, _, granules, now = self._locate(addresses, mask, size, lanes)
        writers, readers = self._writers[granules], self._readers[granules]
        self._refuse_read(writers, granules, now)
        self._readers[granules] = now
        # If several threads read in one phase, no single one is recorded.
        others = np.where(_unordered(readers, now), readers, self._readers[granules])
        met, far = others != now, (others ^ now) >> _OF_WARP != 0
        self._readers[granules[met]] = now[met] | _SEVERAL
        self._readers[granules[far]] = now[far] & -1 << _PHASE | _EVERYONE << _OF_WARP
        return places

    def _refuse_write(self, granules: Array, now: Array) -> None:
        self._refuse(self._pending[granules] > 0, granules, "writes what an asynchronous copy is bringing")
        if self._asked:
            reads = self._multiplied[:, granules].max(0) > 0
            self._refuse(reads, granules, "writes what a product may still read")
        for history, what in ((self._writers, "wrote"), (self._readers, "read")):
            self._refuse(_unordered(history[granules], now), granules, f"writes what another thread {what}")

    def _refuse_read(self, writers: Array, granules: Array, now: Array) -> None:
        self._refuse(writers == _NOBODY, granules, "reads what no thread has written")
        self._refuse(self._pending[granules] > 0, granules, "reads what an asynchronous copy is bringing")
        self._refuse(_unordered(writers, now), granules, "reads what another thread wrote")

    def _locate(self, addresses: Array, mask: Array, size: int, lanes: int = 0) -> tuple[Array, Array, Array, Array]:
        """Return places in bytes, which the mask shows, their granules, and who accesses each when.

        The first two are (histories, threads).
        """
        places = np.where(mask, addresses, 0)
        several = self._histories(places, mask)
        places, shown = places[:several], mask[:several]
        self._refuse_outside(places, size)
        block, thread = shown.nonzero()
        granules = ((places[shown] + self._size * block) // self._granule)[:, None] + np.arange(size // self._granule)
        phases = self.phases[block, 0] << _PHASE | self.phases_of_warps[block, thread // WARP] << _PHASE_OF_WARP
        now = phases | self._who[thread] | lanes
        return places, shown, granules.ravel(), np.repeat(now, granules.shape[1])

    def _refuse(self, wrong: Array, granules: Array, what: str) -> None:
        if wrong.any():
            byte = int(granules[wrong][0]) * self._granule % self._size
            reason = f"{what}" + (" and no barrier lies between" if "another" in what else "")
            raise SharedMemoryError(f"{reason}: byte {byte} of the block's shared memory")


def _turns(places: Array) -> Iterator[Array]:
    """Yield those who come to different places at once, the first to each first."""
    order = np.argsort(places, kind="stable")
    turn = np.arange(order.size) - np.searchsorted(places[order], places[order])  # of those for one place
    for number in range(turn.max(initial=-1) + 1):
        yield order[turn == number]


def _along(block: Array, places: Array) -> Array:
    """Return blocks in a form that broadcasts to places, (some, ...)."""
    return block.reshape(-1, *[1] * (places.ndim - 1))


def _taken(held: Array, places: Array) -> Array:
    """Return what each block holds at its places, or all at the same: (blocks, ...) and (blocks or 1, threads)."""
    taken: Array = held[np.arange(len(held))[:, None], places] if len(places) > 1 else held[:, places[0]]
    return taken


def _unordered(before: Array, now: Array) -> Array:
    """Return whether no barrier orders two accesses by different threads."""
    difference = before ^ now
    in_phase: Array = difference >> _PHASE == 0  # nobody's is negative
    if not in_phase.any():
        return in_phase
    one_thread = (difference & (1 << _PHASE_OF_WARP) - 1 == 0) & (now & _SEVERAL == 0)
    of_warp = difference >> _OF_WARP & (1 << _PHASE_OF_WARP - _OF_WARP) - 1 == 0  # which has its own barrier
    unordered: Array = in_phase & ~one_thread & ~(of_warp & (difference >> _PHASE_OF_WARP != 0))
    return unordered
