"""The memory that a launch may touch: that of its arguments."""

import ctypes
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tiebreak.backends.interpreter.errors import OutOfBoundsError
from tiebreak.backends.interpreter.numbers import Array

ANYWHERE = "*"  # of a pointer that was itself read from memory: nobody here knows what it may point to


@dataclass(frozen=True)
class Argument:
    """A tensor that a kernel was given."""

    name: str
    start: int  # address of its storage
    end: int
    first: int  # address of its first element

    def elements(self, dtype: np.dtype[Any]) -> Array:
        """All of its storage, as so many elements as fit in."""
        count = (self.end - self.start) // dtype.itemsize
        memory: Any = (ctypes.c_char * (count * dtype.itemsize)).from_address(self.start)
        buffer: Array = np.frombuffer(memory, dtype, count)
        return buffer


@dataclass(frozen=True)
class Memory:
    """What a kernel was given, by its parameters' names."""

    kernel: str
    arguments: tuple[Argument, ...]

    def located(
        self, addresses: Array, mask: Array, dtype: np.dtype[Any], name: str | None, verb: str
    ) -> tuple[Array, Array] | None:
        """An argument's elements, and where among them a pointer points.

        Args:
            addresses: of elements, uint64.
            mask: which of them are accessed, in their shape.
            dtype: of an element.
            name: the argument that the pointer comes from; None where that is lost.
            verb: what is done there.

        Returns:
            The elements of the argument's storage, and indices into them, 0 where the mask hides one; None where more
            than one argument may be meant, or elements lie askew: then all that is known is that they lie in one.

        Raises:
            OutOfBoundsError: some lie outside.
        """
        meant = [argument for argument in self.arguments if argument.name == name]
        if len(meant) != 1 or (int(addresses.flat[0]) - meant[0].start) % dtype.itemsize:
            self.check(addresses, mask, dtype.itemsize, name, verb)
            return None
        elements = meant[0].elements(dtype)
        # A pointer before the start wraps to a number beyond every end.
        index = (addresses - np.uint64(meant[0].start)).view(np.int64) // dtype.itemsize
        if not mask.all():
            index = np.where(mask, index, 0)
        if not mask.any() or (index.min() >= 0 and index.max() < len(elements)):
            return elements, index
        self.check(addresses, mask, dtype.itemsize, name, verb)
        return None

    def check(self, addresses: Array, mask: Array, size: int, name: str | None, verb: str) -> None:
        """Refuse an access outside of the storage of the argument that a pointer comes from.

        Args:
            addresses: of elements, uint64.
            mask: which of them are accessed.
            size: of one element, in bytes.
            name: the argument; None where a pointer's origin is lost, and it must lie in one of them.
            verb: what is done there.

        Raises:
            OutOfBoundsError: some lie outside.
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
        if isinstance(value, tuple | list):
            yield from arguments_of({f"{name}[{number}]": element for number, element in enumerate(value)})
        else:
            yield from _of_tensor(name, value)


def _of_tensor(name: str, value: Any) -> Iterator[Argument]:
    base = getattr(value, "base", None)  # of a descriptor and of a tensor whose type was reinterpreted
    tensor = base if isinstance(base, torch.Tensor) else value
    if isinstance(tensor, torch.Tensor):
        storage = tensor.untyped_storage()
        start = storage.data_ptr()
        yield Argument(name, start, start + storage.nbytes(), tensor.data_ptr())
