"""Rounding to a format in any mode, bit for bit the same on every device."""

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.kernels.formats import BF16, FP32, Format, Rounding


class _Carrier(NamedTuple):
    """Layout of the type that carries the values."""

    bits: torch.dtype
    mantissa_bits: int
    exponent_bits: int


_CARRIERS = {
    torch.float32: _Carrier(torch.int32, mantissa_bits=23, exponent_bits=8),
    torch.float64: _Carrier(torch.int64, mantissa_bits=52, exponent_bits=11),
}


def round_to(x: Tensor, fmt: Format, mode: Rounding = Rounding.RNE, *, random_bits: Tensor | None = None) -> Tensor:
    """Round every element to a format, keeping the tensor's type.

    NaN stays NaN and the sign of zero is kept. A finite value that rounds past the largest becomes Inf (NaN in a format
    without Inf), except that a mode that rounds it toward zero gives the largest; an infinite one stays Inf (becomes
    NaN). These are the semantics of `gfloat.round_ndarray`.

    Args:
      x: float32 or float64 tensor of any shape, on any device.
      fmt: The format.
      mode: The rounding mode.
      random_bits: int64 tensor that broadcasts to x, uniform in [0, 2**32); given if and only if the mode is
        `STOCHASTIC`. The magnitude is rounded up where ``fraction * 2**32 + random_bits + 0.5 >= 2**32``, fraction
        being the discarded part in ulps: with probability fraction, to the nearest multiple of 2**-32.

    Returns:
      Contiguous tensor of x's type and shape, without gradient, holding values of the format.

    Raises:
      TypeError: x is neither float32 nor float64, or random_bits is not int64.
      ValueError: random_bits without `STOCHASTIC`, or the other way round.
    """
    carrier = _CARRIERS.get(x.dtype)
    if carrier is None:
        raise TypeError(f"round_to takes a float32 or float64 tensor, not {x.dtype}")
    if (random_bits is not None) != (mode is Rounding.STOCHASTIC):
        raise ValueError("random_bits must be given if and only if the rounding mode is STOCHASTIC")
    if random_bits is not None:
        if random_bits.dtype != torch.int64:
            raise TypeError(f"random_bits must be an int64 tensor, not {random_bits.dtype}")
        random_bits = random_bits.broadcast_to(x.shape)
    if x.numel() == 0:
        return x.detach().clone()
    source = x.detach().contiguous()
    if fmt == BF16 and mode is Rounding.RNE and x.dtype == torch.float32 and x.is_cpu and _rounds_to_even():
        return source.bfloat16().float()
    if fmt.exponent_bits < carrier.exponent_bits:
        rounded = _overflow(source, _round_quotients(source, carrier, fmt, mode, random_bits), fmt, mode)
    else:
        bits = _round_bits(source.view(carrier.bits), carrier.mantissa_bits - fmt.mantissa_bits, mode, random_bits)
        rounded = bits.view(x.dtype)
        if x.device.type != "cpu" or math.isnan(source.sum().item()):  # on the host a sum is cheap to wait for
            # Adding to the bits of a NaN may have made it Inf or a number. The clamp leaves -Inf of all but NaN, and
            # maximum passes NaN on: several times faster than torch.where with a mask.
            rounded = torch.maximum(rounded, source.clamp(max=-torch.inf))
    return rounded


@cache
def _rounds_to_even() -> bool:
    """Tell whether the processor's cast to bf16 has software's bits: of ties, of subnormals, in few numbers too."""
    kept = torch.arange(-(2**15), 2**15, dtype=torch.int32)[:, None] << 16
    bits = (kept | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)).flatten()
    numbers = bits.view(torch.float32)[~bits.view(torch.float32).isnan()]
    half = len(numbers) // 2  # which begins with 0
    native = torch.cat([part.bfloat16().float() for part in numbers.tensor_split((half, half + 11))])
    return torch.equal(native.view(torch.int32), _round_bits(numbers.view(torch.int32), 16, Rounding.RNE, None))


def fma(x: Tensor, factor: float | Tensor, addend: Tensor) -> Tensor:
    """Return a fused multiply-add of fp32 numbers: x * factor + addend, rounded to fp32 once, to even.

    The product of two fp32 numbers is exact in fp64, but its sum with a third may not be: if fp64 rounded it to a tie
    of fp32, it would be rounded twice. So the sum is rounded to odd first: no tie of fp32 has the last bit of fp64 set.

    Args:
      x: float32 tensor.
      factor: An fp32 number, or a float32 tensor that broadcasts to x.
      addend: float32 tensor that broadcasts to x.

    Returns:
      float32 tensor of x's shape.
    """
    wide = factor.double() if isinstance(factor, Tensor) else factor
    return odd_sum(x.double() * wide, addend.double()).float()


