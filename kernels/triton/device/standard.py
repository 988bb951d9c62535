"""Standard attention, unfused, in three launches: `tiebreak.kernels.flash.standard`."""

import triton
import triton.language as tl

from .forward import finish, write_lse
from .rounding import cast, narrow
from .softmax import exp, hide, log, scores
from .tiles import across, dot, down, first_head, load, row_max, row_sum, transposed, zeros


@triton.jit
def all_scores(Q, K, PADDING, S, queries, keys, C: tl.constexpr):
    """First launch: S, with -Inf where a query does not see a key.

    Grid: (blocks of queries, batch x query heads / C.heads, blocks of keys).

    Args:
        Q, K, PADDING, queries, keys, C: as for `forward`.
        S: fp32 (batch x heads, queries, keys), in the kernel's unit.
    """
    head = first_head(1, C)
    row = down(tl.program_id(0) * C.block.queries, C.block.queries, C)
    start = tl.program_id(2) * C.block.keys
    key = across(start, C.block.keys, C)
    k = load(K, head // C.groups, down(start, C.block.keys, C), keys, C)
    s = scores(load(Q, head, row, queries, C), transposed(k, C), zeros(C.block.queries, C.block.keys, C), C)
    write_scores(S, head, row, key, queries, keys, hide(s, PADDING, head, row, key, queries, keys, C), C)


@triton.jit
def softmax(S, P, LSE, queries, keys, C: tl.constexpr):
    """Second launch: P, normalised, then cast.

    Grid: (blocks of queries, batch x query heads / C.heads).

    Args:
        S: of the first launch.
        P: in the shape of S and the format that the plan casts P to.
        LSE, queries, keys, C: as for `forward`.
    """
    head = first_head(1, C)
    row = down(tl.program_id(0) * C.block.queries, C.block.queries, C)
    P_BAR: tl.constexpr = C.plan.p_bar
    m = zeros(C.block.queries, 1, C) - float("inf")
    for start in range(0, keys, C.block.keys):
        m = tl.maximum(m, row_max(read_scores(S, head, row, across(start, C.block.keys, C), queries, keys, C)))
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = zeros(C.block.queries, 1, C)
    for start in range(0, keys, C.block.keys):
        l += row_sum(exp(read_scores(S, head, row, across(start, C.block.keys, C), queries, keys, C) - shift, C))
    for start in range(0, keys, C.block.keys):
        key = across(start, C.block.keys, C)
        p = exp(read_scores(S, head, row, key, queries, keys, C) - shift, C)
        normalised = tl.div_rn(p, l + zeros(1, C.block.keys, C))
        write_scores(P, head, row, key, queries, keys, narrow(normalised, P_BAR), C)
    write_lse(LSE, head, row, queries, (shift + log(l, C)) * C.natural, C)


@triton.jit
def output(P, V, PADDING, O, queries, keys, cast_start, C: tl.constexpr):
    """Third launch: O = P V.

    Grid: (blocks of queries, batch x query heads / C.heads).

    Args:
        P: of the second launch.
        V, PADDING, O, queries, keys, cast_start, C: as for `forward`.
    """
    head = first_head(1, C)
    row = down(tl.program_id(0) * C.block.queries, C.block.queries, C)
    O_BAR: tl.constexpr = C.plan.o_bar
    o = zeros(C.block.queries, C.block_d, C)
    for start in range(0, keys, C.block.keys):
        key = across(start, C.block.keys, C)
        pointers = P + head * queries * keys + row.to(tl.int64) * keys + key
        p = tl.load(pointers, mask=(row < queries) & (key < keys), other=0.0)
        o = dot(p, load(V, head // C.groups, down(start, C.block.keys, C), keys, C), o)
    finish(O, PADDING, head, row, queries, keys, cast(o, O_BAR), cast_start, C)


@triton.jit
def read_scores(S, head, row, key, queries, keys, C: tl.constexpr):
    """One tile of a (heads, queries, keys) tensor; -Inf beyond its end."""
    pointers = S + head * queries * keys + row.to(tl.int64) * keys + key
    return tl.load(pointers, mask=(row < queries) & (key < keys), other=float("-inf"))


@triton.jit
def write_scores(S, head, row, key, queries, keys, tile, C: tl.constexpr):
    """Write one tile of a (heads, queries, keys) tensor."""
    pointers = S + head * queries * keys + row.to(tl.int64) * keys + key
    tl.store(pointers, tile, mask=(row < queries) & (key < keys))
