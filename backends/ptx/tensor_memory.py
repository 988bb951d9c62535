"""The tensor memory of Blackwell's cards: of every block 128 lanes and 512 columns of 32 bits.

Places are arrays (some, lanes, columns) that broadcast. Half a warp's lanes have one history, column by column.
"""

from typing import NamedTuple

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP, SharedMemoryError

LANES, COLUMNS, _HALF = 128, 512, WARP // 2
_NOBODY, _NAN = -1, np.uint32(2**32 - 1)
_NO_WAIT = "reads what was stored, and no tcgen05.wait::st since"


class Spot(NamedTuple):
    """Places in tensor memory."""

    block: Array
    lane: Array
    column: Array

    def halves(self) -> tuple[Array, Array, Array]:
        """Return the places of their histories."""
        return self.block, self.lane[:, ::_HALF] // _HALF, self.column[:, ::_HALF]

    def words(self) -> Array:
        """Return the numbers of its words, one block's after the other's."""
        numbers: Array = (self.block * LANES + self.lane) * COLUMNS + self.column
        return numbers


class TensorMemory:
    """The tensor memory of some blocks, and what is under way there."""

    def __init__(self, blocks: int) -> None:
        """Have nothing written."""
        self.allocated = 0  # columns
        self._words = np.zeros(blocks * LANES * COLUMNS, np.uint32)
        shape = blocks, LANES // _HALF, COLUMNS
        self._written = np.full(shape, _NOBODY, np.int64)  # the block's phase in which threads stored last
        self._storing = np.zeros(shape, bool)  # no tcgen05.wait::st since
        # The groups of products that bring it and that may still read it; 0: none.
        self._brought, self._taken = np.zeros(shape, np.int32), np.zeros(shape, np.int32)

    def load(self, spot: Spot) -> Array:
        """Return words for threads. Those that nobody has written are NaN: a loop that isn't entered may be begun."""
        where = spot.halves()
        self._refuse(self._storing[where], _NO_WAIT)
        self._refuse(self._brought[where] > 0, "reads what a product is bringing")
        return np.where((self._written[where] == _NOBODY).repeat(_HALF, 1), _NAN, self._words[spot.words()])

    def take(self, spot: Spot, phases: Array, groups: Array) -> Array:
        """Return words for a group of products, in a phase of their block."""
        where = spot.halves()
        self._refuse(self._written[where] == _NOBODY, "reads what nobody has written")
        self._refuse(self._storing[where], _NO_WAIT)
        stored = self._written[where] == phases
        self._refuse(stored, "reads what other threads stored, and no barrier lies between")
        self._taken[spot.halves()] = groups
        words: Array = self._words[spot.words()]
        return words

    def store(self, spot: Spot, words: Array, phases: Array) -> None:
        """Write words of threads in a phase of their block."""
        where = spot.halves()
        self._refuse(self._brought[where] > 0, "writes what a product is bringing")
        self._refuse(self._taken[where] > 0, "writes what a product may still read")
        self._words[spot.words()], self._written[where], self._storing[where] = words, phases, True

    def bring(self, spot: Spot, words: Array, groups: Array) -> None:
        """Write words that are there when their group of products is."""
        where = spot.halves()
        self._words[spot.words()], self._brought[where] = words, groups
        self._written[where] = np.maximum(self._written[where], 0)

    def stored(self, block: Array, warp: Array) -> None:
        """Let the stores of warps, those of four in turn, be there."""
        for half in (0, 1):
            self._storing[block, warp % 4 * 2 + half] = False

    def complete(self, groups: Array) -> None:
        """End groups of products up to a number, (blocks, 1)."""
        for under_way in (self._brought, self._taken):
            under_way[under_way <= groups[..., None]] = 0

    def _refuse(self, wrong: Array, what: str) -> None:
        if wrong.any():
            raise SharedMemoryError(f"{what}, in tensor memory")
