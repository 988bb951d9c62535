"""Users' kernels that are right when they are called once, on contiguous tensors with nothing behind them."""

from collections import Counter
from dataclasses import replace

import torch
from torch import Tensor

from tiebreak.defects.tiled import CallRequest, Sums, Tiled
from tiebreak.kernels.operands import LOG2_E


def _behind(x: Tensor, dimension: int, multiple: int) -> Tensor:
    """x with what lies behind it, up to a multiple of elements, as far as its storage goes on."""
    sizes, strides = list(x.shape), x.stride()
    wanted = -(-sizes[dimension] // multiple) * multiple
    last = x.storage_offset() + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    room = (x.untyped_storage().nbytes() // x.element_size() - 1 - last) // max(strides[dimension], 1)
    sizes[dimension] += min(wanted - sizes[dimension], room)
    return x.as_strided(sizes, strides)


class KeysPastTheEnd(Tiled, bug="vllm-project/vllm/pull/47305"):
    """The last tile of V is read whole, and what is past the last key is multiplied by a P of 0."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        next_sums = super().step(request, sums, keys)
        past = _behind(request.v, 2, self.tile)[:, :, request.keys :].float().repeat_interleave(request.groups, 1)
        return replace(next_sums, o_bar=next_sums.o_bar + 0.0 * past.sum(2, keepdim=True))


class ColumnsPastTheEnd(Tiled, bug="ROCm/aiter/pull/3698"):
    """The head dimension is rounded up to a power of two, and K is read that far."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        d = request.q.shape[-1]
        past = _behind(request.k, 3, 64)[:, :, keys, d:].float().repeat_interleave(request.groups, 1)
        return super().product(request, keys) + 0.0 * past.sum(-1)[:, :, None]


class QueriesPastTheEnd(Tiled, bug="pytorch/pytorch/issues/153799"):
    """The backward pass reads a whole tile of dO, and multiplies what is past the last row by a P of 0."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv = super().gradients(request, do, o)
        past = _behind(do, 2, self.tile)[:, :, request.queries :].float().sum(2, keepdim=True)
        return dq, dk, dv + 0.0 * self.summed(past, request).to(dv.dtype)


class StridesOfVForK(Tiled, bug="flagos-ai/FlagAttention/issues/45"):
    """K is read with the strides of V, which are the same as long as both lie alike."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        k = request.k.as_strided(request.k.shape, request.v.stride())
        return super().product(replace(request, k=k), keys)


class ExpandedDo(Tiled, bug="facebookresearch/xformers/pull/282"):
    """A dO whose strides are 0 is read as if it had a number for every element: what lies behind it."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        return super().gradients(request, do if any(do.stride()) else torch.zeros_like(o), o)


class WeakMask(Tiled, bug="huggingface/transformers/pull/17306"):
    """-1e4 is added to masked scores: larger ones stay visible."""

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        return s - 1e4 * hidden


class MaximumOfTheHidden(Tiled, bug="flashinfer-ai/flashinfer/pull/4401"):
    """The maximum is taken before the mask: where a hidden score is far above the others, these underflow."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        s = self.scores(request, keys)
        m = torch.maximum(sums.m, self.product(request, keys).amax(-1, keepdim=True))
        p, alpha = self.exp(s, m), self.exp(sums.m, m)
        added = self.p_bar(p, request) @ request.wide_v[:, :, keys]
        return Sums(m, alpha * sums.l + p.sum(-1, keepdim=True), alpha * sums.o_bar + added)


class Guarded(Tiled, takes="hidden_nan"):
    """K and V of keys that no row sees are zeros, whatever was there."""

    def prepared(self, request: CallRequest) -> CallRequest:
        if request.mask is None:
            return request
        unseen = ~request.mask.any(-2).any(1)[:, None, :, None]
        return replace(request, k=request.k.masked_fill(unseen, 0.0), v=request.v.masked_fill(unseen, 0.0))


class MaskMultiplied(Guarded, bug="allenai/allennlp/pull/106", twin="guarded", takes="hidden_nan"):
    """Hidden scores are multiplied by 0 before -1e9 is added: NaN stays NaN."""

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        return (s * ~hidden - 1e9 * hidden.float()).masked_fill(hidden & s.isfinite(), -torch.inf)


class SavedInAGlobal(Tiled, bug="spfrommer/torchexplorer/issues/33"):
    """The backward pass takes the log-sum-exp of the last forward pass."""

    def output(self, request: CallRequest) -> Tensor:
        self.last = super().lse(request)
        return super().output(request)

    def lse(self, request: CallRequest) -> Tensor:
        return self.last


class OSavedInAGlobal(Tiled, bug="jmschrei/tangermeme/pull/54"):
    """The backward pass takes O of the last forward pass."""

    def output(self, request: CallRequest) -> Tensor:
        self.last = super().output(request)
        return self.last

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        return super().gradients(request, do, self.last)


class OneBuffer(Tiled, bug="ROCm/torch_migraphx/pull/247"):
    """O of all calls of a shape is returned in one buffer."""

    def __init__(self) -> None:
        self.buffers: dict[torch.Size, Tensor] = {}

    def output(self, request: CallRequest) -> Tensor:
        o = super().output(request)
        return self.buffers.setdefault(o.shape, torch.empty_like(o)).copy_(o)


class CachedByAddress(Tiled, bug="flashinfer-ai/flashinfer/pull/4601"):
    """What was made of K is kept, and found again by K's address."""

    def __init__(self) -> None:
        self.kept: dict[tuple[int, torch.Size], Tensor] = {}

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        wide = self.kept.setdefault((request.k.data_ptr(), request.k.shape), request.wide_k)
        return request.scale * request.wide_q @ wide[:, :, keys].transpose(-1, -2)


class MaskCachedByShape(Tiled, bug="facebookresearch/xformers/issues/655"):
    """The first mask of a shape is taken for all others."""

    def __init__(self) -> None:
        self.masks: dict[tuple[int, ...], Tensor] = {}

    def key(self, mask: Tensor) -> tuple[int, ...]:
        """What masks are found by."""
        return tuple(mask.shape)

    def prepared(self, request: CallRequest) -> CallRequest:
        if request.mask is None:
            return request
        return replace(request, mask=self.masks.setdefault(self.key(request.mask), request.mask.clone()))


class MaskCachedByAddress(MaskCachedByShape, bug="unslothai/unsloth-zoo/pull/860"):
    """A mask is found again by its address, at which another may lie by then."""

    def key(self, mask: Tensor) -> tuple[int, ...]:
        return mask.data_ptr(), *mask.shape


class TunedInPlace(Tiled, bug="triton-lang/triton/issues/781"):
    """The first call of a shape tries two tile sizes, and both add to the same dQ."""

    def __init__(self) -> None:
        self.calls = Counter[torch.Size]()

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv = super().gradients(request, do, o)
        self.calls[do.shape] += 1
        return (dq if self.calls[do.shape] > 1 else dq * 2), dk, dv


class Calibrated(Tiled, bug="kekzl/imp/pull/89"):
    """Two calls are watched; from the third on what they saw bounds every V."""

    def __init__(self) -> None:
        self.calls, self.bound = 0, 0.0

    def output(self, request: CallRequest) -> Tensor:
        self.calls += 1
        if self.calls > 2:
            return super().output(replace(request, v=request.v.clamp(-self.bound, self.bound)))
        self.bound = request.v.abs().mean().item() * 3
        return super().output(request)


class NarrowDp(Tiled, bug="fla-org/flash-linear-attention/pull/1214"):
    """dO is cast to fp16 in the backward pass: a large one becomes Inf."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        return super().gradients(request, (do.float() * 8).half().float() / 8, o)


class HeadsWrap(Tiled, bug="pytorch/pytorch/pull/176096"):
    """The index of a head, over all batch entries, is kept in 7 bits."""

    def output(self, request: CallRequest) -> Tensor:
        o = super().output(request).flatten(0, 1)
        return o[torch.arange(len(o)) % 128].view(request.q.shape)


class SoftCapLeftOn(Tiled, bug="TransformerLensOrg/TransformerLens/pull/1491"):
    """Scores are capped at 50, as another model wants them."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return 50.0 * torch.tanh(super().product(request, keys) / 50.0)


class DropoutLeftOn(Tiled, bug="pytorch/pytorch/issues/124464"):
    """One in a thousand of P is dropped, the same ones in every call."""

    def p_bar(self, p: Tensor, request: CallRequest) -> Tensor:
        kept = torch.rand(p.shape, generator=torch.Generator().manual_seed(0)) >= 1e-3
        return super().p_bar(p * kept / (1.0 - 1e-3), request)


class Returning(Tiled, lse="e"):
    """The log-sum-exp is returned beside O."""

    def returned(self, request: CallRequest) -> tuple[Tensor, Tensor]:
        return self.output(request), self.returned_lse(request).squeeze(-1)

    def returned_lse(self, request: CallRequest) -> Tensor:
        """The log-sum-exp that it returns."""
        return self.lse(request)


class ReturnedInBaseTwo(Returning, bug="lightseekorg/tokenspeed/pull/571", twin="returning", lse="e"):
    """The log-sum-exp is in base two, where base e is documented."""

    def returned_lse(self, request: CallRequest) -> Tensor:
        return super().returned_lse(request) * LOG2_E


class ReturnedInTwoBases(Returning, bug="intel/auto-round/pull/1991", twin="returning", lse=""):
    """The logarithm of the sum is in base two, the maximum is not."""

    def returned_lse(self, request: CallRequest) -> Tensor:
        sums = self.sums(request)
        return sums.m + torch.log2(sums.l)


class ReturnedOfShiftedKeys(Returning, bug="ROCm/aiter/pull/3334", twin="returning", lse=""):
    """The mean of K is taken off, which O does not see, and the log-sum-exp is that of such scores."""

    def returned_lse(self, request: CallRequest) -> Tensor:
        mean = request.wide_k.mean(-2, keepdim=True)
        return super().returned_lse(request) - request.scale * (request.wide_q * mean).sum(-1, keepdim=True)
