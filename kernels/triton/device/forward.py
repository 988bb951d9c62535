"""The forward passes: `flash` and `standard` of `tiebreak.kernels.flash`, each as one kernel."""

import triton
import triton.language as tl

from .rounding import absorb, cast, narrow, rounded, row_state
from .softmax import exp, hide, log, propose, scores
from .tiles import across, dot, down, load, row_max, row_sum, store, zeros


@triton.jit(do_not_specialize=["dither_start", "cast_start"])
def forward(Q, K, V, PADDING, O, LSE, queries, keys, dither_start, cast_start, C: tl.constexpr):
    """Compute O and the log-sum-exp of one block of queries.

    Grid: (blocks of queries, batch x query heads).

    Args:
        Q, O: (batch x heads, queries, d), contiguous.
        K, V: (batch x key heads, keys, d), contiguous.
        PADDING: int8 (batch, keys), 0 where a key is padding; None without `C.padded`.
        LSE: fp32 (batch x heads, queries), log-sum-exp of the scores.
        queries, keys: of one head.
        dither_start: bits of the noise's state after (seed, the dither's stream), as int32.
        cast_start: the same for the stream of O's cast.
        C: `Config`.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * C.block.queries
    row = down(first, C.block.queries)
    q = load(Q, head, row, queries, C)
    m = zeros(C.block.queries, 1) - float("inf")
    l = zeros(C.block.queries, 1)
    o_bar = zeros(C.block.queries, C.block_d)
    dither = l
    if C.shift.dithered:
        dither = row_state(dither_start, head, row, C).to(tl.float32) * (1.0 / 4294967296.0)
    whole, end = visible_keys(first, queries, keys, C)
    for start in range(0, whole, C.block.keys):
        m, l, o_bar = attend(q, K, V, PADDING, head, row, start, m, l, o_bar, dither, queries, keys, C, C.padded)
    for start in range(whole, end, C.block.keys):
        m, l, o_bar = attend(q, K, V, PADDING, head, row, start, m, l, o_bar, dither, queries, keys, C, True)
    finish(O, PADDING, head, row, queries, keys, tl.div_rn(o_bar, l + zeros(1, C.block_d)), cast_start, C)
    write_lse(LSE, head, row, queries, (m + log(l, C) - C.log_raised) * (1.0 / C.unit), C)


@triton.jit(do_not_specialize=["dither_start", "cast_start"])
def standard(Q, K, V, PADDING, O, LSE, queries, keys, dither_start, cast_start, C: tl.constexpr):
    """Compute standard attention of one block of queries: P is normalised by the row's sum before it is cast.

    S is computed three times and never held: for a row's maximum, for its sum, for O. Arguments and grid as of
    `forward`; `dither_start` is not used.
    """
    head = tl.program_id(1).to(tl.int64)
    row = down(tl.program_id(0) * C.block.queries, C.block.queries)
    q = load(Q, head, row, queries, C)
    m = zeros(C.block.queries, 1) - float("inf")
    for start in range(0, keys, C.block.keys):
        m = tl.maximum(m, row_max(visible_scores(q, K, PADDING, head, row, start, queries, keys, C)))
    shift = tl.where(m == float("-inf"), 0.0, m)
    l = zeros(C.block.queries, 1)
    for start in range(0, keys, C.block.keys):
        l += row_sum(exp(visible_scores(q, K, PADDING, head, row, start, queries, keys, C) - shift, C))
    o = zeros(C.block.queries, C.block_d)
    P_BAR: tl.constexpr = C.plan.p_bar
    for start in range(0, keys, C.block.keys):
        p = exp(visible_scores(q, K, PADDING, head, row, start, queries, keys, C) - shift, C)
        v = load(V, head // C.groups, down(start, C.block.keys), keys, C)
        o = dot(narrow(tl.div_rn(p, l + zeros(1, C.block.keys)), P_BAR), v, o)
    O_BAR: tl.constexpr = C.plan.o_bar
    finish(O, PADDING, head, row, queries, keys, cast(o, O_BAR), cast_start, C)
    write_lse(LSE, head, row, queries, (shift + log(l, C)) * (1.0 / C.unit), C)


@triton.jit
def visible_scores(q, K, PADDING, head, row, start, queries, keys, C: tl.constexpr):
    """Return one tile of S, with -Inf where a query does not see a key."""
    k = load(K, head // C.groups, down(start, C.block.keys), keys, C)
    s = scores(q, tl.trans(k), zeros(C.block.queries, C.block.keys), C)
    return hide(s, PADDING, head, row, across(start, C.block.keys), queries, keys, C)


@triton.jit
def visible_keys(first, queries, keys, C: tl.constexpr):
    """Return how many keys a block of queries sees in whole blocks, unmasked, and where its last visible key ends."""
    whole = keys
    end = keys
    if C.causal:
        # The first query sees the fewest keys, the last one the most.
        whole = tl.minimum(whole, tl.maximum(first + (keys - queries) + 1, 0))
        if C.shift.row_sum_floor == 0.0:  # a floor counts masked blocks too
            end = tl.minimum(end, tl.maximum(first + C.block.queries + (keys - queries), 0))
    return whole // C.block.keys * C.block.keys, end


@triton.jit
def attend(
    q, K, V, PADDING, head, row, start, m, l, o_bar, dither, queries, keys, C: tl.constexpr, MASKED: tl.constexpr
):
    """Return the running shift, row sum and output after one more block of keys."""
    key = down(start, C.block.keys)
    k = load(K, head // C.groups, key, keys, C)
    s = scores(q, tl.trans(k), zeros(C.block.queries, C.block.keys), C)
    if MASKED:
        s = hide(s, PADDING, head, row, across(start, C.block.keys), queries, keys, C)
    largest = row_max(s)
    # A wholly masked block has no maximum to shift by.
    proposed = tl.where(largest == float("-inf"), largest, propose(s, largest, dither, C))
    new_m = tl.maximum(m, proposed)
    if C.shift.lag != 0.0:
        new_m = tl.where(new_m - m <= C.shift.lag * C.unit, m, new_m)
    shift = tl.where(new_m == float("-inf"), 0.0, new_m)
    p = exp(s - shift, C)
    alpha = exp(m - shift, C)
    if C.plan.offset != 0:
        p = p * 2.0**C.plan.offset
    P_BAR: tl.constexpr = C.plan.p_bar
    p_bar = narrow(p, P_BAR)
    if C.plan.row_sum_of.name == "ROUNDED":
        p = p_bar.to(tl.float32)
    elif C.plan.row_sum_of.name == "CLAMPED":
        p = tl.minimum(p, C.plan.p_bar.fmt.largest)
    total = row_sum(p)
    if C.shift.row_sum_floor != 0.0:
        total = tl.maximum(total, C.shift.row_sum_floor)
    ROW_SUM: tl.constexpr = C.plan.row_sum
    l = cast(cast(alpha * l, ROW_SUM) + cast(total, ROW_SUM), ROW_SUM)
    v = load(V, head // C.groups, key, keys, C)
    if C.plan.o_bar.narrows:
        O_BAR: tl.constexpr = C.plan.o_bar
        pv = cast(dot(p_bar, v, zeros(C.block.queries, C.block_d)), O_BAR)
        o_bar = cast(cast(alpha * o_bar, O_BAR) + pv, O_BAR)
    else:
        o_bar = dot(p_bar, v, alpha * o_bar)
    return new_m, l, o_bar


@triton.jit
def finish(O, PADDING, head, row, queries, keys, o, cast_start, C: tl.constexpr):
    """Cast O, to even or stochastically, and store it; rows without a visible key give zeros."""
    if C.padded:
        o = tl.where(blind(PADDING, head, row, queries, keys, C), 0.0, o)
    elif C.causal:
        o = tl.where(row + (keys - queries) < 0, 0.0, o)
    if C.plan.is_stochastic:
        random = absorb(row_state(cast_start, head, row, C), across(0, C.block_d))
        FMT: tl.constexpr = C.plan.o.fmt
        o = rounded(o, random, FMT, "stochastic")
    CAST: tl.constexpr = C.plan.o
    store(O, head, row, queries, narrow(o, CAST), C)


@triton.jit
def blind(PADDING, head, row, queries, keys, C: tl.constexpr):
    """Return whether a row sees no key. Its row sum does not tell: it is also 0 where every P-bar has underflowed."""
    most = zeros(C.block.queries, 1) - float("inf")
    for start in range(0, keys, C.block.keys):
        shown = zeros(C.block.queries, C.block.keys)
        shown = hide(shown, PADDING, head, row, across(start, C.block.keys), queries, keys, C)
        most = tl.maximum(most, row_max(shown))
    return most == float("-inf")


@triton.jit
def write_lse(LSE, head, row, queries, lse, C: tl.constexpr):
    """Write one number a row to a (heads, queries) tensor."""
    tl.store(LSE + head * queries + row, lse, mask=row < queries)
