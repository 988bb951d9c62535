"""The counter-based hash of `tiebreak.kernels.counter`, on uint32: the same bits whatever the grid and the tiles."""

import triton
import triton.language as tl


@triton.jit
def absorb(state, counter):
    """The state that follows `state` after one more counter; with all of them, the random bits.

    Args:
        state: uint32.
        counter: of an integer type, not negative; broadcasts to the state.
    """
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
    """The state after (batch, head, row).

    Args:
        start: int32 that holds the bits of the state after (seed, stream).
        head: index over batch and query heads.
        row: index of the query.
        C: `Config`.
    """
    state = absorb(start.to(tl.uint32, bitcast=True), head // C.query_heads)
    return absorb(absorb(state, head % C.query_heads), row)
