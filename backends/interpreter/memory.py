"""The memory that a launch may touch: that of its arguments."""

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiebreak.kernels.kernel import OutOfBoundsError

Array = NDArray[Any]
Shape = tuple[int, ...]
ANYWHERE = "*"  # of a pointer that was itself read from memory: its target is unknown


def spread(x: Array, shape: Shape) -> Array:
    """Return an array broadcast to a shape, which most have already: numpy takes a while to find that."""
    return x if x.shape == shape else np.broadcast_to(x, shape)


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given."""

    name: str
    start: int  # address of its storage
    end: int
    first: int  # address of its first element

    def elements(self, size: int) -> Array:
        """Return the storage as unsigned integers of `size` bytes."""
        memory: Any = (ctypes.c_char * (self.end - self.start)).from_address(self.start)
        return np.ndarray(((self.end - self.start) // size,), f"u{size}", memory)


@dataclass(frozen=True)
class Boxes:
    """Elements of one storage, as boxes of equal shape."""

    holder: Argument
    size: int  # of one element, in bytes
    starts: Array  # the boxes' first elements, (boxes,)
    shape: Shape = ()
    strides: Shape = ()  # in elements

    def read(self, elements: Array, *, lasting: bool = False) -> Array:
        """Return the contents of the boxes, (boxes, *shape), from the storage's elements.

        Where they are `lasting`, boxes that are equally far apart are not copied, and are to be read only.
        """
        step = self._step()
        if step is None or not lasting:
            boxes: Array = self._window(elements, 1)[self.starts - self.starts.min()]
        else:
            boxes = self._window(elements, step)
            boxes.flags.writeable = False
        return boxes

    def write(self, elements: Array, values: Array) -> None:
        """Fill the boxes, one after the other."""
        step = self._step()
        if step is not None and step > self._reach:
            self._window(elements, step)[...] = values
        else:
            self._window(elements, 1)[self.starts - self.starts.min()] = values

    @property
    def _reach(self) -> int:
        """How far behind its first element the last element of a box lies."""
        return sum(stride * (length - 1) for stride, length in zip(self.strides, self.shape, strict=True))

    def _step(self) -> int | None:
        """Return how far a box starts behind the one before it; None if one starts before it, or not as far."""
        steps = self.starts[1:] - self.starts[:-1]
        if not len(steps):
            return self._reach + 1
        return int(steps[0]) if steps[0] >= 0 and (steps == steps[0]).all() else None

    def _window(self, elements: Array, step: int) -> Array:
        """Return a view with a box at every `step` elements from the first box to the last; at none, the same again."""
        low, high = int(self.starts.min()), int(self.starts.max())
        strides = tuple(stride * elements.itemsize for stride in (step, *self.strides))
        count = (high - low) // step + 1 if step else len(self.starts)
        return np.ndarray((count, *self.shape), elements.dtype, elements, low * elements.itemsize, strides)

    @property
    def overlap(self) -> bool:
        """True if a box contains an element more than once."""
        return any(length > 1 and stride == 0 for length, stride in zip(self.shape, self.strides, strict=True))

    @property
    def unit(self) -> int:
        """The length of the runs of elements that all boxes consist of, each aligned to a multiple of it."""
        run, apart = self._run()
        return math.gcd(run, *(stride for _, stride in apart), int(np.gcd.reduce(self.starts)))

    def coarse(self, unit: int) -> "Boxes":
        """Return the boxes in units of `unit` elements."""
        run, apart = self._run()
        shape, strides = zip(*((length, stride // unit) for length, stride in apart), (run // unit, 1), strict=True)
        return Boxes(self.holder, self.size * unit, self.starts // unit, shape, strides)

    def _run(self) -> tuple[int, list[tuple[int, int]]]:
        """Return how many elements are contiguous, and the lengths and strides of the other axes."""
        run, apart = 1, [axis for axis in zip(self.shape, self.strides, strict=True) if axis[0] > 1]
        while apart and apart[-1][1] == run:
            run *= apart.pop()[0]
        return run, apart


#: Where pointers may point to that a kernel has read from memory.
_EVERYWHERE = Argument(ANYWHERE, 2**12, 2**62, 2**12)


@dataclass(frozen=True)
class KernelMemory:
    """The arguments of a kernel that lie in memory, by their parameters' names."""

    kernel: str
    arguments: tuple[Argument, ...]

    def holder(self, low: int, high: int, name: str | None) -> Argument | None:
        """Return the argument that holds all bytes from `low` to `high`: the one of this name, or any if None."""
        allowed = [argument for argument in self.arguments if name in (None, argument.name)]
        if name == ANYWHERE or not allowed:
            return _EVERYWHERE
        return next((each for each in allowed if each.start <= low and high <= each.end), None)

    def boxes(
        self, terms: Iterable[Array], shown: Array, shape: Shape, axis: int, size: int, name: str | None
    ) -> tuple["Boxes", Array, tuple[Any, ...]] | None:
        """Return the visible part of a tile as boxes of its axes from `axis` on; which of them are visible; its index.

        None if it is not made of such boxes in one argument.

        Args:
            terms: of addresses, their sums; int64, they broadcast to the tile.
            shown: at least in part; broadcasts to it too.
            shape: of the tile, programs first.
            axis: the first of the boxes' axes.
            size: of one element, in bytes.
            name: the argument; None: any.
        """
        part = tuple(_stretch(shown, shape, at) for at in range(axis, len(shape)))
        box = tuple(range(axis, len(shape)))
        if (affine := _affine(terms, axis)) is None:
            return None
        if shown.size == 1:  # the whole tile
            whole: Array = np.ones((1,) * axis, bool)
        else:
            index: Any = tuple(p if shown.shape[at] > 1 else slice(None) for at, p in zip(box, part, strict=True))
            cut = shown[(..., *index)]
            whole = np.asarray(cut.all(box))
            if (whole != cut.any(box)).any():
                return None
        each = np.broadcast_shapes(whole.shape, affine[0].shape, (1, *shape[1:axis]))
        whole, firsts = spread(whole, each), spread(affine[0], each)
        strides = affine[1] or [0] * len(part)
        starts = firsts[whole] + sum(stride * p.start for stride, p in zip(strides, part, strict=True))
        lengths = tuple(p.stop - p.start for p in part)
        reach = sum(stride * (length - 1) for stride, length in zip(strides, lengths, strict=True))
        holder = self.holder(int(starts.min()), int(starts.max()) + reach + size, name)
        if holder is None or any(stride % size for stride in strides) or min(strides, default=0) < 0:
            return None
        starts -= holder.start
        if (starts % size).any():
            return None
        boxes = Boxes(holder, size, starts // size, lengths, tuple(stride // size for stride in strides))
        leading = (slice(None),) if axis == 1 and whole.all() else np.nonzero(whole)
        return boxes, whole, (*leading, *part)

    def check(self, addresses: Array, mask: Array, size: int, name: str | None, verb: str) -> None:
        """Refuse an access outside the storage of the argument that a pointer comes from.

        Args:
            addresses: of elements, uint64.
            mask: which of them are accessed.
            size: of one element, in bytes.
            name: the argument; None where a pointer's origin is lost, and it must lie in one of them.
            verb: what is done there.
        """
        if name == ANYWHERE or not mask.any():
            return
        addresses, mask = np.broadcast_arrays(addresses, mask)
        touched = addresses[mask]
        low, high = int(touched.min()), int(touched.max()) + size
        allowed = [argument for argument in self.arguments if name in (None, argument.name)]
        if not allowed or self.holder(low, high, name):
            return
        if len(allowed) > 1:
            where = f"all of its arguments: {', '.join(argument.name for argument in allowed)}"
        else:
            (arg,) = allowed
            wrong = low if low < arg.start else high - size
            where = f"its argument {arg.name}: element {(wrong - arg.first) // size} of {(arg.end - arg.first) // size}"
        raise OutOfBoundsError(f"{self.kernel} {verb} outside of {where}")


def _stretch(shown: Array, shape: Shape, axis: int) -> slice:
    """Return the shortest part of a tile's axis that contains all that is visible."""
    if shown.shape[axis] == 1:
        return slice(0, shape[axis])
    places = np.flatnonzero(shown.any(tuple(other for other in range(shown.ndim) if other != axis)))
    return slice(int(places[0]), int(places[-1]) + 1)


def _affine(terms: Iterable[Array], axis: int) -> tuple[Array, list[int]] | None:
    """Return a sum of terms at the first places of all axes from `axis` on, and its steps there; None without one."""
    firsts: Array = np.zeros((1,) * axis, np.int64)
    strides: list[int] = []
    for term in terms:
        strides = strides or [0] * (term.ndim - axis)
        for at in (at for at in range(axis, term.ndim) if term.shape[at] > 1):
            steps = term.swapaxes(0, at)[1:] - term.swapaxes(0, at)[:-1]
            if (steps != steps.flat[0]).any():
                return None
            strides[at - axis] += int(steps.flat[0])
        first: Any = (..., *(0,) * len(strides))
        firsts = firsts + term[first]
    return firsts, strides


def arguments_of(bound: Mapping[str, Any]) -> Iterator[Argument]:
    """Yield the tensors among a call's arguments, those in tuples and descriptors too."""
    for name, value in bound.items():
        base = getattr(value, "base", None)  # of a descriptor and of a tensor whose type was reinterpreted
        tensor = base if isinstance(base, torch.Tensor) else value
        if isinstance(value, tuple | list):
            yield from arguments_of({f"{name}[{number}]": element for number, element in enumerate(value)})
        elif isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            yield Argument(name, start, start + storage.nbytes(), tensor.data_ptr())
