"""Flash attention as users write it: the sound kernel that the planted ones differ from in one step each."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class CallRequest:
    """One call, in the format of its inputs."""

    q: Tensor  # (batch, heads, queries, d)
    k: Tensor  # (batch, key heads, keys, d)
    v: Tensor  # (batch, key heads, keys, d)
    causal: bool  # query i sees keys 0 .. i + keys - queries
    scale: float  # of the scores
    seen: Tensor | None  # bool, broadcastable to (batch, heads, queries, keys): True where a key takes part

    @property
    def groups(self) -> int:
        """Query heads per key head."""
        return self.q.shape[1] // self.k.shape[1]

    @property
    def queries(self) -> int:
        """Rows of S."""
        return self.q.shape[2]

    @property
    def keys(self) -> int:
        """Columns of S."""
        return self.k.shape[2]

    @cached_property
    def wide_q(self) -> Tensor:
        """Q in fp32."""
        return self.q.float()

    @cached_property
    def wide_k(self) -> Tensor:
        """K in fp32, each key head repeated for its query heads."""
        return self.k.float().repeat_interleave(self.groups, 1)

    @cached_property
    def wide_v(self) -> Tensor:
        """V, likewise."""
        return self.v.float().repeat_interleave(self.groups, 1)


@dataclass(frozen=True)
class Sums:
    """What a kernel has of its rows after some key tiles."""

    m: Tensor  # (batch, heads, queries, 1), the largest score
    l: Tensor  # likewise, the sum of exp(S - m)
    o_bar: Tensor  # (batch, heads, queries, d), the sum of exp(S - m) V

    @classmethod
    def none(cls, q: Tensor) -> "Sums":
        """Those before the first tile."""
        column = torch.full_like(q[..., :1], -torch.inf)
        return cls(column, torch.zeros_like(column), torch.zeros_like(q))

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the scores."""
        return self.m + torch.log(self.l)


class Tiled:
    """FlashAttention-2 in plain PyTorch, forward and backward: fp32 inside, P cast for the product with V."""

    tile: ClassVar[int] = 64  # keys

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """O, as users' kernels return it."""
        del enable_gqa  # the shapes tell
        return self.output(self.asked(q, k, v, causal, scale, attn_mask))

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV."""
        del enable_gqa
        return self.gradients(self.asked(q, k, v, causal, scale, attn_mask), do, o)

    def asked(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, seen: Tensor | None
    ) -> CallRequest:
        """The call."""
        return CallRequest(q, k, v, causal, 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale, seen)

    def tiles(self, asked: CallRequest) -> list[slice]:
        """The keys of each tile."""
        return [slice(at, min(at + self.tile, asked.keys)) for at in range(0, asked.keys, self.tile)]

    def hidden(self, asked: CallRequest) -> Tensor | None:
        """Bool, broadcastable to S: True where a score is masked; None if nowhere."""
        mask = None if asked.seen is None else ~asked.seen
        if asked.causal:
            later = torch.ones(asked.queries, asked.keys, dtype=torch.bool).triu(asked.keys - asked.queries + 1)
            mask = later if mask is None else mask | later
        return mask

    def product(self, asked: CallRequest, keys: slice) -> Tensor:
        """A tile of Q K^T, (batch, heads, queries, keys), scaled."""
        return asked.wide_q @ asked.wide_k[:, :, keys].transpose(-1, -2) * asked.scale

    def scores(self, asked: CallRequest, keys: slice) -> Tensor:
        """A tile of S, masked."""
        s, hidden = self.product(asked, keys), self.hidden(asked)
        return s if hidden is None else s.masked_fill(hidden[..., keys], -torch.inf)

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        """exp(S - m); 0 where nothing has been seen yet."""
        return torch.exp(s - torch.where(m == -torch.inf, 0.0, m))

    def largest(self, sums: Sums, s: Tensor) -> Tensor:
        """The row maximum, a tile further."""
        return torch.maximum(sums.m, s.amax(-1, keepdim=True))

    def p_bar(self, p: Tensor, asked: CallRequest) -> Tensor:
        """P as it enters the product with V."""
        return _narrow(p, asked)

    def step(self, asked: CallRequest, sums: Sums, keys: slice) -> Sums:
        """The sums, a tile further."""
        s = self.scores(asked, keys)
        m = self.largest(sums, s)
        p, alpha = self.exp(s, m), self.exp(sums.m, m)
        added = self.p_bar(p, asked) @ asked.wide_v[:, :, keys]
        return Sums(m, alpha * sums.l + p.sum(-1, keepdim=True), alpha * sums.o_bar + added)

    def sums(self, asked: CallRequest) -> Sums:
        """Those of all tiles."""
        found = self.start(asked)
        for keys in self.tiles(asked):
            found = self.step(asked, found, keys)
        return found

    def start(self, asked: CallRequest) -> Sums:
        """Those before the first tile."""
        return Sums.none(asked.wide_q)

    def normalised(self, sums: Sums) -> Tensor:
        """O in fp32; a row that has seen no key gives zeros."""
        return (sums.o_bar / sums.l).masked_fill(sums.m == -torch.inf, 0.0)

    def output(self, asked: CallRequest) -> Tensor:
        """O."""
        return self.stored(self.normalised(self.sums(asked)), asked)

    def stored(self, o: Tensor, asked: CallRequest) -> Tensor:
        """O in the format of the call."""
        return o.to(asked.q.dtype)

    def recomputed(self, asked: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        """A tile of P in the backward pass."""
        return torch.exp(self.scores(asked, keys) - lse).masked_fill(lse == -torch.inf, 0.0)

    def lse(self, asked: CallRequest) -> Tensor:
        """The log-sum-exp that the backward pass is given."""
        return self.sums(asked).lse

    def gradients(self, asked: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dQ, dK and dV in the shapes and the format of q, k and v."""
        lse, wide = self.lse(asked), do.float()
        delta = (wide * o.float()).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (asked.wide_q, asked.wide_k, asked.wide_v))
        for keys in self.tiles(asked):
            p = self.recomputed(asked, keys, lse)
            ds = _narrow(p * (wide @ asked.wide_v[:, :, keys].transpose(-1, -2) - delta), asked)
            dv[:, :, keys] = _narrow(p, asked).transpose(-1, -2) @ wide
            dk[:, :, keys] = self.dk(asked, ds)
            dq = self.dq(asked, dq, ds, keys)
        dk, dv = self.summed(dk, asked), self.summed(dv, asked)
        return dq.to(asked.q.dtype), dk.to(asked.q.dtype), dv.to(asked.q.dtype)

    def dk(self, asked: CallRequest, ds: Tensor) -> Tensor:
        """A tile of dK."""
        return asked.scale * ds.transpose(-1, -2) @ asked.wide_q

    def dq(self, asked: CallRequest, dq: Tensor, ds: Tensor, keys: slice) -> Tensor:
        """dQ, a tile further."""
        return dq + asked.scale * ds @ asked.wide_k[:, :, keys]

    def summed(self, gradient: Tensor, asked: CallRequest) -> Tensor:
        """The gradient of a key head: the sum over its query heads."""
        return by_group(gradient, asked.groups).sum(2)


def _narrow(x: Tensor, asked: CallRequest) -> Tensor:
    """Cast for a product, in the format of the call."""
    return x.to(asked.q.dtype).float()


def by_group(gradient: Tensor, groups: int) -> Tensor:
    """(batch, heads, ...) as (batch, key heads, groups, ...)."""
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, *rest)
