"""Users' kernels that take what calls ask beyond softmax(Q K^T) V, sound ones and such as are wrong in one step."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tiebreak.defects.forward import Split
from tiebreak.defects.tiled import CallRequest, Sums, Tiled

_PAIR = (-1, -1)
_TAKES = "value_dim hidden_nan"
_OF = {"twin": "featured", "takes": _TAKES}
_OF_SPLIT = {"twin": "featured_split", "takes": _TAKES}


@dataclass(frozen=True)
class FeaturedRequest(CallRequest):
    """One call, and what it asks more."""

    window_size: tuple[int, int] = _PAIR  # keys before a query's own and behind it; -1: all
    softcap: float = 0.0  # 0: none
    sinks: Tensor | None = None  # (heads,)
    attn_bias: Tensor | None = None  # broadcastable to S
    cu_seqlens_q: Tensor | None = None  # where packed sequences begin, and the end
    cu_seqlens_k: Tensor | None = None
    base_blockmask: Tensor | None = None  # (batch or 1, heads or 1, blocks of queries, of keys), True where they see
    block_size: tuple[int, int] = (64, 64)
    block_table: Tensor | None = None  # (batch, pages of a sequence)
    cache_seqlens: Tensor | None = None  # (batch,), of paged keys
    k_descale: Tensor | None = None  # (batch, key heads)
    v_descale: Tensor | None = None

    @property
    def sink(self) -> Tensor | None:
        """The sinks as a column of S."""
        return None if self.sinks is None else self.sinks.float()[:, None, None]

    def with_sinks(self, factor: float) -> "FeaturedRequest":
        """The same call, its sinks times a number."""
        return self if self.sinks is None else replace(self, sinks=self.sinks * factor)

    @cached_property
    def sequences(self) -> list[tuple[slice, slice]]:
        """Rows and columns of each packed sequence; of a call without any, all."""
        if self.cu_seqlens_q is None or self.cu_seqlens_k is None:
            return [(slice(0, self.queries), slice(0, self.keys))]
        both = (pairwise(begins.tolist()) for begins in (self.cu_seqlens_q, self.cu_seqlens_k))
        return [(slice(*rows), slice(*columns)) for rows, columns in zip(*both, strict=True)]


_NAMES = {field.name for field in fields(FeaturedRequest)} - {"q", "k", "v", "causal", "scale", "mask"}


class Featured(Tiled, takes=_TAKES):
    """FlashAttention-2 with all that calls ask; what no row sees is zeros, whatever was there."""

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
        window_size: tuple[int, int] = _PAIR,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        attn_bias: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        base_blockmask: Tensor | None = None,
        block_size: tuple[int, int] = (64, 64),
        block_table: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        asked = {name: value for name, value in locals().items() if name in _NAMES}
        return self.returned(self.asking(self.request(q, k, v, causal, scale, attn_mask), asked))

    def backward(  # type: ignore[override]  # called by keyword alone
        self, do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, **asked: Any
    ) -> tuple[Tensor, ...]:
        """dQ, dK, dV and, of a call with a sink, dSink."""
        plain = self.request(q, k, v, *(asked.pop(name, None) for name in ("causal", "scale", "attn_mask")))
        asked.pop("enable_gqa", None)
        return self.gradients(self.asking(plain, asked), do, o)

    def asking(self, plain: CallRequest, asked: dict[str, Any]) -> "FeaturedRequest":
        """The call with what it asks, K and V as they are in the cache."""
        request = FeaturedRequest(**vars(plain), **asked)
        if request.block_table is not None:
            request = replace(request, k=self.gathered(request, request.k), v=self.gathered(request, request.v))
        if request.k_descale is not None and request.v_descale is not None:
            k = self.descaled(request.k, request.k_descale)
            request = replace(request, k=k, v=self.descaled(request.v, request.v_descale))
        return self.guarded(request)

    def gathered(self, request: FeaturedRequest, pool: Tensor) -> Tensor:
        """K or V of every sequence, (batch, key heads, keys, d), from (pages, key heads, page, d)."""
        pages = pool[self.table(request).long()].transpose(1, 2)
        return pages.flatten(2, 3)[:, :, : self.cached(request)]

    def table(self, request: FeaturedRequest) -> Tensor:
        """Pages of every sequence."""
        assert request.block_table is not None
        return request.block_table

    def cached(self, request: FeaturedRequest) -> int:
        """Keys of a sequence in the cache."""
        assert request.cache_seqlens is not None
        return int(request.cache_seqlens.max())

    def descaled(self, x: Tensor, factors: Tensor) -> Tensor:
        """K or V from 8 bits."""
        return x.float() * factors[..., None, None]

    def guarded(self, request: FeaturedRequest) -> FeaturedRequest:
        """Keys that no row sees are zeros."""
        hidden = self.hidden(request)
        if hidden is None:
            return request
        unseen = hidden.all(-2).all(1)[:, None, :, None]
        return replace(request, k=request.k.masked_fill(unseen, 0.0), v=request.v.masked_fill(unseen, 0.0))

    def hidden(self, request: CallRequest) -> Tensor | None:
        assert isinstance(request, FeaturedRequest)
        hidden = torch.ones(1, 1, request.queries, request.keys, dtype=torch.bool)
        for rows, columns in self.sequences(request):
            hidden[:, :, rows, columns] = self.outside(request, rows.stop - rows.start, columns.stop - columns.start)
        for mask in self.masks(request):
            hidden = hidden | mask
        return hidden if hidden.any() else None

    def sequences(self, request: FeaturedRequest) -> list[tuple[slice, slice]]:
        """Rows and columns of each packed sequence."""
        return request.sequences

    def sides(self, request: FeaturedRequest) -> tuple[int, int]:
        """Keys before a query's own and behind it that it sees."""
        left, right = (2**31 if side < 0 else side for side in request.window_size)
        return left, 0 if request.causal else right

    def outside(self, request: FeaturedRequest, queries: int, keys: int) -> Tensor:
        """Which keys of one sequence lie outside of the window."""
        left, right = self.sides(request)
        apart = torch.arange(keys) - torch.arange(queries)[:, None] - self.diagonal(queries, keys)
        return (apart < -left) | (apart > right)

    def diagonal(self, queries: int, keys: int) -> int:
        """The first query's own key."""
        return keys - queries

    def masks(self, request: FeaturedRequest) -> Iterator[Tensor]:
        """What else hides keys."""
        if request.mask is not None:
            yield ~request.mask
        if request.base_blockmask is not None:
            rows = (~request.base_blockmask).repeat_interleave(request.block_size[0], 2)[:, :, : request.queries]
            yield rows.repeat_interleave(request.block_size[1], 3)[..., : request.keys]

    def scores(self, request: CallRequest, keys: slice) -> Tensor:
        assert isinstance(request, FeaturedRequest)
        s, hidden = self.biased(self.capped(self.product(request, keys), request), request, keys), self.hidden(request)
        return s if hidden is None else self.masked(s, hidden[..., keys])

    def capped(self, s: Tensor, request: FeaturedRequest) -> Tensor:
        """Scores under their soft cap."""
        return request.softcap * torch.tanh(s / request.softcap) if request.softcap else s

    def biased(self, s: Tensor, request: FeaturedRequest, keys: slice) -> Tensor:
        """Scores and their bias."""
        if request.attn_bias is None:
            return s
        return s + request.attn_bias.float()[..., keys if request.attn_bias.shape[-1] > 1 else slice(None)]

    def start(self, request: CallRequest) -> Sums:
        return replace(super().start(request), o_bar=torch.zeros(*request.q.shape[:-1], request.v.shape[-1]))

    def sums(self, request: CallRequest) -> Sums:
        assert isinstance(request, FeaturedRequest)
        return self.with_sink(super().sums(request), request)

    def with_sink(self, sums: Sums, request: FeaturedRequest) -> Sums:
        """The sums with what the sink adds to them."""
        if request.sink is None:
            return sums
        m = torch.maximum(sums.m, request.sink)
        rescale = self.exp(sums.m, m)
        return replace(sums, m=m, l=rescale * sums.l + self.exp(request.sink, m), o_bar=rescale * sums.o_bar)

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(request, FeaturedRequest)
        if request.sink is None:
            return super().gradients(request, do, o)
        delta, weight = self.delta(do.float(), o.float()), torch.exp(request.sink - self.lse(request))
        return (*super().gradients(request, do, o), self.dsink(-(weight * delta).sum((0, 2, 3)), request))

    def dsink(self, dsink: Tensor, request: FeaturedRequest) -> Tensor:
        """The gradient of the sinks."""
        return dsink.to(request.q.dtype)

    def of_scores(self, ds: Tensor, request: CallRequest, keys: slice) -> Tensor:
        assert isinstance(request, FeaturedRequest)
        if not request.softcap:
            return ds
        capped = self.capped(self.product(request, keys), request)
        return ds * (1.0 - (capped / request.softcap).square())


