"""Flash attention as users write it, in named steps, each of which a planted defect can replace."""

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

#: Replaces a step: it is called with the sound step and that step's arguments.
Switch = Callable[..., Any]


@dataclass(frozen=True)
class Arguments:
    """What a caller passes."""

    q: Tensor  # (batch, heads, queries, d)
    k: Tensor  # (batch, key heads, keys, d); where they are paged, (pages, key heads, page, d)
    v: Tensor  # likewise, (..., d of v)
    causal: bool = False
    scale: float | None = None  # None: 1 / sqrt(d)
    attn_mask: Tensor | None = None  # bool, broadcastable to (batch, heads, queries, keys): True where a key takes part
    enable_gqa: bool = False  # the shapes tell
    window_size: tuple[int, int] = (-1, -1)  # keys before a query's own and behind it; -1: all
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # (heads,)
    attn_bias: Tensor | None = None  # broadcastable to S
    alibi_slopes: Tensor | None = None  # (heads,) or (batch, heads), fp32
    cu_seqlens_q: Tensor | None = None  # where packed sequences begin, and the end
    cu_seqlens_k: Tensor | None = None
    base_blockmask: Tensor | None = None  # (batch or 1, heads or 1, blocks of queries, of keys), True where they see
    block_size: tuple[int, int] = (64, 64)
    block_table: Tensor | None = None  # (batch, pages of a sequence)
    cache_seqlens: Tensor | None = None  # (batch,), keys of each sequence
    k_descale: Tensor | None = None  # (batch, key heads)
    v_descale: Tensor | None = None
    num_splits: int = 1  # parts of the keys that are combined by their log-sum-exps


@dataclass(frozen=True)
class Request(Arguments):
    """One call, K and V as they are in the cache."""

    kept: dict[Any, Any] = field(default_factory=dict)  # from call to call; a sound kernel keeps nothing
    hidden: Tensor | None = None  # bool, broadcastable to S: True where a score is masked; None: nowhere

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

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale

    @property
    def sink(self) -> Tensor | None:
        """The sinks as a column of S."""
        return None if self.sinks is None else self.sinks.float()[:, None, None]


