"""Numpy types that hold Triton's types, and casts between them."""

from typing import Any

import ml_dtypes
import numpy as np
import torch
import triton.language as tl
from numpy.typing import NDArray

from tiebreak.backends.emulation.rounding import fma, odd_sum
from tiebreak.backends.interpreter.memory import spread
from tiebreak.kernels.kernel import CannotRunError

Array = NDArray[Any]

_NARROW = {
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}
# PTX converts to 8 bits with .satfinite alone, and Triton asks the same of AMD's: beyond the largest number lies none.
_LARGEST = {dtype: float(ml_dtypes.finfo(dtype).max) for dtype in _NARROW.values() if dtype.itemsize == 1}  # type: ignore[no-untyped-call]
_NAMES = "float16 float32 float64 int8 uint8 int16 uint16 int32 uint32 int64 uint64"
_TYPES: dict[tl.dtype, np.dtype[Any]] = {getattr(tl, name): np.dtype(name) for name in _NAMES.split()} | _NARROW
_TYPES[tl.int1] = np.dtype(bool)


def numpy_type(dtype: tl.dtype) -> np.dtype[Any]:
    """Return the numpy type of a Triton type: a block's its elements', a pointer's an address; CannotRunError: none."""
    element = dtype.scalar
    if element.is_ptr():
        return np.dtype(np.uint64)
    if element not in _TYPES:
        raise CannotRunError(f"the type {element} is not interpreted")
    return _TYPES[element]


def bits(x: Array) -> Array:
    """Return the same memory as unsigned integers."""
    return x.view(f"u{x.dtype.itemsize}")


def alike(*arrays: Array) -> list[Array]:
    """Return arrays with their first dimension, the programs, broadcast to the longest."""
    programs = max(map(len, arrays))
    return [spread(array, (programs, *array.shape[1:])) for array in arrays]


def fused(x: Array, y: Array, z: Array) -> Array:
    """Return x y + z in fp32, or in a narrower type, rounded once."""
    if z.dtype == np.float32:
        arrays = np.broadcast_arrays(x, y, z)
        return np.asarray(fma(*(torch.from_numpy(np.require(each, requirements=["C", "W"])) for each in arrays)))
    # A product of narrow numbers is exact in fp64, its sum rounded to odd there and so once.
    wide = np.broadcast_arrays(x.astype(np.float64) * y.astype(np.float64), z.astype(np.float64))
    return converted(odd_sum(*(torch.from_numpy(np.array(term)) for term in wide)).numpy(), z.dtype)


def is_float(dtype: np.dtype[Any]) -> bool:
    """Return whether a type is a floating-point one."""
    return dtype in _NARROW.values() or dtype.kind == "f"


def is_rounded(dtype: np.dtype[Any]) -> bool:
    """Return whether a card's sums of a type are followed: all but those of fp64."""
    return is_float(dtype) and dtype != np.float64


def converted(x: Array, to: np.dtype[Any], *, toward_zero: bool = False) -> Array:
    """Return numbers in another type: RNE, or toward zero; saturating where the hardware's cast saturates."""
    if not is_float(to):
        return x.astype(to)
    # By way of fp32, to which all narrower formats are exact: a cast of fp64 rounds to odd on its way, and so once.
    wide = x if x.dtype.kind != "f" or x.dtype.itemsize <= 4 or to.itemsize >= 4 else _to_odd(x)
    result = wide.astype(to)
    if toward_zero and to.itemsize < x.dtype.itemsize:
        result = _stepped_back(result, wide)
    if to in _LARGEST:
        largest, exact = np.float32(_LARGEST[to]), wide.astype(np.float32)
        beyond = np.abs(exact) > largest  # not where it is NaN
        result = np.where(beyond, np.copysign(largest, exact).astype(to), result)
    return result


def _to_odd(x: Array) -> Array:
    """Return fp64 as fp32 rounded to odd, so that a second rounding is right."""
    cut = _stepped_back(x.astype(np.float32), x)
    inexact = np.isfinite(cut) & (cut.astype(np.float64) != x)
    odd: Array = (cut.view(np.uint32) | inexact.astype(np.uint32)).view(np.float32)
    return odd


def _stepped_back(result: Array, exact: Array) -> Array:
    """Return the next number toward zero where `result` was rounded away from it: one less in its bits."""
    wide = np.float64 if exact.dtype == np.float64 else np.float32
    away = np.abs(result.astype(wide)) > np.abs(exact.astype(wide))
    return np.asarray(bits(result) - away).view(result.dtype)