class FeaturedSplit(Featured, Split, takes=_TAKES):
    """The same as flash-decoding; the sink is put to what the splits come to."""


class WindowOffByOne(Featured, bug="huggingface/transformers/issues/39408", **_OF):
    """A window's number of keys, a query's own among them, is taken for those before it: one key too many."""

    def sides(self, request: FeaturedRequest) -> tuple[int, int]:
        left, right = super().sides(request)
        return left + 1, right


class WindowCutShort(Featured, bug="lightseekorg/tokenspeed/pull/578", **_OF):
    """The keys before a query are taken for all that a window has, its own among them: one key too few."""

    def sides(self, request: FeaturedRequest) -> tuple[int, int]:
        left, right = super().sides(request)
        return max(left - 1, 0), right


class WindowOutsideRead(Featured, bug="vllm-project/vllm/pull/30887", **_OF):
    """V outside of the window is read, and multiplied by a P of 0."""

    def guarded(self, request: FeaturedRequest) -> FeaturedRequest:
        return request if request.window_size != _PAIR else super().guarded(request)


class SoftCapNotPlanned(Featured, bug="sgl-project/sglang/issues/33915", **_OF):
    """The cap is given where it is not read: scores stay as they are."""

    def capped(self, s: Tensor, request: FeaturedRequest) -> Tensor:
        return s


