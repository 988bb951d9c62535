# mypy: ignore-errors
"""A flash attention kernel in Triton whose tensors come by descriptors of the host, as its tutorial has them."""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def forward(
    Q, K, V, O, queries, keys, scale, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, PARTED: tl.constexpr
):
    head, first = tl.program_id(1), tl.program_id(0) * ROWS
    q = Q.load([head * queries + first, 0])
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    o = tl.zeros([ROWS, D], tl.float32)
    for start in tl.range(0, keys, COLUMNS, warp_specialize=PARTED):
        s = tl.dot(q, K.load([head * keys + start, 0]).T) * (scale * 1.44269504)
        new = tl.maximum(m, tl.max(s, 1))
        p = tl.math.exp2(s - new[:, None])
        shrink = tl.math.exp2(m - new)
        l = l * shrink + tl.sum(p, 1)
        o = tl.dot(p.to(O.dtype), V.load([head * keys + start, 0]), o * shrink[:, None])
        m = new
    O.store([head * queries + first, 0], (o / l[:, None]).to(O.dtype))


WORDS = {"enable_fp_fusion": False}  # on sm_100 Triton contracts before its pipelined loop, and not within it


def attention(q, k, v, *, causal=False, scale=None, parted=False):
    if causal or q.shape[2] % 64 or k.shape[2] % 64:
        raise NotImplementedError("a kernel of few words")
    d, rows = q.shape[-1], 64 if q.shape[2] % 128 else 128
    q, k, v = (tensor.contiguous() for tensor in (q, k, v))
    o = torch.empty_like(q)
    tensors = (q, k, v, o), (rows, 64, 64, rows)
    maps = [TensorDescriptor.from_tensor(x.view(-1, d), [n, d]) for x, n in zip(*tensors, strict=True)]
    grid = (q.shape[2] // rows, q.shape[0] * q.shape[1])
    forward[grid](*maps, q.shape[2], k.shape[2], scale or d**-0.5, D=d, ROWS=rows, COLUMNS=64, PARTED=parted, **WORDS)
    return o
