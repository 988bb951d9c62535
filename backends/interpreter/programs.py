"""Programs of a launch that run together: a leading axis of all data, as long as they go the same way.

Where one after the other would give something else, or might, memory is put back, and they run so.
"""

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tiebreak.backends.interpreter.memory import EVERYWHERE, Boxes, Shape
from tiebreak.backends.interpreter.numbers import Array

_MOST_AT_ONCE = 2**20  # elements of a tile, of all programs that run together
_PARTINGS = 8  # after which the programs of a group run alone: each has begun anew as often


class PartingError(Exception):
    """Programs of a group take different branches: those that agree start again."""

    def __init__(self, parts: Sequence[Array]) -> None:
        super().__init__()
        self.parts = parts  # their places in the group


class ApartError(Exception):
    """The result depends on the order of programs."""


@dataclass
class Together:
    """A record of the memory accesses of a launch's programs, while they may run together.

    The result is that of running them in order if all that access what one of them writes do so in their order.
    """

    followed: set[int] = field(default_factory=set)  # storages that are both read and written, by address
    fit: int = 2**62  # programs of which tiles are not too large
    _kinds: dict[int, str] = field(default_factory=dict)  # of access to the others: one kind each
    stores: list[tuple[Boxes, Array]] = field(default_factory=list)  # of values to the others, made when all have run
    #: By storage, the size of a unit in bytes, and the last program that accessed each unit.
    _last: dict[int, tuple[int, Array]] = field(default_factory=dict)
    _before: dict[int, bytes] = field(default_factory=dict)  # what storages held that were written to at once
    _once: bool = False  # whether something was done that doing it anew would change

    def run(self, program: Callable[[Array, "Together"], None], count: int) -> bool:
        """Run programs 0 to `count` - 1; return False, with memory as before, if they must run one after the other."""
        waiting, before = [(np.arange(count), 0)], len(self.followed)
        try:
            while waiting:
                group, partings = waiting.pop()
                fit = self.fit if partings < _PARTINGS else 1
                if len(group) > fit:
                    waiting += [(group[at : at + fit], partings) for at in reversed(range(0, len(group), fit))]
                    continue
                try:
                    program(group, self)
                except PartingError as parting:
                    if self._once:
                        raise ApartError from parting
                    waiting += [(group[part], partings + 1) for part in reversed(parting.parts)]
        except Exception:  # an error too comes when it should: one after the other
            for address, held in self._before.items():
                ctypes.memmove(address, held, len(held))
            return len(self.followed) > before and Together(self.followed, self.fit).run(program, count)
        for boxes, values in self.stores:
            boxes.write(boxes.holder.elements(boxes.size), values)
        return True

    def agreed(self, values: Array) -> Any:
        """Return the one value that all programs of a group have, (programs,)."""
        if (values == values[0]).all():
            return values[0]
        _, first, kinds, counts = np.unique(values, return_index=True, return_inverse=True, return_counts=True)
        parts = np.split(np.argsort(kinds, kind="stable"), np.cumsum(counts)[:-1])
        raise PartingError([parts[kind] for kind in np.argsort(first)])

    def tile(self, shape: Shape) -> None:
        """Split a group whose tiles, of this shape, would be too large."""
        programs, size = shape[0], math.prod(shape[1:])
        if programs > 1 and programs * size > _MOST_AT_ONCE:
            self.fit = max(1, _MOST_AT_ONCE // size)
            raise PartingError(np.split(np.arange(programs), range(self.fit, programs, self.fit)))

    def touch(self, boxes: Boxes, programs: tuple[Array, Array], *, writes: bool, atomic: bool = False) -> None:
        """Record an access.

        Args:
            boxes: that are touched.
            programs: the first and the last that touch a box, for each box or for all.
            writes: whether it is written to.
            atomic: whether it is read at once with that.
        """
        address, size, (first, last) = boxes.holder.memory, boxes.holder.end - boxes.holder.start, programs
        if boxes.holder is EVERYWHERE:
            raise ApartError("it isn't known what is touched")
        kind = "atomic" if atomic else "writes" if writes else "reads"
        if address not in self.followed:
            if self._kinds.setdefault(address, kind) != kind:
                self.followed.add(address)
                raise ApartError("it is accessed in two ways: from the start on, it is followed by whom")
            if not writes:
                return
        if atomic or (writes and address in self.followed):
            self._once = True
            if address not in self._before:
                self._before[address] = ctypes.string_at(address, size)
        each, (unit, touched) = boxes.size * boxes.unit, self._last.get(address, (0, np.full(1, -1, np.int32)))
        common = math.gcd(each, unit)  # bytes
        if common % boxes.size:
            raise ApartError("its elements have two sizes")
        if common != unit:
            length = -(-size // common)
            touched = np.repeat(touched, unit // common if unit else length)[:length]
            self._last[address] = common, touched
        boxes = boxes.coarse(common // boxes.size)
        across = (..., *(None,) * len(boxes.shape))
        if (boxes.read(touched) > first[across]).any():
            raise ApartError("a later program was first")
        boxes.write(touched, last[across])