class WindowBothWays(Featured, bug="ModelTC/LightLLM/pull/1311", **_OF):
    """A window reaches as far behind a query as before it."""

    def sides(self, request: FeaturedRequest) -> tuple[int, int]:
        left, right = super().sides(request)
        return left, right if request.window_size == _PAIR else left


class SoftCapAfterMask(Featured, bug="Dao-AILab/flash-attention/pull/1025", **_OF):
    """Masked scores are capped too: -Inf becomes the cap's negative, and hidden keys take part."""

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        return s.masked_fill(hidden, -self.cap if self.cap else -torch.inf)

    def scores(self, request: CallRequest, keys: slice) -> Tensor:
        assert isinstance(request, FeaturedRequest)
        self.cap = request.softcap
        return super().scores(request, keys)


class SoftCapWithoutDivision(Featured, bug="Dao-AILab/flash-attention/pull/2402", **_OF):
    """The hyperbolic tangent is of the scores themselves, not of the scores over the cap."""

    def capped(self, s: Tensor, request: FeaturedRequest) -> Tensor:
        return request.softcap * torch.tanh(s) if request.softcap else s


class SoftCapWithoutSlope(Featured, bug="Dao-AILab/flash-attention/pull/1033", **_OF):
    """The backward pass takes capped scores for the product."""

    def of_scores(self, ds: Tensor, request: CallRequest, keys: slice) -> Tensor:
        return ds


class BlocksForwardAlone(Featured, bug="Dao-AILab/flash-attention/issues/2623", **_OF):
    """The backward pass goes by other blocks than the forward pass: here by none."""

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        assert isinstance(request, FeaturedRequest)
        return super().recomputed(replace(request, base_blockmask=None), keys, lse)


class BlocksCounted(Featured, bug="pytorch/pytorch/pull/185687", **_OF):
    """A row's list of blocks is as wide as the row has blocks, and so, it is thought, are the keys."""

    def masks(self, request: FeaturedRequest) -> Iterator[Tensor]:
        if request.base_blockmask is not None:
            blocks = request.base_blockmask.clone()
            blocks[..., int(blocks.sum(-1).max()) :] = False
            request = replace(request, base_blockmask=blocks)
        yield from super().masks(request)


