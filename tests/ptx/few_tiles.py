# mypy: ignore-errors
"""A flash attention kernel in cuTile."""

import math

import cuda.tile as ct
import torch

Number = ct.Constant[int]


def forward(Q, K, V, O, scale: float, ROWS: Number, COLUMNS: Number, D: Number):
    row, head = ct.bid(0), ct.bid(1)
    q = ct.load(Q, (head, row, 0), (1, ROWS, D)).reshape((ROWS, D))
    m = ct.full((ROWS, 1), -math.inf, ct.float32)
    l = ct.full((ROWS, 1), 0.0, ct.float32)
    o = ct.full((ROWS, D), 0.0, ct.float32)
    for tile in range(ct.cdiv(K.shape[1], COLUMNS)):
        k = ct.load(K, (head, tile, 0), (1, COLUMNS, D)).reshape((COLUMNS, D))
        s = ct.mma(q, k.transpose(), ct.full((ROWS, COLUMNS), 0.0, ct.float32)) * scale
        there = tile * COLUMNS + ct.arange(COLUMNS, dtype=ct.int32) < K.shape[1]
        s = ct.where(there[None, :], s, -math.inf)
        new = ct.maximum(m, ct.max(s, 1, keepdims=True))
        p, shrink = ct.exp2(s - new), ct.exp2(m - new)
        l = l * shrink + ct.sum(p, 1, keepdims=True)
        v = ct.load(V, (head, tile, 0), (1, COLUMNS, D)).reshape((COLUMNS, D))
        o = ct.mma(p.astype(V.dtype), v, o * shrink)
        m = new
    ct.store(O, (head, row, 0), (o / l).astype(O.dtype).reshape((1, ROWS, D)))


kernel, in_clusters = ct.kernel(forward), ct.kernel(num_ctas=2)(forward)


def attention(q, k, v, *, scale=None, launched=kernel, rows=64):
    heads, queries, d = q.shape[0] * q.shape[1], q.shape[2], q.shape[3]
    o = torch.empty_like(q)
    tensors = [x.reshape(heads, -1, d) for x in (q, k, v, o)]
    words = (scale or d**-0.5) * math.log2(math.e), rows, 64, d
    ct.launch(torch.cuda.current_stream(), (ct.cdiv(queries, rows), heads), launched, (*tensors, *words))
    return o
