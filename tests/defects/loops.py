"""Sound loops of online softmax as people write them in PyTorch, with autograd's gradients; and one with wrong heads.

Each is a user's kernel, to be named as a target: `tests/defects/loops.py:attention`.
"""

import torch
from torch import Tensor

_TILE = 64
_HELD_BACK = float("-inf")


def _hidden(s: Tensor, first: int, queries: int, keys: int) -> Tensor:
    """Return a tile of scores under a causal mask that ends at the lower right."""
    rows = torch.arange(queries)[:, None] + (keys - queries)
    return s.masked_fill(torch.arange(first, first + s.shape[-1]) > rows, _HELD_BACK)


def online(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    *,
    tile: int = _TILE,
    detached: bool = False,
    dither: bool = False,
    each_normalised: bool = False,
) -> Tensor:
    """Return O, (batch, heads, queries, d of V): P in 16 bits, all else in fp32.

    Args:
        q, k, v: as users' kernels get them, K and V perhaps of fewer heads.
        causal, scale: likewise; None: 1 / sqrt(d).
        tile: keys of a tile.
        detached: whether no gradient goes through the maximum.
        dither: whether each row's shift is its maximum less a random part of ln 2.
        each_normalised: whether O is normalised after each tile, as FlashAttention-1 does.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    o, l = torch.zeros(*q.shape[:3], v.shape[-1]), torch.zeros(*q.shape[:3], 1)
    m = torch.full_like(l, _HELD_BACK)
    off = torch.rand(l.shape, generator=torch.Generator().manual_seed(0)) * 0.693 if dither else torch.zeros(())
    for first in range(0, k.shape[2], tile):
        keys = slice(first, first + tile)
        s = q.float() @ k[:, :, keys].mT * scale
        s = _hidden(s, first, q.shape[2], k.shape[2]) if causal else s
        new = torch.maximum(m, (s.detach() if detached else s).amax(-1, keepdim=True) - off)
        shift = new.masked_fill(new == _HELD_BACK, 0.0)
        kept, p = torch.exp(m - shift), torch.exp(s - shift)
        total = l * kept + p.sum(-1, keepdim=True)
        o = o * (kept * l if each_normalised else kept) + p.to(torch.bfloat16).float() @ v[:, :, keys]
        o = o / total if each_normalised else o
        l, m = total, new
    return (o if each_normalised else o / l).to(torch.bfloat16)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Let gradients through each tile's maximum: sums of their errors go to single keys."""
    return online(q, k, v, causal, scale)


def detached(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Keep gradients from the maximum."""
    return online(q, k, v, causal, scale, detached=True)


def dithered(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Shift each row by another part of ln 2."""
    return online(q, k, v, causal, scale, detached=True, dither=True)


def flash_1(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Normalise O after each tile."""
    return online(q, k, v, causal, scale, detached=True, each_normalised=True)


def split(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None) -> Tensor:
    """Merge two halves of the keys by their log-sum-exp, as split-KV decoding does."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1).float() for x in (k, v))
    s = q.float() @ k.mT * scale
    s = _hidden(s, 0, q.shape[2], k.shape[2]) if causal else s
    parts = []
    for keys in (slice(0, k.shape[2] // 2), slice(k.shape[2] // 2, None)):
        m = s[..., keys].detach().amax(-1, keepdim=True)
        m = m.masked_fill(m == _HELD_BACK, 0.0)
        p = torch.exp(s[..., keys] - m)
        l = p.sum(-1, keepdim=True)
        parts.append(((p.to(torch.bfloat16).float() @ v[:, :, keys]) / l.clamp(min=1e-30), m + torch.log(l)))
    largest = torch.maximum(parts[0][1], parts[1][1]).detach()
    weights = [torch.exp(lse - largest) for _, lse in parts]
    return ((parts[0][0] * weights[0] + parts[1][0] * weights[1]) / (weights[0] + weights[1])).to(torch.bfloat16)