class SinkInO(Featured, bug="ROCm/rocm-libraries/pull/12229", **_OF):
    """The sink has a V: that of the first key."""

    def with_sink(self, sums: Sums, request: FeaturedRequest) -> Sums:
        total = super().with_sink(sums, request)
        if request.sink is None:
            return total
        weight = self.exp(request.sink, total.m)
        return replace(total, o_bar=total.o_bar + weight * request.wide_v[:, :, :1])


class SinkTwice(Featured, bug="ROCm/rocm-libraries/issues/12227", **_OF):
    """Two splits add the sink."""

    def with_sink(self, sums: Sums, request: FeaturedRequest) -> Sums:
        return super().with_sink(super().with_sink(sums, request), request)


class SinkScaled(Featured, bug="ROCm/rocm-libraries/pull/12229", **_OF):
    """The sink, which is a logit, is scaled as if it were a product."""

    def with_sink(self, sums: Sums, request: FeaturedRequest) -> Sums:
        return super().with_sink(sums, request.with_sinks(request.scale))


class SinkDropped(Featured, bug="NVIDIA/TransformerEngine/pull/3551", **_OF):
    """One way through the library forgets the sink, and its gradient is 0."""

    def with_sink(self, sums: Sums, request: FeaturedRequest) -> Sums:
        return sums

    def dsink(self, dsink: Tensor, request: FeaturedRequest) -> Tensor:
        return torch.zeros_like(super().dsink(dsink, request))


class SinkGradientOfOneEntry(Featured, bug="NVIDIA/TransformerEngine/issues/3249", **_OF):
    """The gradient of the sink is that of the last row alone."""

    def dsink(self, dsink: Tensor, request: FeaturedRequest) -> Tensor:
        return super().dsink(dsink / request.queries, request)


class SinkRescaleDetached(Featured, bug="pytorch/torchtitan/pull/4796", **_OF):
    """O is multiplied by what its keys weigh beside the sink, and gradients do not pass through that weight."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        assert isinstance(request, FeaturedRequest)
        dq, dk, dv, *others = super().gradients(request, do, o)
        if request.sink is None:
            return dq, dk, dv
        self.weight = 1.0 - torch.exp(request.sink - self.lse(request))
        dq, dk, *_ = super().gradients(request, do, o)
        self.weight = None
        return dq, dk, dv, *others

    weight: Tensor | None = None

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        delta = super().delta(do, o)
        return delta if self.weight is None else delta / self.weight


class BiasScaled(Featured, bug="tenstorrent/tt-metal/pull/56406", **_OF):
    """The bias is added before the scale, and scaled with the product."""

    def biased(self, s: Tensor, request: FeaturedRequest, keys: slice) -> Tensor:
        return super().biased(s / request.scale, request, keys) * request.scale


class LengthsShifted(Featured, bug="PrimeIntellect-ai/prime-rl/pull/2392", **_OF):
    """Where keys begin is counted from another token: a sequence lacks its first, and has the next one's."""

    def sequences(self, request: FeaturedRequest) -> list[tuple[slice, slice]]:
        shifted = super().sequences(request)
        if request.cu_seqlens_k is None:
            return shifted
        last = request.keys
        return [(rows, slice(min(cols.start + 1, last), min(cols.stop + 1, last))) for rows, cols in shifted]


class OneBoundary(Featured, bug="Tencent-Hunyuan/HunyuanVideo/pull/310", **_OF):
    """Of where sequences end the first is read alone: all behind it is one sequence."""

    def sequences(self, request: FeaturedRequest) -> list[tuple[slice, slice]]:
        (rows, columns), *others = super().sequences(request)
        behind = slice(rows.stop, request.queries), slice(columns.stop, request.keys)
        return [(rows, columns), *([behind] if others else [])]


class LengthsIgnored(Featured, bug="huggingface/transformers/pull/46634", **_OF):
    """Packed sequences see each other."""

    def sequences(self, request: FeaturedRequest) -> list[tuple[slice, slice]]:
        return [(slice(0, request.queries), slice(0, request.keys))]