def odd_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return x + y in float64, rounded to odd: the last bit is set where the sum is inexact.

    A second rounding, to a format narrower by two bits, then gives the correctly rounded result (Boldo and Melquiond,
    Emulation of FMA and correctly rounded sums: proved algorithms using rounding to odd, 2008).
    """
    total = x + y
    # The sum's error, exact (Knuth's TwoSum); NaN where a term is Inf, which no comparison takes for an error.
    back = total - x
    lost = (x - (total - back)) + (y - back)
    inexact = lost.abs() > 0
    if x.device.type == "cpu" and not inexact.any():  # on the host, where it is cheap to ask: as good as always
        return total
    bits = total.view(torch.int64)
    # The odd neighbour lies on the side of what was lost: one bit up where that adds to the magnitude, else one down.
    neighbour = bits + torch.where((lost > 0) == (total > 0), 1, -1)
    return torch.where(inexact & (bits & 1 == 0), neighbour, bits).view(torch.float64)


def _round_bits(bits: Tensor, shift: int, mode: Rounding, random_bits: Tensor | None) -> Tensor:
    """Round away the last bits of finite or infinite values, as if the format's exponent had no bounds.

    A carry out of the fraction goes into the exponent, and from the largest finite value to Inf, as it should: values
    of one sign are ordered like their bits. So are the carrier's subnormals, which a format with the carrier's exponent
    range shares.
    """
    if shift == 0:
        return bits.clone()
    discarded = (1 << shift) - 1
    negative = bits.element_size() * 8 - 1  # shifting by this makes all bits the sign
    match mode:
        case Rounding.RNE:
            # In place: this is the path that every emulated matrix product takes.
            raised = (bits >> shift).bitwise_and_(1).add_(bits).add_(discarded >> 1)
        case Rounding.RTNA:
            raised = bits + (1 << (shift - 1))
        case Rounding.RTZ:
            return bits.bitwise_and(~discarded)
        case Rounding.UP:
            raised = bits + (~(bits >> negative) & discarded)
        case Rounding.DOWN:
            raised = bits + ((bits >> negative) & discarded)
        case Rounding.STOCHASTIC:
            assert random_bits is not None
            # The 0.5 of the rule is nothing to a fraction of at most 32 bits, which meets integers only.
            scaled = random_bits >> (32 - shift) if shift <= 32 else ((2 * random_bits + 1) << (shift - 33))
            raised = bits + scaled.to(bits.dtype)
    return raised.bitwise_and_(~discarded)


def _round_quotients(x: Tensor, carrier: _Carrier, fmt: Format, mode: Rounding, random_bits: Tensor | None) -> Tensor:
    """Round to a format of a narrower exponent: divide by the spacing of its values at x, round to integers, multiply.

    The spacing is a power of two, from the exponent of x, and the same for all subnormals, so all steps but the
    rounding are exact. Values more than a binade beyond the largest are limited to that, so that no quotient is Inf.
    """
    if fmt.mantissa_bits == 0 and mode is Rounding.RNE:
        # Without fraction bits the even one of two neighbours is the one with the even exponent, which the bits show.
        raised = _round_bits(x.view(carrier.bits), carrier.mantissa_bits, mode, None).view(x.dtype)
        x = torch.where(x.abs() >= fmt.smallest_normal, raised, x)
    x = x.clamp(-(2.0 ** (fmt.max_exponent + 1)), 2.0 ** (fmt.max_exponent + 1))
    # In place, and without comparisons that give bool, which are slow on a CPU. The spacing at NaN is Inf.
    exponent = ((1 << carrier.exponent_bits) - 1) << carrier.mantissa_bits
    spacing = x.view(carrier.bits).bitwise_and(exponent).view(x.dtype)
    spacing.clamp_(min=fmt.smallest_normal).mul_(2.0**-fmt.mantissa_bits)
    return _to_integers(x.div_(spacing), mode, random_bits).mul_(spacing)


def _to_integers(x: Tensor, mode: Rounding, random_bits: Tensor | None) -> Tensor:
    """Round to integers, in place; the sign of zero is kept."""
    match mode:
        case Rounding.RNE:
            return x.round_()
        case Rounding.RTNA:
            # Adding 0.5 to x itself would round up what lies just below a half. Taking off, not adding, keeps -0.
            whole = x.trunc()
            return whole.sub_((whole - x).mul_(2.0).trunc_())
        case Rounding.RTZ:
            return x.trunc_()
        case Rounding.UP:
            return x.ceil_()
        case Rounding.DOWN:
            return x.floor_()
        case Rounding.STOCHASTIC:
            assert random_bits is not None
            whole = x.trunc()
            taken_off = whole - x
            # To a sum of integers fraction * 2**32 + 0.5 is its integer part. Not in float64, which some devices lack.
            raised = (taken_off.abs() * 2.0**33).long().add_(1).bitwise_right_shift_(1)
            raised = raised.add_(random_bits).bitwise_right_shift_(32)
            return whole.sub_(taken_off.sign_().mul_(raised))


def _overflow(x: Tensor, rounded: Tensor, fmt: Format, mode: Rounding) -> Tensor:
    """Replace what lies beyond the format's largest value."""
    lowest, highest = rounded.aminmax()
    if lowest >= -fmt.largest and highest <= fmt.largest:
        return rounded
    low = -fmt.largest if mode in (Rounding.RTZ, Rounding.UP) else None
    high = fmt.largest if mode in (Rounding.RTZ, Rounding.DOWN) else None
    if low is not None or high is not None:
        rounded = torch.where(x.isfinite(), rounded.clamp(low, high), rounded)
    beyond = rounded.abs() > fmt.largest
    # Inf with the sign of x, or NaN.
    return torch.where(beyond, x * (torch.inf if fmt.has_infinity else torch.nan), rounded)


def flushed(x: Tensor) -> Tensor:
    """Return `x` with zeros of the same sign for numbers that are subnormal in fp32, as in bf16."""
    return torch.where(x.abs() < FP32.smallest_normal, x * 0.0, x)
