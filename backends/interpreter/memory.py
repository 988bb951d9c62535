"""The memory that a launch may touch, that of its arguments, and pointers into it."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from triton.runtime.interpreter import TensorHandle

from tiebreak.backends.interpreter.numbers import Array

ANYWHERE = "*"  # of a pointer that was itself read from memory: nobody here knows what it may point to


class OutOfBoundsError(IndexError):
    """The kernel reads or writes where none of its arguments lies; one line with the kernel and the argument."""


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given."""

    name: str
    start: int  # address of its storage
    end: int
    first: int  # address of its first element


@dataclass(frozen=True)
class Memory:
    """What a kernel was given, by its parameters' names."""

    kernel: str
    arguments: tuple[Argument, ...]

    def box(self, pointers: "Pointers", dtype: np.dtype[Any]) -> Array | None:
        """What a tile's pointers point to, as an array of that memory; None where it is no box of one argument."""
        name, shape = pointers.attr.get("argument"), pointers.terms[0].shape
        first, strides = 0, [0] * len(shape)
        for term in map(compact, pointers.terms):
            first += int(term.flat[0])
            for axis in np.flatnonzero(np.array(term.shape) > 1):
                steps = np.diff(term, axis=axis)
                if (steps != steps.flat[0]).any():
                    return None
                strides[axis] += int(steps.flat[0])
        reach = sum(stride * (length - 1) for stride, length in zip(strides, shape, strict=True))
        inside = [each for each in self.arguments if each.name == name and each.start <= first]
        if min(strides, default=0) < 0 or len(inside) != 1 or first + reach + dtype.itemsize > inside[0].end:
            return None
        memory: Any = (ctypes.c_char * (reach + dtype.itemsize)).from_address(first)
        return np.ndarray(shape, dtype, memory, 0, strides)

    def check(self, addresses: Array, mask: Array, size: int, name: str | None, verb: str) -> None:
        """Refuse an access outside of the storage of the argument that a pointer comes from.

        Args:
            addresses: of elements, uint64.
            mask: which of them are accessed.
            size: of one element, in bytes.
            name: the argument; None where a pointer's origin is lost, and it must lie in one of them.
            verb: what is done there.
        """
        if name == ANYWHERE or not mask.any():
            return
        touched = addresses if mask.all() else np.broadcast_to(addresses, mask.shape)[mask]
        low, high = int(touched.min()), int(touched.max()) + size
        allowed = [argument for argument in self.arguments if name in (None, argument.name)]
        if not allowed or any(argument.start <= low and high <= argument.end for argument in allowed):
            return
        if len(allowed) > 1:
            where = f"all of its arguments: {', '.join(argument.name for argument in allowed)}"
        else:
            (own,) = allowed
            wrong = low if low < own.start else high - size
            where = f"its argument {own.name}: element {(wrong - own.first) // size} of {(own.end - own.first) // size}"
        raise OutOfBoundsError(f"{self.kernel} {verb} outside of {where}")


def arguments_of(bound: Mapping[str, Any]) -> Iterator[Argument]:
    """The tensors among a call's arguments, those in tuples and descriptors too."""
    for name, value in bound.items():
        base = getattr(value, "base", None)  # of a descriptor and of a tensor whose type was reinterpreted
        tensor = base if isinstance(base, torch.Tensor) else value
        if isinstance(value, tuple | list):
            yield from arguments_of({f"{name}[{number}]": element for number, element in enumerate(value)})
        elif isinstance(tensor, torch.Tensor):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            yield Argument(name, start, start + storage.nbytes(), tensor.data_ptr())


class Pointers(TensorHandle):  # type: ignore[misc]
    """Addresses of a tile, which are added up where someone asks for them: most tiles are a box of a tensor."""

    def __init__(self, terms: tuple[Array, ...], like: Any) -> None:
        """Of terms, int64, of which the first has the tile's shape and all broadcast to it."""
        self.terms, self.dtype, self.attr = terms, like.dtype, dict(like.attr)

    @cached_property
    def data(self) -> Array:
        """The addresses, uint64."""
        return np.sum(np.broadcast_arrays(*self.terms), axis=0).view(np.uint64)


def compact(x: Array) -> Array:
    """An array without what broadcasting has repeated: those dimensions are 1 long."""
    return x[(..., *(slice(None if stride else 1) for stride in x.strides))]
