"""Scores, exponentials and shifts: what the forward and the backward passes share.

With `C.base_two`, scores and shifts are in base two: log2(e) is folded into the scores' scale, as production kernels
do it. `C.unit` is what one unit of a natural exponent is.
"""

import triton
import triton.language as tl

from .rounding import cast
from .tiles import dot, row_sum


@triton.jit
def scores(a, b, zero, C: tl.constexpr):
    """Return one tile of S = a b / sqrt(d), cast as the plan says, in the kernel's unit."""
    product = dot(a, b, zero)
    if C.plan.s.narrows:
        CAST: tl.constexpr = C.plan.s
        return cast(product * C.scale, CAST) * C.unit
    else:
        return product * (C.scale * C.unit)


@triton.jit
def hide(s, PADDING, head, query, key, queries, keys, C: tl.constexpr):
    """Return S with -Inf where a query does not see a key. Indices broadcast to S in either orientation."""
    visible = key < keys
    if C.causal:
        visible = visible & (key <= query + (keys - queries))
    if C.padded:
        batch = head // C.query_heads
        visible = visible & (tl.load(PADDING + batch * keys + key, mask=key < keys, other=0) != 0)
    return tl.where(visible, s, float("-inf"))


@triton.jit
def exp(x, C: tl.constexpr):
    """Return the exponential of the kernel's base."""
    if C.base_two:
        return tl.exp2(x)
    else:
        return tl.exp(x)


@triton.jit
def log(x, C: tl.constexpr):
    """Return the inverse of `exp`."""
    if C.base_two:
        return tl.log2(x)
    else:
        return tl.log(x)


@triton.jit
def propose(s, largest, dither, C: tl.constexpr):
    """Return the shift that one block of scores asks for (`tiebreak.kernels.shift_rules.ShiftRule.propose`)."""
    shift = largest
    if C.shift.scales:
        scaled = tl.where(largest > 0.0, largest * C.shift.above, largest)
        # Not largest * 0: that of -Inf is NaN.
        lowered = 0.0 if C.shift.below == 0.0 else largest * C.shift.below
        scaled = tl.where(largest < 0.0, lowered, scaled)
        if C.shift.detects:
            close = (largest - s) <= C.shift.epsilon * C.unit
            shift = tl.where(row_sum(close.to(tl.float32)) > 1.0, scaled, shift)
        else:
            shift = scaled
    if C.shift.offset != 0.0:
        shift = shift + C.shift.offset * C.unit
    if C.shift.dithered:
        shift = shift + dither * (0.6931471805599453 * C.unit)
    return shift