@dataclass(frozen=True)
class Sums:
    """What a kernel has of its rows after some key tiles."""

    m: Tensor  # (batch, heads, queries, 1), the largest score
    l: Tensor  # likewise, the sum of exp(S - m)
    o_bar: Tensor  # (batch, heads, queries, d of v), the sum of exp(S - m) V

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the scores."""
        return self.m + torch.log(self.l)


_SIGNATURE = inspect.signature(Arguments)


class Attention:
    """FlashAttention-2 in plain PyTorch, forward and backward: fp32 inside, P and dS cast for their products.

    It takes all that calls may ask; keys that no row sees are zeros, whatever was there. Its methods are its steps.
    """

    options: ClassVar[dict[str, str]] = {}  # of its author, beside what all of these kernels take
    tile = 64  # keys
    first_maximum = -math.inf  # of a row that has seen nothing
    of_blind_rows = 0.0  # O of a row that sees no key
    __signature__ = _SIGNATURE

    def __init__(self, **switches: Any) -> None:
        """Make it with some steps replaced, or with other constants."""
        self.kept: dict[Any, Any] = {}
        for step, wrong in switches.items():
            sound = getattr(self, step)
            setattr(self, step, partial(wrong, sound) if callable(wrong) else wrong)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Tensor | tuple[Tensor, Tensor]:
        """O, and perhaps more."""
        return self.returned(self.request(Arguments(q, k, v, **asked)))

    def backward(self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, **asked: Any) -> tuple[Tensor, ...]:
        """dQ, dK, dV and, of a call with a sink, dSink."""
        return self.gradients(self.request(Arguments(q, k, v, **asked)), do, o)

    # The call.

    def request(self, asked: Arguments) -> Request:
        """The call, with what it hides."""
        request = self.prepared(Request(**vars(asked), kept=self.kept))
        k, v = request.k, request.v
        if request.block_table is not None and request.cache_seqlens is not None:
            pages = request.block_table.long()
            keys = int(request.cache_seqlens.max())
            k, v = (pool[pages].transpose(1, 2).flatten(2, 3)[:, :, :keys] for pool in (k, v))
        if request.k_descale is not None and request.v_descale is not None:
            k, v = k.float() * request.k_descale[..., None, None], v.float() * request.v_descale[..., None, None]
        request = replace(request, k=k, v=v)
        return self.guarded(replace(request, hidden=self.hidden(request)))

    def prepared(self, request: Request) -> Request:
        """The call as the kernel takes it."""
        return request

    def guarded(self, request: Request) -> Request:
        """The call with zeros for keys that no row sees."""
        unseen = None if request.hidden is None else request.hidden.all(-2).all(1)[:, None, :, None]
        if unseen is None or not unseen.any():
            return request
        return replace(request, k=request.k.masked_fill(unseen, 0.0), v=request.v.masked_fill(unseen, 0.0))

    def hidden(self, request: Request) -> Tensor | None:
        """Where a score is masked."""
        ends = self.ends(request)
        hidden = torch.ones(len(ends), 1, request.queries, request.keys, dtype=torch.bool)
        for rows, columns in self.sequences(request):
            apart = torch.arange(columns.stop - columns.start) - torch.arange(rows.stop - rows.start)[:, None]
            apart = apart - self.diagonal(*apart.shape) - ends
            left, right = (2**31 if side < 0 else side for side in request.window_size)
            hidden[:, :, rows, columns] = (apart < -left) | (apart > (0 if request.causal else right))
        if request.attn_mask is not None:
            hidden = hidden | ~request.attn_mask
        if request.cache_seqlens is not None:
            hidden = hidden | (torch.arange(request.keys) >= request.cache_seqlens[:, None, None, None])
        if request.base_blockmask is not None:
            rows_of, columns_of = request.block_size
            blocks = ~request.base_blockmask
            blocks = blocks.repeat_interleave(rows_of, 2).repeat_interleave(columns_of, 3)
            hidden = hidden | blocks[:, :, : request.queries, : request.keys]
        return hidden if hidden.any() else None

    def sequences(self, request: Request) -> list[tuple[slice, slice]]:
        """Rows and columns of each packed sequence; of a call without any, all."""
        if request.cu_seqlens_q is None or request.cu_seqlens_k is None:
            return [(slice(0, request.queries), slice(0, request.keys))]
        both = (pairwise(begins.tolist()) for begins in (request.cu_seqlens_q, request.cu_seqlens_k))
        return [(slice(*rows), slice(*columns)) for rows, columns in zip(*both, strict=True)]

    def ends(self, request: Request) -> Tensor:
        """How far behind the last key each sequence's own last one lies, (batch or 1, 1, 1, 1)."""
        if request.cache_seqlens is None or request.attn_mask is not None:
            return torch.zeros(1, 1, 1, 1, dtype=torch.long)
        return request.cache_seqlens[:, None, None, None] - request.keys

    def diagonal(self, queries: int, keys: int) -> int:
        """The first query's own key."""
        return keys - queries

    # The forward pass.

    def returned(self, request: Request) -> Tensor | tuple[Tensor, Tensor]:
        """All that a call returns."""
        return self.output(request)

    def output(self, request: Request) -> Tensor:
        """O."""
        return self.stored(self.normalised(self.sums(request)), request)

    def stored(self, o: Tensor, request: Request) -> Tensor:
        """O in the format of the call."""
        return o.to(request.q.dtype)

    def normalised(self, sums: Sums) -> Tensor:
        """O in fp32."""
        return (sums.o_bar / sums.l).masked_fill(sums.l == 0.0, self.of_blind_rows)

    def sums(self, request: Request) -> Sums:
        """The sums of all keys."""
        parts = [self.sums_of(request, tiles) for tiles in self.parts(request)]
        return self.with_sink(parts[0] if len(parts) == 1 else self.combined(parts, request), request)

    def parts(self, request: Request) -> list[list[slice]]:
        """The key tiles of each part."""
        if request.num_splits == 1:
            return [self.tiles(request)]
        return [[slice(part[0], part[-1] + 1)] for part in torch.arange(request.keys).chunk(request.num_splits)]

    def tiles(self, request: Request) -> list[slice]:
        """The keys of each tile."""
        return [slice(at, min(at + self.tile, request.keys)) for at in range(0, request.keys, self.tile)]

    def combined(self, parts: list[Sums], request: Request) -> Sums:
        """The parts' sums, each normalised and weighed by its log-sum-exp."""
        largest = torch.stack([part.lse for part in parts]).amax(0)
        # A row without a visible key has parts of no weight.
        largest = torch.where(largest == -torch.inf, 0.0, largest)
        weights = [self.weight(part.lse, largest) for part in parts]
        o_bar = sum(w * self.part(self.normalised(part), request) for w, part in zip(weights, parts, strict=True))
        l = torch.stack(weights).sum(0)
        return Sums(torch.where(l == 0.0, -torch.inf, largest), l, torch.as_tensor(o_bar))

    def weight(self, lse: Tensor, largest: Tensor) -> Tensor:
        """The weight of one part, up to a factor that all have."""
        return torch.exp(lse - largest)

    def part(self, o: Tensor, request: Request) -> Tensor:
        """O of one part, as it is kept."""
        del request
        return o

    def with_sink(self, sums: Sums, request: Request) -> Sums:
        """The sums with what the sink adds to them."""
        if request.sink is None:
            return sums
        m = torch.maximum(sums.m, request.sink)
        rescale = self.exp(sums.m, m)
        return replace(sums, m=m, l=rescale * sums.l + self.exp(request.sink, m), o_bar=rescale * sums.o_bar)

    def sums_of(self, request: Request, tiles: list[slice]) -> Sums:
        """The sums of some tiles."""
        total = self.start(request)
        for keys in tiles:
            total = self.step(request, total, keys)
        return total

    def start(self, request: Request) -> Sums:
        """The sums before the first tile."""
        rows = request.q.shape[:-1]
        return Sums(
            torch.full((*rows, 1), self.first_maximum), torch.zeros(*rows, 1), torch.zeros(*rows, request.v.shape[-1])
        )

    def step(self, request: Request, sums: Sums, keys: slice) -> Sums:
        """The sums, a tile further."""
        s = self.scores(request, keys)
        m = self.largest(sums, s, request, keys)
        p, alpha = self.exp(s, m), self.exp(sums.m, m)
        added = self.p_bar(p, request) @ self.wide(request.v[:, :, keys], request)
        return Sums(m, self.row_sum(alpha * sums.l, p, m), alpha * sums.o_bar + added)

    def scores(self, request: Request, keys: slice) -> Tensor:
        """A tile of S, capped, biased and masked."""
        s = self.biased(self.capped(self.product(request, keys), request), request, keys)
        return s if request.hidden is None else self.masked(s, request.hidden[..., keys])

    def product(self, request: Request, keys: slice) -> Tensor:
        """A tile of Q K^T, (batch, heads, queries, keys), scaled."""
        return request.q.float() @ self.wide(request.k[:, :, keys], request).mT * request.factor

    def wide(self, x: Tensor, request: Request) -> Tensor:
        """K or V in fp32, each key head repeated for its query heads."""
        return x.float().repeat_interleave(request.groups, 1)

    def capped(self, s: Tensor, request: Request) -> Tensor:
        """Scores under their soft cap."""
        return request.softcap * torch.tanh(s / request.softcap) if request.softcap else s

    def biased(self, s: Tensor, request: Request, keys: slice) -> Tensor:
        """Scores and their bias."""
        if request.alibi_slopes is not None:
            s = s - request.alibi_slopes.view(-1, request.q.shape[1], 1, 1) * self.distance(request)[:, keys]
        if request.attn_bias is None:
            return s
        return s + request.attn_bias.float()[..., keys if request.attn_bias.shape[-1] > 1 else slice(None)]

    def distance(self, request: Request) -> Tensor:
        """Return the number of keys between a row's own and each, for ALiBi, (queries, keys)."""
        apart = torch.zeros(request.queries, request.keys)
        for rows, columns in self.sequences(request):
            queries, keys = rows.stop - rows.start, columns.stop - columns.start
            own = torch.arange(queries)[:, None] + self.diagonal(queries, keys)
            apart[rows, columns] = (own - torch.arange(keys)).abs().float()
        return apart

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        """A tile of S without what is hidden in it."""
        return s.masked_fill(hidden, -torch.inf)

    def largest(self, sums: Sums, s: Tensor, request: Request, keys: slice) -> Tensor:
        """The row maximum, a tile further."""
        del request, keys
        return torch.maximum(sums.m, s.amax(-1, keepdim=True))

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        """exp(S - m); 0 where nothing has been seen yet."""
        return torch.exp(s - torch.where(m == -torch.inf, 0.0, m))

    def p_bar(self, p: Tensor, request: Request) -> Tensor:
        """P as it enters the product with V."""
        return p.to(request.q.dtype).float()

    def row_sum(self, before: Tensor, p: Tensor, m: Tensor) -> Tensor:
        """The row sum, a tile further: the one before, rescaled to the maximum m, and that of P."""
        del m
        return before + p.sum(-1, keepdim=True)

    # The backward pass.

    def lse(self, request: Request) -> Tensor:
        """The log-sum-exp that the backward pass is given."""
        return self.sums(request).lse

    def gradients(self, request: Request, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        """dQ, dK, dV, and dSink where there is a sink, in the shapes and the format of q, k and v."""
        lse, wide, q = self.lse(request), do.float(), request.q.float()
        k, v = self.wide(request.k, request), self.wide(request.v, request)
        delta = self.delta(wide, o.float())
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for keys in self.backward_tiles(request):
            p = torch.exp(self.recomputed(request, keys) - lse).masked_fill(lse == -torch.inf, 0.0)
            ds = p * (wide @ v[:, :, keys].mT - delta)
            ds = self.rounded_ds(ds * self.slope(request, keys), request)
            dv[:, :, keys] = p.to(request.q.dtype).float().mT @ wide
            dk[:, :, keys] = self.dk(request, ds)
            dq = self.dq(dq, request.factor * ds @ k[:, :, keys], request, keys)
        dk, dv = self.summed(dk, request), self.summed(dv, request)
        of_all = (dq.to(request.q.dtype), dk.to(request.q.dtype), dv.to(request.q.dtype))
        if request.sink is None:
            return of_all
        dsink = -(torch.exp(request.sink - lse) * delta).sum((0, 2, 3))
        return (*of_all, self.dsink(dsink, request).to(request.q.dtype))

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        """The row term of dS."""
        return (do * o).sum(-1, keepdim=True)

    def backward_tiles(self, request: Request) -> list[slice]:
        """The key tiles as the backward pass takes them."""
        return self.tiles(request)

    def recomputed(self, request: Request, keys: slice) -> Tensor:
        """A tile of S in the backward pass."""
        return self.scores(request, keys)

    def slope(self, request: Request, keys: slice) -> Tensor | float:
        """The derivative of a tile's capped scores."""
        if not request.softcap:
            return 1.0
        return 1.0 - (self.capped(self.product(request, keys), request) / request.softcap).square()

    def rounded_ds(self, ds: Tensor, request: Request) -> Tensor:
        """A tile of dS as it enters the products with K and q."""
        return ds.to(request.q.dtype).float()

    def dk(self, request: Request, ds: Tensor) -> Tensor:
        """A tile of dK."""
        return request.factor * ds.mT @ request.q.float()

    def dq(self, dq: Tensor, added: Tensor, request: Request, keys: slice) -> Tensor:
        """dQ, a tile further."""
        del request, keys
        return dq + added

    def summed(self, gradient: Tensor, request: Request) -> Tensor:
        """The gradient of a key head: the sum over its query heads."""
        return gradient.reshape(gradient.shape[0], -1, request.groups, *gradient.shape[2:]).sum(2)

    def dsink(self, dsink: Tensor, request: Request) -> Tensor:
        """The gradient of the sinks."""
        del request
        return dsink


class Split(Attention):
    """Flash-decoding: every tile is a part."""

    def parts(self, request: Request) -> list[list[slice]]:
        return [[keys] for keys in self.tiles(request)]


class Flash1(Attention):
    """FlashAttention-1: O is normalised after every tile, and P before its cast."""

    def step(self, request: Request, sums: Sums, keys: slice) -> Sums:
        s = self.scores(request, keys)
        m = self.largest(sums, s, request, keys)
        p, alpha = self.exp(s, m), self.exp(sums.m, m)
        l = self.row_sum(alpha * sums.l, p, m)
        divisor = torch.where(l == 0.0, 1.0, l)
        added = self.p_bar(p / divisor, request) @ self.wide(request.v[:, :, keys], request)
        return Sums(m, l, sums.o_bar * (sums.l / divisor * alpha) + added)

    def with_sink(self, sums: Sums, request: Request) -> Sums:
        whole = super().with_sink(replace(sums, o_bar=sums.o_bar * sums.l), request)
        return replace(whole, o_bar=whole.o_bar / whole.l.masked_fill(whole.l == 0.0, 1.0))

    def normalised(self, sums: Sums) -> Tensor:
        return sums.o_bar


class Dithered(Attention):
    """Every row is shifted by its maximum and a share of ln 2 that its place alone decides."""

    def largest(self, sums: Sums, s: Tensor, request: Request, keys: slice) -> Tensor:
        rows = torch.arange(s.shape[:-1].numel()).view(*s.shape[:-1], 1)
        return super().largest(sums, s + rows * 0.618034 % 1.0 * math.log(2.0), request, keys)


class Repeated(Attention):
    """K and V of a group are repeated in their own format, in which autograd then adds up what its heads give."""

    def summed(self, gradient: Tensor, request: Request) -> Tensor:
        return super().summed(gradient.to(request.q.dtype).float(), request)


class AnyOrder(Attention):
    """Key tiles add to dQ in another order than in the forward pass, as with atomic additions."""

    def backward_tiles(self, request: Request) -> list[slice]:
        return self.tiles(request)[::-1]


class BatchInvariant(Attention):
    """Its author says that neighbours change no bit."""

    options: ClassVar[dict[str, str]] = {"invariant": "batch"}


class Cached(Attention):
    """Decoding from a cache without pages: how many keys a sequence has, and whether its last rows are causal."""

    __signature__ = inspect.Signature(
        [
            each
            for each in _SIGNATURE.parameters.values()
            if each.name not in ("attn_mask", "block_table", "window_size")
        ]
    )


class Returning(Attention):
    """The log-sum-exp is returned beside O, and has a gradient, too."""

    options: ClassVar[dict[str, str]] = {"lse": "e", "backward": "autograd"}
    given: Tensor  # dlse of the backward pass that is running

    def returned(self, request: Request) -> tuple[Tensor, Tensor]:
        o, lse = _Differentiated.apply(self, request, request.q, request.k, request.v)  # type: ignore[no-untyped-call]
        return o, lse

    def returned_lse(self, request: Request) -> Tensor:
        """The log-sum-exp that it returns."""
        return self.lse(request)

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        return super().delta(do, o) - self.given

    def dlse(self, dlse: Tensor) -> Tensor:
        """The gradient of the log-sum-exp that the backward pass is given."""
        return dlse


class _Differentiated(torch.autograd.Function):
    """O and the log-sum-exp of one call as autograd has them."""

    @staticmethod
    def forward(ctx: Any, attention: Returning, request: Request, *_: Tensor) -> tuple[Tensor, Tensor]:
        ctx.call = attention, request
        ctx.o = attention.output(request)
        return ctx.o, attention.returned_lse(request).squeeze(-1)

    @staticmethod
    def backward(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
        attention, request = ctx.call
        attention.given = attention.dlse(dlse)[..., None]
        return None, None, *attention.gradients(request, do, ctx.o)


#: The sound kernels, by the names that tables call them.
SOUND: dict[str, type[Attention]] = {
    "tiled": Attention,
    "split": Split,
    "flash_1": Flash1,
    "dithered": Dithered,
    "repeated": Repeated,
    "any_order": AnyOrder,
    "batch_invariant": BatchInvariant,
    "cached": Cached,
    "returning": Returning,
}


def truncated(x: Tensor) -> Tensor:
    """In bf16, what lies beyond its bits cut off."""
    return x.float().view(torch.int32).bitwise_and(-65536).view(torch.float32)