class GradientsUnwritten(Featured, bug="pytorch/pytorch/issues/176793", **_OF):
    """Gradients of keys behind a sequence's last are not written: what was in memory is NaN."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv, *others = super().gradients(request, do, o)
        if request.mask is None:
            return (dq, dk, dv, *others)
        unseen = ~request.mask.any(-2).any(1)[:, None, :, None]
        return (dq, dk.masked_fill(unseen, torch.nan), dv.masked_fill(unseen, torch.nan), *others)


class PageTailRead(Featured, bug="Dao-AILab/flash-attention/issues/2374", **_OF):
    """The last page is read to its end, past the last key."""

    def cached(self, request: FeaturedRequest) -> int:
        page = self.page
        return -(-super().cached(request) // page) * page

    def gathered(self, request: FeaturedRequest, pool: Tensor) -> Tensor:
        self.page = pool.shape[2]
        return super().gathered(request, pool)


class PagesInARow(Featured, bug="hw-native-sys/pypto/pull/470", **_OF):
    """Pages are read two at a time, as if the second lay behind the first."""

    def table(self, request: FeaturedRequest) -> Tensor:
        table = super().table(request).clone()
        second = table[:, 1::2]
        second.copy_(table[:, ::2][:, : second.shape[1]] + 1)
        return table.clamp(max=int(super().table(request).max()))


class DescaleDropped(Featured, bug="vllm-project/vllm/pull/42580", **_OF):
    """K and V in 8 bits are taken for what they are without their factors."""

    def descaled(self, x: Tensor, factors: Tensor) -> Tensor:
        return x.float()


class DescaleOfK(Featured, bug="sgl-project/sglang/pull/26852", **_OF):
    """V is descaled with the factors of K."""

    def asking(self, plain: CallRequest, asked: dict[str, Any]) -> FeaturedRequest:
        factors = asked.get("k_descale")
        return super().asking(plain, asked if factors is None else {**asked, "v_descale": factors})


class ValueTilesAtZero(Featured, bug="fla-org/flash-linear-attention/pull/1031", **_OF):
    """Every tile of V's columns writes its O to the first."""

    def normalised(self, sums: Sums) -> Tensor:
        o = super().normalised(sums)
        last = (o.shape[-1] - 1) // self.tile * self.tile
        written = torch.zeros_like(o)
        written[..., : o.shape[-1] - last] = o[..., last:]
        return written


class DvOfTheOtherDimension(Featured, bug="Dao-AILab/flash-attention/issues/2552", **_OF):
    """dV is written with the head dimension of q between its rows."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv, *others = super().gradients(request, do, o)
        d, d_v = request.q.shape[-1], dv.shape[-1]
        rows = torch.nn.functional.pad(dv, (0, max(d - d_v, 0)))
        return (dq, dk, rows.flatten(-2)[..., : dv.shape[-2] * d_v].reshape(dv.shape), *others)


class LseExponential(Featured, bug="NVIDIA/cudnn-frontend/issues/1072", **_OF):
    """The backward pass divides exp(S) by exp(log-sum-exp): 0 by 0 where that is below -104."""

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        return (torch.exp(self.scores(request, keys)) / torch.exp(lse)).masked_fill(lse == -torch.inf, 0.0)


class SplitsUnshifted(FeaturedSplit, bug="SHI-Labs/NATTEN/pull/202", **_OF_SPLIT):
    """Splits weigh exp(log-sum-exp), which is 0 for all where scores are very low."""

    def weight(self, lse: Tensor, largest: Tensor) -> Tensor:
        return torch.exp(lse)


class SplitsRoundedDown(FeaturedSplit, bug="tile-ai/TileOPs/pull/101", **_OF_SPLIT):
    """A split has the number of keys over that of splits, rounded down: the last keys are in none."""

    def tiles(self, request: CallRequest) -> list[slice]:
        splits = 3
        size = request.keys // splits
        return [slice(at * size, (at + 1) * size) for at in range(splits)] if size else super().tiles(request)
