"""Flash attention in plain torch, forward and backward, tile by tile."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import tiebreak

TILE = 64  # keys


@tiebreak.kernel(plan="flash@fused")
def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """softmax(scale Q K^T) V.

    Args:
        q: (batch, heads, queries, d), in bf16 or fp16.
        k: (batch, heads, keys, d).
        v: (batch, heads, keys, d).
        causal: whether query i sees keys 0 .. i + keys - queries alone.
        scale: what Q K^T is multiplied by; None: 1/sqrt(d).

    Returns:
        O, as q is.
    """
    return _Flash.apply(q, k, v, causal, q.shape[-1] ** -0.5 if scale is None else scale)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> Tensor:
        top = q.new_full((*q.shape[:-1], 1), -math.inf, dtype=torch.float32)
        total = torch.zeros_like(top)
        acc = torch.zeros_like(q, dtype=torch.float32)
        for tile in _tiles(k):
            s = _scores(q, k, tile, causal, scale)
            new_top = torch.maximum(top, s.amax(-1, keepdim=True))
            shift = new_top.masked_fill(new_top == -math.inf, 0.0)  # a row that has seen no key yet
            p = torch.exp(s - shift)
            rescale = torch.exp(top - shift)
            total = total * rescale + p.sum(-1, keepdim=True)
            acc = acc * rescale + _product(p.to(v.dtype), v[..., tile, :])
            top = new_top
        out = (acc / total.masked_fill(total == 0, 1.0)).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, top + torch.log(total))
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        lse = lse.masked_fill(lse == -math.inf, math.inf)  # exp(s - inf) = 0: a row without a key has no gradient
        delta = (do.float() * out.float()).sum(-1, keepdim=True)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dk, dv = torch.empty_like(k), torch.empty_like(v)
        for tile in _tiles(k):
            p = torch.exp(_scores(q, k, tile, ctx.causal, ctx.scale) - lse)
            dp = _product(do, v[..., tile, :].mT)
            ds = (p * (dp - delta)).to(q.dtype)
            dq += _product(ds, k[..., tile, :])
            dk[..., tile, :] = (_product(ds.mT, q) * ctx.scale).to(k.dtype)
            dv[..., tile, :] = _product(p.to(v.dtype).mT, do).to(v.dtype)
        return (dq * ctx.scale).to(q.dtype), dk, dv, None, None


def _tiles(k: Tensor) -> Iterator[slice]:
    return (slice(start, min(start + TILE, k.shape[-2])) for start in range(0, k.shape[-2], TILE))


def _scores(q: Tensor, k: Tensor, tile: slice, causal: bool, scale: float) -> Tensor:
    s = _product(q, k[..., tile, :].mT) * scale
    if causal:
        last = torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2]  # key that a query sees
        s = s.masked_fill(torch.arange(tile.start, tile.stop) > last, -math.inf)
    return s


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of two tensors in 16 bits, summed in fp32, as tensor cores do."""
    return a.float() @ b.float()
