"""Pointers of tiles, kept as sums of what varies along few dimensions: most tiles are a box of a tensor, not a list."""

from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from tiebreak.backends.interpreter.numbers import Array

Handle = Any  # triton's TensorHandle


def compact(x: Array) -> Array:
    """An array without what broadcasting has repeated: those dimensions are 1 long."""
    return x[tuple(slice(None if stride else 1) for stride in x.strides)]


class Pointers(TensorHandle):  # type: ignore[misc]
    """Addresses that are added up when someone asks for them."""

    def __init__(self, terms: tuple[Array, ...], shape: tuple[int, ...], dtype: tl.dtype) -> None:
        """Nothing is added up.

        Args:
            terms: uint64, compact, of as many dimensions as the shape, to which they broadcast.
            shape: of the tile.
            dtype: Triton's type of a pointer.
        """
        self.terms, self.shape, self.dtype = terms, shape, dtype
        self.attr: dict[str, Any] = {}
        self._data: Array | None = None

    @property
    def data(self) -> Array:
        """The addresses, uint64."""
        if self._data is None:
            total = self.terms[0]
            for term in self.terms[1:]:
                total = total + term
            self._data = np.broadcast_to(total, self.shape)
        return self._data

    @classmethod
    def of(cls, handle: Handle) -> "Pointers":
        """Those of any handle of a pointer."""
        if isinstance(handle, cls):
            return handle
        return cls((compact(handle.data),), handle.data.shape, handle.dtype)

    def moved(self, offset: Array) -> "Pointers":
        """By so many elements each."""
        size = max(1, self.get_element_ty().primitive_bitwidth // 8)  # a bool takes a byte
        term = compact(offset).astype(np.uint64) * np.uint64(size)
        shape = np.broadcast_shapes(self.shape, offset.shape)
        return Pointers((*self.terms, term), shape, self.dtype)

    def expanded(self, axis: int) -> "Pointers":
        """With one more dimension."""
        terms = tuple(np.expand_dims(term, axis) for term in self.terms)
        return Pointers(terms, (*self.shape[:axis], 1, *self.shape[axis:]), self.dtype)

    def broadcast(self, shape: tuple[int, ...]) -> "Pointers":
        """In a larger shape of as many dimensions."""
        return Pointers(self.terms, shape, self.dtype)

    def box(self) -> tuple[int, tuple[int, ...]] | None:
        """The first address, and how many bytes lie between neighbours along each dimension; None: they are no box."""
        first, strides = 0, [0] * len(self.shape)
        for term in self.terms:
            signed = term.view(np.int64)
            first += int(signed.flat[0])
            for axis in (axis for axis, length in enumerate(term.shape) if length > 1):
                steps = np.diff(signed, axis=axis)
                if (steps != steps.flat[0]).any():
                    return None
                strides[axis] += int(steps.flat[0])
        return first, tuple(strides)
