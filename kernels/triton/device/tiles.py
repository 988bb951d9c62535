"""Indices, loads, products and sums of tiles of (rows, columns)."""

import triton
import triton.language as tl


@triton.jit
def down(start, SIZE: tl.constexpr):
    """Return indices start, start + 1, ... along a tile's rows."""
    return tl.expand_dims(start + tl.arange(0, SIZE), 1)


@triton.jit
def across(start, SIZE: tl.constexpr):
    """Return indices start, start + 1, ... along a tile's columns."""
    return tl.expand_dims(start + tl.arange(0, SIZE), 0)


@triton.jit
def zeros(ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return an fp32 tile of zeros."""
    return tl.full([ROWS, COLUMNS], 0.0, tl.float32)


@triton.jit
def load(base, head, row, length, C: tl.constexpr):
    """Load rows, indices `down`, of a head of a (heads, length, d) tensor as a tile; zeros beyond its end."""
    return tl.load(places(base, head, row, length, C), mask=inside(row, length, C), other=0.0)


@triton.jit
def store(base, head, row, length, tile, C: tl.constexpr):
    """Write a tile to rows of a (heads, length, d) tensor. Arguments as for `load`."""
    tl.store(places(base, head, row, length, C), tile, mask=inside(row, length, C))


@triton.jit
def places(base, head, row, length, C: tl.constexpr):
    """Return pointers to such rows."""
    return base + head * (length * C.d) + row * C.d + across(0, C.block_d)


@triton.jit
def inside(row, length, C: tl.constexpr):
    """Return whether they are in the tensor."""
    if C.block_d == C.d:
        return row < length
    else:
        return (row < length) & (across(0, C.block_d) < C.d)


@triton.jit
def load_rows(base, head, index, length):
    """Load one number a row of a (heads, length) tensor, at any `index` of a tile; zeros beyond its end."""
    return tl.load(base + head * length + index, mask=index < length, other=0.0)


@triton.jit
def dot(a, b, total):
    """Return total + a b in fp32; operands of unlike formats are converted to fp32, which is exact."""
    if a.dtype == b.dtype:
        return tl.dot(a, b, total, input_precision="ieee")
    else:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")


@triton.jit
def row_max(x):
    """Return the largest of each row, as a column."""
    return tl.max(x, len(x.shape) - 1, keep_dims=True)


@triton.jit
def row_sum(x):
    """Return the sum of each row, as a column."""
    return tl.sum(x, len(x.shape) - 1, keep_dims=True)
