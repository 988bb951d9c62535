"""Products of tiles, in the formats that a card multiplies in."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton._C.libtriton import ir

from tiebreak.backends.emulation.accumulators import ACCUMULATIONS
from tiebreak.backends.interpreter.assumptions import Assumptions
from tiebreak.backends.interpreter.errors import UnfaithfulError
from tiebreak.backends.interpreter.numbers import Array, bits

_TF32 = np.uint32(0xFFFFE000)  # the bits of fp32 that a tensor core looks at
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def product(a: Array, b: Array, addend: Array, precision: object, assumed: Assumptions) -> Array:
    """a @ b + addend.

    Args:
        a: (..., m, k), of any type that `tl.dot` takes.
        b: (..., k, n), of the same.
        addend: (..., m, n), in the type of the result.
        precision: how fp32 is multiplied, of `ir.INPUT_PRECISION`; nothing to narrower types, whose products are exact.
        assumed: the accumulator.

    Returns:
        In the type of the addend.
    """
    if a.dtype.kind in "iu":
        # Exact in fp64, and far faster than numpy's product of integers.
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(addend.dtype) + addend
    if a.dtype == np.float64:
        return a @ b + addend
    matmul = ACCUMULATIONS[assumed.accumulator].matmul
    total = addend
    pairs = _split(a, b, precision) if a.dtype == np.float32 else [(a.astype(np.float32), b.astype(np.float32))]
    for left, right in pairs:
        found = matmul(torch.from_numpy(np.ascontiguousarray(left)), torch.from_numpy(np.ascontiguousarray(right)))
        total = (found.numpy() + total.astype(np.float32)).astype(addend.dtype)
    return total


def _split(a: Array, b: Array, precision: object) -> Iterator[tuple[Array, Array]]:
    """The products that one of fp32 is made of, the smallest first."""
    if precision == ir.INPUT_PRECISION.IEEE:
        yield a, b
    elif precision == ir.INPUT_PRECISION.TF32:
        yield _cut(a), _cut(b)
    elif precision == ir.INPUT_PRECISION.TF32x3:
        yield _cut(a - _cut(a)), _cut(b)
        yield _cut(a), _cut(b - _cut(b))
        yield _cut(a), _cut(b)
    else:
        raise UnfaithfulError(f"tl.dot with input_precision {precision} is not interpreted")


def _cut(x: Array) -> Array:
    """fp32 as a tensor core reads it: the last 13 bits are ignored (PTX ISA, Alternate Floating-Point Data Formats)."""
    cut: Array = (np.ascontiguousarray(x).view(np.uint32) & _TF32).view(np.float32)
    return cut


def scaled_operand(data: Array, scale: Any, kind: object, *, packed_last: bool, right: bool) -> Array:
    """One operand of `tl.dot_scaled` in fp32, exact.

    Args:
        data: its elements; two in a byte of E2M1.
        scale: handle of the scales of blocks along the summed dimension, (rows or columns, blocks): E8M0 as integers,
            or E4M3. None: 1.
        kind: of `ir.ScaleDotElemTypeTY`.
        packed_last: whether the two in a byte lie along the last dimension.
        right: whether it is the right one, whose summed dimension is the one before the last.
    """
    if kind in (ir.ScaleDotElemTypeTY.E2M3, ir.ScaleDotElemTypeTY.E3M2):
        raise UnfaithfulError(f"tl.dot_scaled of {kind} is not interpreted")
    values = _unpacked(data, -1 if packed_last else -2) if kind == ir.ScaleDotElemTypeTY.E2M1 else data
    wide = values.astype(np.float32)
    if scale is None:
        return wide
    scales = scale.data
    if scales.dtype.kind in "iu":
        scales = scales.view(ml_dtypes.float8_e8m0fnu)
    factors = scales.astype(np.float32)
    along = wide.shape[-2 if right else -1]
    factors = np.repeat(factors, along // factors.shape[-1], axis=-1)
    found: Array = wide * (np.swapaxes(factors, -1, -2) if right else factors)
    return found


def _unpacked(data: Array, axis: int) -> Array:
    """Two numbers of E2M1 from every byte, the low half first."""
    packed = np.moveaxis(bits(data).astype(np.uint8), axis, -1)
    halves = np.stack([packed & 0x0F, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = np.where(halves & 0x08, -_E2M1[halves & 0x07], _E2M1[halves & 0x07])
    return np.moveaxis(values, -1, axis)
