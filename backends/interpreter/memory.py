"""The memory that a launch may touch: that of its arguments."""

import ctypes
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from tiebreak.kernels.kernel import OutOfBoundsError

Array = NDArray[Any]
Shape = tuple[int, ...]
_REGION = 48  # bits of an address within a storage's region, where all memory of a process is in the first one


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
    shift: int = 0  # bytes by which a kernel sees all that behind its memory

    @property
    def memory(self) -> int:
        """The true address of its storage."""
        return self.start - self.shift

    def elements(self, size: int) -> Array:
        """Return the storage as unsigned integers of `size` bytes."""
        memory: Any = (ctypes.c_char * (self.end - self.start)).from_address(self.memory)
        return np.ndarray(((self.end - self.start) // size,), f"u{size}", memory)


@dataclass(frozen=True)
class Boxes:
    """Elements of one storage, as boxes of equal shape."""

    holder: Argument
    size: int  # of one element, in bytes
    starts: Array  # the boxes' first elements, (boxes,)
    shape: Shape = ()
    strides: Shape = ()  # in elements

    def read(self, elements: Array) -> Array:
        """Return the contents of the boxes, (boxes, *shape); a view of the elements if they are equally far apart."""
        steps = self.starts[1:] - self.starts[:-1]
        if (steps == steps[:1]).all() and (steps[:1] >= 0).all():
            return self._window(elements, int(steps[0]) if len(steps) else 1)
        return np.asarray(self._window(elements, 1)[self.starts - self.starts.min()])

    def write(self, elements: Array, values: Array) -> None:
        """Fill the boxes, one after the other."""
        self._window(elements, 1)[self.starts - self.starts.min()] = values

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
EVERYWHERE = Argument("*", 2**12, 2**_REGION, 2**12)


@dataclass(frozen=True)
class KernelMemory:
    """The arguments of a kernel that lie in memory, by their parameters' names."""

    kernel: str
    arguments: tuple[Argument, ...]

    def holder(self, low: int, high: int) -> Argument | None:
        """Return the argument that holds all bytes from `low` to `high`; EVERYWHERE where no argument is near."""
        near = self._near(low)
        if not near and not low >> _REGION:
            return EVERYWHERE
        return next((each for each in near if each.start <= low and high <= each.end), None)

    def _near(self, address: int) -> list[Argument]:
        """Return the arguments in the region of an address: those of one storage where a kernel sees them apart."""
        return [each for each in self.arguments if each.start >> _REGION == address >> _REGION]

    def true(self, addresses: Array) -> Array:
        """Return the addresses of the memory that a kernel sees at some, uint64."""
        for each in self.arguments:
            inside = addresses >> np.uint64(_REGION) == each.start >> _REGION
            addresses = np.where(inside, addresses - np.uint64(each.shift), addresses)
        return addresses

    def boxes(
        self, terms: Iterable[Array], shown: Array, shape: Shape, axis: int, size: int
    ) -> tuple["Boxes", Array, tuple[Any, ...]] | None:
        """Return the visible part of a tile as boxes of its axes from `axis` on; which of them are visible; its index.

        None if it is not made of such boxes in one argument.

        Args:
            terms: of addresses, their sums; int64, they broadcast to the tile.
            shown: at least in part; broadcasts to it too.
            shape: of the tile, programs first.
            axis: the first of the boxes' axes.
            size: of one element, in bytes.
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
        holder = self.holder(int(starts.min()), int(starts.max()) + reach + size)
        if holder is None or any(stride % size for stride in strides) or min(strides, default=0) < 0:
            return None
        starts -= holder.start
        if (starts % size).any():
            return None
        boxes = Boxes(holder, size, starts // size, lengths, tuple(stride // size for stride in strides))
        leading = (slice(None),) if axis == 1 and whole.all() else np.nonzero(whole)
        return boxes, whole, (*leading, *part)

    def check(self, addresses: Array, mask: Array, size: int, verb: str) -> None:
        """Refuse an access outside of the arguments.

        Args:
            addresses: of elements, uint64.
            mask: which of them are accessed.
            size: of one element, in bytes.
            verb: what is done there.
        """
        if not mask.any():
            return
        addresses, mask = np.broadcast_arrays(addresses, mask)
        touched = addresses[mask]
        low, high = int(touched.min()), int(touched.max()) + size
        if self.holder(low, high):
            return
        near = self._near(low) or self.arguments
        if len(near) > 1:
            where = f"all of its arguments: {', '.join(argument.name for argument in near)}"
        else:
            (arg,) = near
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


def seen_apart(arguments: Iterable[Argument]) -> Iterator[Argument]:
    """Yield arguments as a kernel sees them: their storages far apart, at the same addresses in each launch."""
    regions: dict[int, int] = {}
    for each in arguments:
        region = regions.setdefault(each.start, 1 + len(regions))
        shift = (region << _REGION) + (1 << _REGION - 1) + each.start % 64 - each.start  # aligned as it is
        yield replace(each, start=each.start + shift, end=each.end + shift, first=each.first + shift, shift=shift)
