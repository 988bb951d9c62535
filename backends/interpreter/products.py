"""Products of tiles, in the formats that a card multiplies in."""

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import torch
from triton._C.libtriton import ir

from tiebreak.backends.emulation.tensor_cores import core_of, tensor_core_matmul
from tiebreak.backends.interpreter.assumptions import Assumptions
from tiebreak.backends.interpreter.numbers import Array, bits, fused
from tiebreak.kernels.kernel import CannotRunError

_FORMATS = {
    np.dtype(ml_dtypes.bfloat16): "bf16",
    np.dtype(np.float16): "fp16",
    np.dtype(ml_dtypes.float8_e4m3fn): "fp8_e4m3",
    np.dtype(ml_dtypes.float8_e5m2): "fp8_e5m2",
    np.dtype(ml_dtypes.float8_e4m3fnuz): "fp8_e4m3fnuz",
    np.dtype(ml_dtypes.float8_e5m2fnuz): "fp8_e5m2fnuz",
}
_AT_ONCE = 2**17  # elements of an operand, at most: 1 MB in fp64
_HOPPERS_STEP = 32  # products of fp8 that one of its instructions adds up
_TF32 = np.uint32(0xFFFFE000)  # the bits of fp32 that a tensor core looks at
_E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=np.float32)


def product(
    a: Array,
    b: Array,
    addend: Array,
    assumed: Assumptions,
    precision: object = ir.INPUT_PRECISION.IEEE,
    most_at_once: int = 0,
) -> Array:
    """Return a @ b + addend, as a kernel asks for it and a card adds up, in the type of the addend.

    Args:
        a: (..., m, k), of any type that `tl.dot` takes.
        b: (..., k, n), of the same; of fp8 it may be another one of 8 bits.
        addend: (..., m, n).
        assumed: of the card.
        precision: of `ir.INPUT_PRECISION`: how the kernel asks for fp32 to be multiplied.
        most_at_once: products of fp8 that Hopper may add up before they go to fp32; 0: all.

    Raises:
        CannotRunError: the card has no such product.
    """
    if a.dtype.kind in "iu":
        # Exact in fp64, and far faster than numpy's product of integers.
        return (a.astype(np.float64) @ b.astype(np.float64)).astype(addend.dtype) + addend
    if a.dtype == np.float64:
        return a @ b + addend
    if assumed.exact:
        return _exact(a, b, addend, precision)
    total = addend.astype(np.float32, copy=False)
    for left, right, formats in _operands(a, b, precision):
        if formats is None:  # fp32, which no tensor core multiplies: one fused multiply-add after the other
            for at in range(left.shape[-1]):
                total = fused(left[..., :, at, None], right[..., None, at, :], total)
        else:
            a, b = (x.astype(np.float32, copy=False) for x in (left, right))
            total = _on_the_cores(a, b, total, formats, most_at_once, assumed.name)
    return total.astype(addend.dtype, copy=False)


