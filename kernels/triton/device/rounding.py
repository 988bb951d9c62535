"""Casts, the device's own to even and by integer arithmetic on fp32's bits those that no device has; and the noise."""

import triton
import triton.language as tl


@triton.jit
def narrow(x, C: tl.constexpr):
    """Return `x`, fp32, as a cast to nearest leaves it, in the format's type; a stochastic cast is made before.

    `C` is a `Cast` from a separate constexpr: Triton 3.6 does not pass on an attribute of one.
    """
    FMT: tl.constexpr = C.fmt
    if not C.narrows:
        return x
    elif C.rounding.name == "RTNA":
        return _native(rounded(x, x, FMT, "rtna"), FMT)  # to even, it leaves alone what is rounded
    elif C.saturates:  # NVIDIA's casts to 8 bits do, not those of every device
        return _native(tl.where(x > FMT.largest, FMT.largest, tl.where(x < -FMT.largest, -FMT.largest, x)), FMT)
    else:
        return _native(x, FMT)


@triton.jit
def _native(x, F: tl.constexpr):
    """Return the device's own cast."""
    if F.name == "bf16":
        return x.to(tl.bfloat16)
    elif F.name == "fp16":
        return x.to(tl.float16)
    else:
        tl.static_assert(F.name == "fp8_e4m3", "the kernels cast to bf16, fp16 and fp8_e4m3")
        return x.to(tl.float8e4nv)


@triton.jit
def cast(x, C: tl.constexpr):
    """Return `narrow`, back in fp32."""
    return narrow(x, C).to(tl.float32)


@triton.jit
def rounded(x, random, F: tl.constexpr, HOW: tl.constexpr):
    """Return `x` rounded on fp32's bits as no cast does: the rule of `tiebreak.backends.emulation.rounding.round_to`.

    Args:
        x: fp32.
        random: uint32, of x's shape; used by "stochastic" only.
        F: `Format`.
        HOW: "rtna" (ties away) or "stochastic" (up with probability of the discarded fraction).
    """
    bits = x.to(tl.uint32, bitcast=True)
    size = bits & 0x7FFFFFFF
    drop: tl.constexpr = 23 - F.mantissa_bits
    if HOW == "stochastic":
        raised = tl.add(size, random >> (32 - drop), sanitize_overflow=False)
    else:
        raised = tl.add(size, 1 << (drop - 1), sanitize_overflow=False)
    result = ((raised >> drop) << drop).to(tl.float32, bitcast=True)
    if F.exponent_bits < 8:
        magnitude = size.to(tl.float32, bitcast=True)
        small = _subnormal(magnitude, random, F, HOW)
        result = tl.where(magnitude < F.smallest_normal, small, result)
        beyond = float("inf") if F.has_infinity else float("nan")
        result = tl.where(result > F.largest, beyond, result)
    signed = result.to(tl.uint32, bitcast=True) | (bits & 0x80000000)
    # Adding to the bits of a NaN may have made it a number.
    return tl.where(x != x, x, signed.to(tl.float32, bitcast=True))  # noqa: PLR0124


@triton.jit
def _subnormal(size, random, F: tl.constexpr, HOW: tl.constexpr):
    """Return magnitudes below the format's smallest normal value, whose spacing is fixed, rounded."""
    steps = size / F.smallest_subnormal
    whole = tl.floor(steps)
    if HOW == "rtna":
        return (whole + (steps - whole >= 0.5).to(tl.float32)) * F.smallest_subnormal
    else:
        scaled = (steps - whole) * 4294967296.0
        # In parts: scaled + 0.5 is not exact in fp32.
        below = tl.floor(scaled)
        threshold = below.to(tl.int64) + (scaled - below >= 0.5).to(tl.int64)
        up = threshold + random.to(tl.int64) >= 4294967296
        return (whole + up.to(tl.float32)) * F.smallest_subnormal


@triton.jit
def absorb(state, counter):
    """Return the state of `tiebreak.kernels.counter`, uint32, after one more counter; after all, the random bits."""
    return _mix(tl.add(_mix(counter.to(tl.uint32)), state, sanitize_overflow=False))


@triton.jit
def _mix(x):
    x = x ^ (x >> 16)
    x = tl.mul(x, 0x7FEB352D, sanitize_overflow=False)
    x = x ^ (x >> 15)
    x = tl.mul(x, 0x846CA68B, sanitize_overflow=False)
    return x ^ (x >> 16)


@triton.jit
def row_state(start, head, row, C: tl.constexpr):
    """Return the state after (batch, head, row), from the bits of that after (seed, stream) as int32."""
    state = absorb(start.to(tl.uint32, bitcast=True), head // C.query_heads)
    return absorb(absorb(state, head % C.query_heads), row)
