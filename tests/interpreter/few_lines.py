# mypy: ignore-errors
"""A flash attention kernel in Triton, as somebody might write it: not the suite's."""

import torch
import triton
import triton.language as tl


@triton.jit
def forward(Q, K, V, O, keys, scale, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    head = tl.program_id(0)
    row, column, d = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[:, None], tl.arange(0, D)[None, :]
    q = tl.load(Q + (head * ROWS + row) * D + d)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    for start in range(0, keys, COLUMNS):
        at = (head * keys + start + column) * D + d
        s = tl.dot(q, tl.trans(tl.load(K + at))) * (scale * 1.44269504)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(V.dtype.element_ty), tl.load(V + at), o * shrink[:, None])
        m = new
    tl.store(O + (head * ROWS + row) * D + d, (o / l[:, None]).to(O.dtype.element_ty))


def attention(q, k, v, *, causal=False, scale=None):
    if causal or q.shape[-1] != 64 or q.shape[2] & (q.shape[2] - 1):
        raise NotImplementedError("a kernel of few words")
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    o = torch.empty_like(q)
    grid = (q.shape[0] * q.shape[1],)
    forward[grid](q, k, v, o, k.shape[2], scale or 0.125, D=64, ROWS=q.shape[2], COLUMNS=min(64, k.shape[2]))
    return o
