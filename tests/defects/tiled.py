"""Flash attention as users write it: the sound kernel that the planted ones differ from in one step each."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

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
    mask: Tensor | None  # bool, broadcastable to (batch, heads, queries, keys): True where a key takes part

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
    bug: ClassVar[str] = ""  # where it was reported, below github.com, of a kernel that is wrong
    of_defect: ClassVar[Mapping[str, Any]] = {}  # what else a `Defect` of it has
    options: ClassVar[Mapping[str, Any]] = {}  # that its author gives

    def __init_subclass__(
        cls, bug: str = "", twin: str = "tiled", takes: str = "", lse: str = "", invariant: str = "", **of_defect: Any
    ) -> None:
        """A kernel that is wrong names, where its class begins, the bug that it stands for."""
        cls.bug, cls.of_defect = bug, {"twin": twin, **of_defect}
        cls.options = {"takes": takes, "lse": lse, "invariant": invariant}

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """What users' kernels return: O, and perhaps more."""
        del enable_gqa  # the shapes tell
        return self.returned(self.request(q, k, v, causal, scale, attn_mask))

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
    ) -> tuple[Tensor, ...]:
        """dQ, dK and dV."""
        del enable_gqa
        return self.gradients(self.request(q, k, v, causal, scale, attn_mask), do, o)

    def request(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, mask: Tensor | None
    ) -> CallRequest:
        """The call."""
        scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else scale
        return self.prepared(CallRequest(q, k, v, causal, scale, mask))

    def prepared(self, request: CallRequest) -> CallRequest:
        """The call, as the kernel takes it."""
        return request

    def returned(self, request: CallRequest) -> Tensor | tuple[Tensor, Tensor]:
        """All that a call returns."""
        return self.output(request)

    def tiles(self, request: CallRequest) -> list[slice]:
        """The keys of each tile."""
        return [slice(at, min(at + self.tile, request.keys)) for at in range(0, request.keys, self.tile)]

    def backward_tiles(self, request: CallRequest) -> list[slice]:
        """The same, as the backward pass takes them."""
        return self.tiles(request)

    def hidden(self, request: CallRequest) -> Tensor | None:
        """Bool, broadcastable to S: True where a score is masked; None if nowhere."""
        mask = None if request.mask is None else ~request.mask
        if request.causal:
            later = torch.ones(request.queries, request.keys, dtype=torch.bool).triu(self.first_hidden(request))
            mask = later if mask is None else mask | later
        return mask

    def first_hidden(self, request: CallRequest) -> int:
        """The first key that a causal mask hides from query 0."""
        return request.keys - request.queries + 1

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        """A tile of Q K^T, (batch, heads, queries, keys), scaled."""
        return request.wide_q @ request.wide_k[:, :, keys].transpose(-1, -2) * request.scale

    def scores(self, request: CallRequest, keys: slice) -> Tensor:
        """A tile of S, masked."""
        s, hidden = self.product(request, keys), self.hidden(request)
        return s if hidden is None else self.masked(s, hidden[..., keys])

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        """A tile of S without what is hidden in it."""
        return s.masked_fill(hidden, -torch.inf)

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        """exp(S - m); 0 where nothing has been seen yet."""
        return torch.exp(s - torch.where(m == -torch.inf, 0.0, m))

    def largest(self, sums: Sums, s: Tensor) -> Tensor:
        """The row maximum, a tile further."""
        return torch.maximum(sums.m, s.amax(-1, keepdim=True))

    def p_bar(self, p: Tensor, request: CallRequest) -> Tensor:
        """P as it enters the product with V."""
        return _narrow(p, request)

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        """The sums, a tile further."""
        s = self.scores(request, keys)
        m = self.largest(sums, s)
        p, alpha = self.exp(s, m), self.exp(sums.m, m)
        added = self.p_bar(p, request) @ request.wide_v[:, :, keys]
        return Sums(m, alpha * sums.l + p.sum(-1, keepdim=True), alpha * sums.o_bar + added)

    def sums(self, request: CallRequest) -> Sums:
        """Those of all tiles."""
        total = self.start(request)
        for keys in self.tiles(request):
            total = self.step(request, total, keys)
        return total

    def start(self, request: CallRequest) -> Sums:
        """Those before the first tile."""
        return Sums.none(request.wide_q)

    def normalised(self, sums: Sums) -> Tensor:
        """O in fp32; a row that has seen no key gives zeros."""
        return (sums.o_bar / sums.l).masked_fill(sums.m == -torch.inf, 0.0)

    def output(self, request: CallRequest) -> Tensor:
        """O."""
        return self.stored(self.normalised(self.sums(request)), request)

    def stored(self, o: Tensor, request: CallRequest) -> Tensor:
        """O in the format of the call."""
        return o.to(request.q.dtype)

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        """A tile of P in the backward pass."""
        return torch.exp(self.scores(request, keys) - lse).masked_fill(lse == -torch.inf, 0.0)

    def lse(self, request: CallRequest) -> Tensor:
        """The log-sum-exp that the backward pass is given."""
        return self.sums(request).lse

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        """dQ, dK and dV in the shapes and the format of q, k and v."""
        lse, wide = self.lse(request), do.float()
        delta = self.delta(wide, o.float())
        dq, dk, dv = (torch.zeros_like(x) for x in (request.wide_q, request.wide_k, request.wide_v))
        for keys in self.backward_tiles(request):
            p = self.recomputed(request, keys, lse)
            of_capped = p * (wide @ request.wide_v[:, :, keys].transpose(-1, -2) - delta)
            ds = self.ds(self.of_scores(of_capped, request, keys), request)
            dv[:, :, keys] = self.p_of_dv(p, request).transpose(-1, -2) @ wide
            dk[:, :, keys] = self.dk(request, ds)
            dq = self.dq(request, dq, ds, keys)
        dk, dv = self.summed(dk, request), self.summed(dv, request)
        return dq.to(request.q.dtype), dk.to(request.q.dtype), dv.to(request.q.dtype)

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        """The row term of dS."""
        return (do * o).sum(-1, keepdim=True)

    def of_scores(self, ds: Tensor, request: CallRequest, keys: slice) -> Tensor:
        """A tile of dS by what the product gave."""
        return ds

    def ds(self, ds: Tensor, request: CallRequest) -> Tensor:
        """DS as it enters its products."""
        return _narrow(ds, request)

    def p_of_dv(self, p: Tensor, request: CallRequest) -> Tensor:
        """P as it enters the product with dO."""
        return _narrow(p, request)

    def dk(self, request: CallRequest, ds: Tensor) -> Tensor:
        """A tile of dK."""
        return request.scale * ds.transpose(-1, -2) @ request.wide_q

    def dq(self, request: CallRequest, dq: Tensor, ds: Tensor, keys: slice) -> Tensor:
        """dQ, a tile further."""
        return dq + request.scale * ds @ request.wide_k[:, :, keys]

    def summed(self, gradient: Tensor, request: CallRequest) -> Tensor:
        """The gradient of a key head: the sum over its query heads."""
        return by_group(gradient, request.groups).sum(2)


def truncated(x: Tensor) -> Tensor:
    """In bf16, what lies beyond its bits cut off."""
    return x.float().view(torch.int32).bitwise_and(-65536).view(torch.float32)


def _narrow(x: Tensor, request: CallRequest) -> Tensor:
    """Cast for a product, in the format of the call."""
    return x.to(request.q.dtype).float()


def by_group(gradient: Tensor, groups: int) -> Tensor:
    """(batch, heads, ...) as (batch, key heads, groups, ...)."""
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, heads // groups, groups, *rest)
