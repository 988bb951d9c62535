"""The backward pass: `tiebreak.kernels.flash.backward`, as a pre-pass for delta, a pass for dK and dV, one for dQ.

Tiles beyond the last query load q = dO = 0 and so add nothing; keys beyond the last are masked.
"""

import triton
import triton.language as tl

from .forward import visible_keys, write_lse
from .rounding import cast, narrow
from .softmax import exp, hide, scores
from .tiles import across, dot, down, load, load_rows, row_sum, store, zeros


@triton.jit
def delta(Q, K, V, PADDING, O, DO, LSE, DELTA, queries, keys, C: tl.constexpr):
    """Compute the row term of the softmax's gradient, from what the plan says (arXiv 2510.04212, section 3.2).

    Grid and arguments as of `forward`, O and LSE as it stored them; DO in the shape of Q, DELTA in that of LSE.
    """
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * C.block.queries
    row = down(first, C.block.queries)
    do = load(DO, head, row, queries, C)
    if C.plan.delta_from.name == "OUTPUT":
        total = row_sum(do.to(tl.float32) * load(O, head, row, queries, C).to(tl.float32))
    else:
        q = load(Q, head, row, queries, C)
        lse = load_rows(LSE, head, row, queries)
        _, end = visible_keys(first, queries, keys, C)
        total = zeros(C.block.queries, 1)
        for start in range(0, end, C.block.keys):
            k = load(K, head // C.groups, down(start, C.block.keys), keys, C)
            v = load(V, head // C.groups, down(start, C.block.keys), keys, C)
            s = scores(q, tl.trans(k), zeros(C.block.queries, C.block.keys), C)
            p = probabilities(s, lse, PADDING, head, row, across(start, C.block.keys), queries, keys, C)
            if C.plan.delta_from.name == "PROBABILITIES":
                total += row_sum(p * upstream_of_p(do, tl.trans(v), C.block.queries, C.block.keys, C))
            else:
                pv = dot(p, v, zeros(C.block.queries, C.block_d))
                total += row_sum(do.to(tl.float32) * pv)
    CAST: tl.constexpr = C.plan.delta
    write_lse(DELTA, head, row, queries, cast(total, CAST), C)


@triton.jit
def probabilities(s, lse, PADDING, head, query, key, queries, keys, C: tl.constexpr):
    """Return P of one tile from its scores and the rows' log-sum-exp, in either orientation."""
    p = exp(hide(s, PADDING, head, query, key, queries, keys, C) - lse * C.unit, C)
    # A row without a visible key has log-sum-exp -Inf and no probabilities.
    return tl.where(lse == float("-inf"), 0.0, p)


@triton.jit
def upstream_of_p(a, b, ROWS: tl.constexpr, COLUMNS: tl.constexpr, C: tl.constexpr):
    """Return one tile of dP = dO V^T, or transposed V dO^T, cast as the plan says."""
    DP: tl.constexpr = C.plan.dp
    return cast(dot(a, b, zeros(ROWS, COLUMNS)), DP)


@triton.jit
def key_gradients(Q, K, V, PADDING, DO, LSE, DELTA, DK, DV, queries, keys, C: tl.constexpr):
    """Compute dK and dV of one block of keys, summed over the query heads of the key head, in tiles (keys, queries).

    Grid: (blocks of keys, batch x key heads). Arguments as of `delta`; DK and DV in the shape of K.
    """
    key_head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * C.block.keys
    key = down(first, C.block.keys)
    k = load(K, key_head, key, keys, C)
    v = load(V, key_head, key, keys, C)
    P: tl.constexpr = C.plan.p
    DS: tl.constexpr = C.plan.ds
    GRADIENTS: tl.constexpr = C.plan.gradients
    dk = zeros(C.block.keys, C.block_d)
    dv = zeros(C.block.keys, C.block_d)
    begin = 0
    if C.causal:
        # Queries before the first that sees the first of these keys.
        begin = tl.maximum(first - (keys - queries), 0) // C.block.queries * C.block.queries
    for member in range(C.groups):
        head = key_head * C.groups + member
        for start in range(begin, queries, C.block.queries):
            q = load(Q, head, down(start, C.block.queries), queries, C)
            do = load(DO, head, down(start, C.block.queries), queries, C)
            query = across(start, C.block.queries)
            s = scores(k, tl.trans(q), zeros(C.block.keys, C.block.queries), C)
            lse = load_rows(LSE, head, query, queries)
            p = probabilities(s, lse, PADDING, head, query, key, queries, keys, C)
            dp = upstream_of_p(v, tl.trans(do), C.block.keys, C.block.queries, C)
            dv = dot(narrow(p, P), do, dv)
            ds = narrow(p * (dp - load_rows(DELTA, head, query, queries)), DS)
            dk = dot(ds, q, dk)
    store(DK, key_head, key, keys, narrow(dk * C.scale, GRADIENTS), C)
    store(DV, key_head, key, keys, narrow(dv, GRADIENTS), C)


@triton.jit
def query_gradient(Q, K, V, PADDING, DO, LSE, DELTA, DQ, queries, keys, C: tl.constexpr):
    """Compute dQ of one block of queries, in the shape of Q. Grid and arguments as of `delta`."""
    head = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0) * C.block.queries
    row = down(first, C.block.queries)
    q = load(Q, head, row, queries, C)
    do = load(DO, head, row, queries, C)
    lse = load_rows(LSE, head, row, queries)
    d = load_rows(DELTA, head, row, queries)
    DS: tl.constexpr = C.plan.ds
    GRADIENTS: tl.constexpr = C.plan.gradients
    dq = zeros(C.block.queries, C.block_d)
    _, end = visible_keys(first, queries, keys, C)
    for start in range(0, end, C.block.keys):
        k = load(K, head // C.groups, down(start, C.block.keys), keys, C)
        v = load(V, head // C.groups, down(start, C.block.keys), keys, C)
        s = scores(q, tl.trans(k), zeros(C.block.queries, C.block.keys), C)
        p = probabilities(s, lse, PADDING, head, row, across(start, C.block.keys), queries, keys, C)
        dp = upstream_of_p(do, tl.trans(v), C.block.queries, C.block.keys, C)
        dq = dot(narrow(p * (dp - d), DS), k, dq)
    store(DQ, head, row, queries, narrow(dq * C.scale, GRADIENTS), C)
