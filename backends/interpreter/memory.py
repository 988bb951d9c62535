"""The memory that a launch may touch: that of its arguments."""

import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

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

    def box(self, terms: Iterable[NDArray[Any]], shape: tuple[int, ...], dtype: np.dtype[Any], name: str | None) -> Any:
        """The memory at addresses that are sums of terms, as an array; None where it is no box of one argument."""
        first, strides = 0, [0] * len(shape)
        for term in terms:
            first += int(term.flat[0])
            for axis in np.flatnonzero(np.array(term.shape) > 1):
                steps = np.diff(term, axis=axis)
                if (steps != steps.flat[0]).any():
                    return None
                strides[axis] += int(steps.flat[0])
        reach = sum(stride * (length - 1) for stride, length in zip(strides, shape, strict=True))
        end = first + reach + dtype.itemsize
        inside = [each for each in self.arguments if each.name == name and each.start <= first and end <= each.end]
        if min(strides, default=0) < 0 or not inside:
            return None
        memory: Any = (ctypes.c_char * (end - first)).from_address(first)
        return np.ndarray(shape, dtype, memory, 0, strides)

    def check(self, addresses: NDArray[Any], mask: NDArray[Any], size: int, name: str | None, verb: str) -> None:
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
