"""The computation of each PTX instruction, by its whole name: one that is not here is not executed.

Titles are those of the PTX ISA's sections. Where it leaves an approximation's last bits open (`ex2.approx` and its
like), the correctly rounded result is taken, which is an assumption: no card's bits are published.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import torch

from tiebreak.backends.emulation.rounding import odd_sum
from tiebreak.backends.interpreter.numbers import Array, converted, fused

#: The contents of registers and memory under a type's name; an x2 is two of them in a register.
TYPES: Mapping[str, np.dtype[Any]] = {
    "pred": np.dtype(bool),
    **{f"{kind}{bits}": np.dtype(f"u{bits // 8}") for kind in "bu" for bits in (8, 16, 32, 64)},
    **{f"s{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"f{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "tf32": np.dtype(np.float32),
    "e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
_F32 = TYPES["f32"]


class Operation(NamedTuple):
    """The computation of an instruction on its operands, number by number."""

    compute: Callable[..., Any]  # of arrays that broadcast to one shape, of these types
    sources: tuple[str, ...]  # types of the operands behind the destination; the last one's is that of all others


def _flushing(compute: Callable[..., Array], *operands: Array) -> Array:
    return _flushed(compute(*map(_flushed, operands)))


def _flushed(x: Array) -> Array:
    return np.where(np.abs(x) < np.finfo(np.float32).smallest_normal, x * 0, x) if x.dtype == _F32 else x


def _rounded_once(function: Callable[..., Any], x: Array) -> Array:
    return converted(np.asarray(function(x.astype(np.float64))), x.dtype)


def _quotient(x: Array, y: Array) -> Array:
    """Compute `div.full`: x * (1 / y), the reciprocal rounded and scaled; off by at most 2 ulp, as in SASS."""
    fraction, exponent = np.frexp(y)
    return np.ldexp(x.astype(np.float64) * (np.float32(1) / fraction), -exponent).astype(np.float32)


def _downward(x: Array, y: Array) -> Array:
    """Add, rounding toward minus infinity; a sum of 0 is -0, unless both are +0."""
    exact = odd_sum(*(torch.from_numpy(np.array(term, np.float64)) for term in np.broadcast_arrays(x, y))).numpy()
    total = exact.astype(np.float32)
    below: Array = np.where(total > exact, np.nextafter(total, np.float32(-np.inf)), total)
    return np.where((exact == 0) & (np.signbit(x) | np.signbit(y)), np.float32(-0.0), below)


def _extreme(x: Array, y: Array, *third: Array, largest: bool) -> Array:
    """Return the larger or smaller number: NaN is dropped, and +0 is larger than -0."""
    result: Array = (np.fmax if largest else np.fmin)(x, y)
    negative = np.signbit(x) & np.signbit(y) if largest else np.signbit(x) | np.signbit(y)
    result = np.where((x == 0) & (y == 0), np.where(negative, -np.abs(result), np.abs(result)), result)
    return _extreme(result, *third, largest=largest) if third else result


def _doubled(x: Array, y: Array, addend: Array | None = None) -> Array:
    """Return the whole product in twice the width, plus the addend."""
    dtype = np.dtype(f"{x.dtype.kind}{2 * x.itemsize}")
    whole: Array = x.astype(dtype) * y.astype(dtype) + (dtype.type(0) if addend is None else addend)
    return whole


def _upper(x: Array, y: Array) -> Array:
    """Return the upper half of the whole product."""
    if x.itemsize < 8:
        return (_doubled(x, y) >> 8 * x.itemsize).astype(x.dtype)
    low, high = y & 0xFFFFFFFF, y >> 32
    middle = (x >> 32) * low + ((x & 0xFFFFFFFF) * low >> 32)
    upper: Array = (x >> 32) * high + (middle >> 32) + ((middle & 0xFFFFFFFF) + (x & 0xFFFFFFFF) * high >> 32)
    return upper


def _truncated(x: Array, y: Array, *, remainder: bool) -> Array:
    """Divide integers, rounding toward zero; division by zero, which may give anything, divides by one."""
    divisor = np.where(y == 0, x.dtype.type(1), y)
    rest = np.fmod(x, divisor)
    result: Array = rest if remainder else (x - rest) // divisor
    return result


def _shifted(x: Array, by: Array, *, left: bool) -> Array:
    """Shift; beyond the width the result is zeros, or copies of the sign."""
    last = 8 * x.itemsize - 1
    within = np.minimum(by, last).astype(x.dtype)
    shifted: Array = x << within if left else x >> within
    gone = x.dtype.type(0) * x if left or x.dtype.kind == "u" else shifted
    return np.where(by > last, gone, shifted)


def _field(x: Array, start: Array, length: Array) -> Array:
    """Compute `bfe`: `length` bits from `start` on; signed ones are extended by their highest bit."""
    unused = (8 * x.itemsize - np.clip(length, 1, 8 * x.itemsize)).astype(x.dtype)
    field: Array = _shifted(x, start, left=False) << unused >> unused
    return np.where(length == 0, x.dtype.type(0), field)


def _permuted(x: Array, y: Array, selector: Array) -> Array:
    """Compute `prmt`: four bytes of eight, each chosen by four bits, of which the highest replicates the sign."""
    both = y.astype(np.uint64) << np.uint64(32) | x
    result = np.zeros((1, 1), np.uint32)
    for at in range(4):
        chosen = selector >> np.uint32(4 * at)
        byte = (both >> ((chosen & 7) * 8).astype(np.uint64) & np.uint64(255)).astype(np.uint32)
        byte = np.where(chosen & 8 != 0, (byte >> 7) * np.uint32(255), byte)
        result = result | byte << np.uint32(8 * at)
    return result


def _pair(high: Array, low: Array, *, to: np.dtype[Any]) -> Array:
    """Return two numbers in one register, the first operand in its upper half."""
    halves = np.broadcast_arrays(converted(low, to), converted(high, to))
    return np.stack(halves, -1)


def _cast(x: Array, *, to: np.dtype[Any]) -> Array:
    return x.astype(to)


def _cut_off(x: Array, *, to: np.dtype[Any]) -> Array:
    """Round to an integer toward zero, to the nearest there is; NaN is 0."""
    limits = np.iinfo(to)
    return np.where(np.isnan(x), 0, np.clip(x.astype(np.float64), limits.min, limits.max)).astype(to)


_INTEGERS, _BITS = "s16 u16 s32 u32 s64 u64", "b16 b32 b64"
_FP32, _NARROW = "f32 rn.f32 ftz.f32 rn.ftz.f32 f32x2 rn.f32x2", "f16 bf16 f16x2 bf16x2 rn.bf16 rn.bf16x2"
_TESTS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal}
# Names; what may follow them, the operands' type last; what is computed; operands' types, T being the one that follows.
_ROWS: tuple[tuple[str, str, Callable[..., Any], str], ...] = (
    # Integer, Floating-Point and Half Precision Floating-Point Arithmetic Instructions
    ("add", f"{_INTEGERS} {_FP32} {_NARROW}", np.add, "T"),
    ("add", "rm.f32 rm.ftz.f32 rm.f32x2", _downward, "T"),
    ("sub", f"{_INTEGERS} {_FP32} {_NARROW}", np.subtract, "T"),
    ("add", "rn.f32.f16 rn.f32.bf16", lambda x, y: x.astype(_F32) + y, "T f32"),
    ("sub", "rn.f32.f16 rn.f32.bf16", lambda x, y: x.astype(_F32) - y, "T f32"),
    ("mul", f"{_FP32} {_NARROW}", np.multiply, "T"),
    ("mul.lo", _INTEGERS, np.multiply, "T"),
    ("mul.hi", "s32 u32 u64", _upper, "T"),
    ("mul.wide", "s16 u16 s32 u32", _doubled, "T"),
    ("mad.lo", _INTEGERS, lambda x, y, z: x * y + z, "T"),
    ("mad.wide", "u16", _doubled, "T T u32"),
    ("mad.wide", "s32", _doubled, "T T s64"),
    ("mad.wide", "u32", _doubled, "T T u64"),
    ("div", _INTEGERS, partial(_truncated, remainder=False), "T"),
    ("rem", _INTEGERS, partial(_truncated, remainder=True), "T"),
    ("neg", f"s16 s32 s64 {_FP32} {_NARROW}", np.negative, "T"),
    ("abs", f"s16 s32 s64 {_FP32} {_NARROW}", np.abs, "T"),
    ("max", _INTEGERS, np.maximum, "T"),
    ("min", _INTEGERS, np.minimum, "T"),
    ("max", f"{_FP32} {_NARROW}", partial(_extreme, largest=True), "T"),
    ("min", f"{_FP32} {_NARROW}", partial(_extreme, largest=False), "T"),
    ("fma", "rn.f32 rn.ftz.f32 rn.f32x2 rn.f16 rn.bf16 rn.f16x2 rn.bf16x2", fused, "T"),
    ("fma", "rn.f32.f16 rn.f32.bf16", lambda x, y, z: fused(x.astype(_F32), y.astype(_F32), z), "T T f32"),
    # What an assembler makes of a packed product and its difference (`fusing`).
    ("fms", "rn.f32x2 rn.ftz.f32x2", lambda x, y, z: fused(x, y, -z), "T"),
    ("fnma", "rn.f32x2 rn.ftz.f32x2", lambda x, y, z: fused(-x, y, z), "T"),
    ("div", "rn.f32 rn.ftz.f32", np.divide, "T"),
    ("div", "full.f32 full.ftz.f32 approx.f32 approx.ftz.f32", _quotient, "T"),
    ("ex2", "approx.f32 approx.ftz.f32", partial(_rounded_once, np.exp2), "T"),
    ("lg2", "approx.f32 approx.ftz.f32", partial(_rounded_once, np.log2), "T"),
    ("rcp", "approx.f32 approx.ftz.f32 rn.f32 rn.ftz.f32", partial(_rounded_once, np.reciprocal), "T"),
    ("bfe", "u32 s32 u64 s64", _field, "T u32"),
    # Comparison and Selection Instructions
    *((f"setp.{name}", f"{_INTEGERS} {_BITS} {_FP32} f16 bf16", test, "T") for name, test in _TESTS.items()),
    ("setp.ne", f"{_INTEGERS} {_BITS}", np.not_equal, "T"),
    ("setp.ne", _FP32, lambda x, y: (x < y) | (x > y), "T"),
    ("setp.neu", _FP32, np.not_equal, "T"),
    ("setp.nan", _FP32, lambda x, y: np.isnan(x) | np.isnan(y), "T"),
    ("selp", f"{_BITS} {_INTEGERS} f32", lambda x, y, chosen: np.where(chosen, x, y), "T T pred"),
    # Logic and Shift Instructions
    ("and", f"{_BITS} pred", np.bitwise_and, "T"),
    ("or", f"{_BITS} pred", np.bitwise_or, "T"),
    ("xor", f"{_BITS} pred", np.bitwise_xor, "T"),
    ("not", f"{_BITS} pred", np.invert, "T"),
    ("shl", _BITS, partial(_shifted, left=True), "T u32"),
    ("shr", f"{_BITS} {_INTEGERS}", partial(_shifted, left=False), "T u32"),
    # Data Movement and Conversion Instructions
    ("mov", f"{_BITS} {_INTEGERS} f32 pred", lambda x: x, "T"),
    ("cvta.param", "u64", lambda x: x, "T"),
    ("mapa.shared::cluster", "u32", lambda x, rank: x, "T"),  # a block is alone in its cluster
    ("prmt", "b32", _permuted, "T"),
)


_WIDTHS = " ".join(f"{kind}{bits}" for kind in "su" for bits in (8, 16, 32, 64))
# Of `cvt`: how its name goes on, the types into which and from which, and what is computed for the first.
_CONVERSIONS: tuple[tuple[str, str, str, Callable[..., Any]], ...] = (
    ("", _WIDTHS, _WIDTHS, _cast),
    ("rn.", "f32 f64", _WIDTHS, _cast),
    ("rzi.", "s8 s16 s32", "f32", _cut_off),
    ("", "f32", "f16 bf16", _cast),
    ("rn.", "f16 bf16", "f32", converted),
    ("rn.", "f16x2", "e4m3x2 e5m2x2", _cast),
    ("rn.", "f16x2 bf16x2", "f32", _pair),
    ("rn.satfinite.", "e4m3x2 e5m2x2", "f32", _pair),
)


def _operations() -> Iterator[tuple[str, Operation]]:
    for name, endings, compute, sources in _ROWS:
        for ending in endings.split():
            kind = ending.rpartition(".")[2]
            types = tuple(kind if source == "T" else source for source in sources.split())
            yield f"{name}.{ending}", Operation(partial(_flushing, compute) if "ftz" in ending else compute, types)
    for how, targets, origins, convert in _CONVERSIONS:
        for to, of in product(targets.split(), origins.split()):
            yield f"cvt.{how}{to}.{of}", Operation(partial(convert, to=TYPES[to.removesuffix("x2")]), (of,))


OPERATIONS: Mapping[str, Operation] = dict(_operations())