def _exact(a: Array, b: Array, addend: Array, precision: object) -> Array:
    """Return the exact product, rounded to fp32, plus the addend; a few programs at a time, in a core's cache."""
    programs, some = max(map(len, (a, b, addend))), max(1, _AT_ONCE // max(a[0].size, b[0].size, addend[0].size))
    sums = np.empty((programs, *addend.shape[1:]), addend.dtype)
    for at in range(0, programs, some):
        part = sums[at : at + some]
        left, right, total = (x[at : at + some] if len(x) > 1 else x for x in (a, b, addend))
        for x, y, _ in _operands(left, right, precision):
            rounded = (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32)
            total = np.add(rounded, total.astype(np.float32, copy=False), out=part, casting="unsafe")
    return sums


def _tensor(x: Array) -> torch.Tensor:
    return torch.from_numpy(np.require(x, requirements=["C", "W"]))


def _operands(a: Array, b: Array, precision: object) -> Iterator[tuple[Array, Array, tuple[str, str] | None]]:
    """Yield the products that one consists of, the smallest first, and their operands' formats; None: fp32."""
    tf32 = ("tf32", "tf32")
    if a.dtype != np.float32:
        yield a, b, (_FORMATS[a.dtype], _FORMATS[b.dtype])
    elif precision == ir.INPUT_PRECISION.IEEE:
        yield a, b, None
    elif precision in (ir.INPUT_PRECISION.TF32, ir.INPUT_PRECISION.TF32x3):
        if precision == ir.INPUT_PRECISION.TF32x3:
            yield _cut(a - _cut(a)), _cut(b), tf32
            yield _cut(a), _cut(b - _cut(b)), tf32
        yield _cut(a), _cut(b), tf32
    else:
        raise CannotRunError(f"tl.dot with input_precision {precision} is not interpreted")


def _on_the_cores(a: Array, b: Array, total: Array, formats: tuple[str, str], most_at_once: int, name: str) -> Array:
    """Return the sum as tensor cores form it, starting from `total`."""
    eight_bits = formats[0].startswith("fp8")
    if name == "gfx942" and eight_bits and not formats[0].endswith("fnuz"):
        formats = ("fp16", "fp16")  # as which Triton multiplies the formats that CDNA3 lacks, and which holds them
    try:
        core = core_of(name, *formats)
    except ValueError as error:
        raise CannotRunError(str(error)) from error
    step = max(most_at_once, _HOPPERS_STEP) if name == "sm_90" and eight_bits and most_at_once else a.shape[-1]
    if step >= a.shape[-1]:
        return tensor_core_matmul(_tensor(a), _tensor(b), _tensor(total), core).numpy()
    for start in range(0, a.shape[-1], step):
        part = _tensor(a[..., start : start + step]), _tensor(b[..., start : start + step, :])
        total = total + tensor_core_matmul(*part, torch.zeros(()), core).numpy()
    return total


def _cut(x: Array) -> Array:
    """Return fp32 as a tensor core reads it: it ignores 13 bits (PTX ISA, Alternate Floating-Point Data Formats)."""
    cut: Array = (np.ascontiguousarray(x).view(np.uint32) & _TF32).view(np.float32)
    return cut


def scaled_operand(data: Array, scale: Any, kind: object, *, packed_last: bool, right: bool) -> Array:
    """Return one operand of `tl.dot_scaled` in fp32, exact.

    Args:
        data: its elements; two in a byte of E2M1.
        scale: handle of the scales of blocks along the summed dimension, (rows or columns, blocks): E8M0 as integers,
            or E4M3. None: 1.
        kind: of `ir.ScaleDotElemTypeTY`.
        packed_last: whether the two in a byte lie along the last dimension.
        right: whether it is the right one, whose summed dimension is the one before the last.
    """
    if kind in (ir.ScaleDotElemTypeTY.E2M3, ir.ScaleDotElemTypeTY.E3M2):
        raise CannotRunError(f"tl.dot_scaled of {kind} is not interpreted")
    if kind == ir.ScaleDotElemTypeTY.E2M1:
        data = _unpacked(data, -1 if packed_last else -2)
    wide = data.astype(np.float32)
    if scale is None:
        return wide
    scales = scale.data.view(ml_dtypes.float8_e8m0fnu) if scale.data.dtype.kind in "iu" else scale.data
    block = wide.shape[-2 if right else -1] // scales.shape[-1]
    factors = np.repeat(scales.astype(np.float32), block, axis=-1)
    scaled: Array = wide * (np.swapaxes(factors, -1, -2) if right else factors)
    return scaled


def _unpacked(data: Array, axis: int) -> Array:
    """Return two numbers of E2M1 from every byte, the low half first."""
    packed = np.moveaxis(bits(data).astype(np.uint8), axis, -1)
    halves = np.stack([packed & 0x0F, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = np.where(halves & 0x08, -_E2M1[halves & 0x07], _E2M1[halves & 0x07])
    return np.moveaxis(values, -1, axis)
