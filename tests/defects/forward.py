"""Users' kernels whose forward pass is wrong, each in one step."""

import math
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.defects.tiled import CallRequest, Sums, Tiled, by_group, truncated
from tiebreak.kernels.formats import FP16
from tiebreak.kernels.operands import LOG2_E
from tiebreak.matrix.questions.placements import read_as_contiguous


class CausalUpperLeft(Tiled, bug="NVIDIA/cutlass/issues/2336"):
    """Query i sees keys 0 .. i, however many keys there are."""

    def first_hidden(self, request: CallRequest) -> int:
        return 1


class CausalStrict(Tiled, bug="pbloem/former/issues/10"):
    """A query does not see its own key."""

    def first_hidden(self, request: CallRequest) -> int:
        return super().first_hidden(request) - 1


class CausalSkipped(Tiled, bug="facebookresearch/xformers/issues/103"):
    """The causal mask is merged into a given mask, and there is none."""

    def hidden(self, request: CallRequest) -> Tensor | None:
        return None if request.mask is None else super().hidden(request)


class PaddingIgnored(Tiled, bug="huggingface/diffusers/issues/8886"):
    """The mask is not passed on."""

    def hidden(self, request: CallRequest) -> Tensor | None:
        return super().hidden(replace(request, mask=None))


class TinyMaskValue(Tiled, bug="Shujun-He/RibonanzaNet/issues/5"):
    """Masked scores are filled with -1e-9 where -1e9 was meant."""

    fill = -1e-9

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        return s.masked_fill(hidden, self.fill)


class FiniteMaskValue(TinyMaskValue, bug="TransformerLensOrg/TransformerLens/issues/318"):
    """Masked scores are filled with -1e5: a row with nothing else sees them all."""

    fill = -1e5


class AddedMask(Tiled, bug="pytorch/pytorch/issues/101967", twin="guarded", takes="hidden_nan"):
    """The mask is added to the scores: what is NaN at a masked key stays NaN."""

    def masked(self, s: Tensor, hidden: Tensor) -> Tensor:
        return s + torch.zeros(hidden.shape).masked_fill(hidden, -torch.inf)


class BlindRowsNan(Tiled, bug="pytorch/pytorch/issues/103963"):
    """0 / 0 in a row without a visible key."""

    def normalised(self, sums: Sums) -> Tensor:
        return sums.o_bar / sums.l


class BlindRowsMean(Tiled, bug="ml-explore/mlx/issues/2395"):
    """Softmax of a row of equal, very low scores: the mean of V."""

    def output(self, request: CallRequest) -> Tensor:
        o, hidden = super().output(request), self.hidden(request)
        if hidden is None:
            return o
        mean = request.wide_v.mean(-2, keepdim=True).to(o.dtype)
        return torch.where(hidden.all(-1, keepdim=True), mean, o)


class BlindRowsUnwritten(Tiled, bug="vllm-project/vllm/pull/19784"):
    """Rows without a visible key are skipped, and what the buffer held is returned."""

    def normalised(self, sums: Sums) -> Tensor:
        return super().normalised(sums).masked_fill(sums.m == -torch.inf, 1.0)


class ScaleIgnored(Tiled, bug="tenstorrent/tt-xla/issues/2342"):
    """1 / sqrt(d), whatever the caller says."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(replace(request, scale=request.q.shape[-1] ** -0.5), keys)


class ScaledTwice(Tiled, bug="huggingface/transformers/pull/38290"):
    """Q is scaled, and the scores once more."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(request, keys) * request.scale


class ScaleDivides(Tiled, bug="esceptico/perceiver-io/issues/9"):
    """Scores are divided by what they are to be multiplied by."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(replace(request, scale=1.0 / request.scale), keys)


class ScaledAfterSoftmax(Tiled, bug="FrancescoSaverioZuppichini/ViT/issues/2"):
    """The softmax is scaled, not the scores."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(replace(request, scale=1.0), keys)

    def output(self, request: CallRequest) -> Tensor:
        return self.stored(self.normalised(self.sums(request)) * request.scale, request)


class ScaleGrows(Tiled, bug="flagos-ai/FlagGems/pull/424"):
    """log2(e) is multiplied into the scale in every tile anew."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(request, keys) * math.pow(LOG2_E, keys.start // self.tile)


class _TiledHeads(CallRequest):
    """A call whose key heads are taken in turn, not in groups."""

    @cached_property
    def wide_k(self) -> Tensor:
        return self.k.float().repeat(1, self.groups, 1, 1)

    @cached_property
    def wide_v(self) -> Tensor:
        return self.v.float().repeat(1, self.groups, 1, 1)


class HeadsTiled(Tiled, bug="ekzhang/jax-js/pull/180"):
    """Key heads are tiled over the query heads, not repeated."""

    def prepared(self, request: CallRequest) -> CallRequest:
        return _TiledHeads(**vars(request))

    def summed(self, gradient: Tensor, request: CallRequest) -> Tensor:
        return by_group(gradient, gradient.shape[1] // request.groups).sum(1)


class SixtyFourDimensions(Tiled, bug="triton-lang/triton/issues/621"):
    """The head dimension is written into the kernel."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(replace(request, q=request.q[..., :64], k=request.k[..., :64]), keys)


class OddDimensionsDropped(Tiled, bug="66RING/tiny-flash-attention/issues/12"):
    """Q K^T takes the head dimension in steps of 16, and leaves what is left over."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        whole = request.q.shape[-1] // 16 * 16
        return super().product(replace(request, q=request.q[..., :whole], k=request.k[..., :whole]), keys)


class LastTileFilledUp(Tiled, bug="flashinfer-ai/flashinfer/pull/5090"):
    """Keys past the end are zeros with a score of 0, and are not masked."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        next_sums = super().step(request, sums, keys)
        past = self.tile - (keys.stop - keys.start)
        if not past:
            return next_sums
        return replace(next_sums, l=next_sums.l + past * self.exp(torch.zeros_like(next_sums.m), next_sums.m))


class LastTileDropped(Tiled, bug="jax-ml/jax/issues/27224"):
    """Keys past the last whole tile are left out."""

    def tiles(self, request: CallRequest) -> list[slice]:
        return [keys for keys in super().tiles(request) if keys.stop - keys.start == self.tile]


class StridesOfVIgnored(Tiled, bug="flagos-ai/FlagGems/issues/5896"):
    """V is read as if it were contiguous."""

    def prepared(self, request: CallRequest) -> CallRequest:
        return replace(request, v=read_as_contiguous(request.v))


class BatchStrideZero(Tiled, bug="vllm-project/flash-attention/pull/176"):
    """What is combined for every batch entry is written to the first."""

    def output(self, request: CallRequest) -> Tensor:
        o = super().output(request)
        return torch.cat([o[-1:], torch.zeros_like(o[1:])])


class Split(Tiled):
    """Flash-decoding: tiles are processed apart, each normalised, and weighed by their log-sum-exps."""

    def weight(self, lse: Tensor, largest: Tensor) -> Tensor:
        """Of one part, up to a factor that all have."""
        return torch.exp(lse - largest)

    def sums(self, request: CallRequest) -> Sums:
        parts = [self.step(request, self.start(request), keys) for keys in self.tiles(request)]
        largest = torch.stack([part.lse for part in parts]).amax(0)
        # A row without a visible key has parts of no weight.
        largest = torch.where(largest == -torch.inf, 0.0, largest)
        weights = [self.weight(part.lse, largest) for part in parts]
        o_bar = sum(w * self.normalised(part) for w, part in zip(weights, parts, strict=True))
        l = torch.stack(weights).sum(0)
        m = torch.where(l == 0.0, -torch.inf, largest)
        return Sums(m, l, torch.as_tensor(o_bar))


class SplitInBaseTwo(Split, bug="sgl-project/sglang/issues/33064", twin="split"):
    """Natural log-sum-exps are combined with powers of two."""

    def weight(self, lse: Tensor, largest: Tensor) -> Tensor:
        return torch.exp2(lse - largest)


class SplitUnweighted(Split, bug="flashinfer-ai/flashinfer/pull/50", twin="split"):
    """The log-sum-exp of a part is not stored, so all parts weigh alike."""

    def weight(self, lse: Tensor, largest: Tensor) -> Tensor:
        return torch.ones_like(lse)


class MaximumFromZero(Tiled, bug="Dao-AILab/flash-attention/issues/2082"):
    """The maximum of a row that has seen nothing becomes 0, and stays there where all scores are negative."""

    first = 0.0

    def start(self, request: CallRequest) -> Sums:
        sums = super().start(request)
        return replace(sums, m=torch.full_like(sums.m, self.first))

    def normalised(self, sums: Sums) -> Tensor:
        return (sums.o_bar / sums.l).masked_fill(sums.l == 0.0, 0.0)


class MaximumFromFinite(MaximumFromZero, bug="flashinfer-ai/flashinfer/issues/4267"):
    """The running maximum starts at -5e4."""

    first = -5e4


class MaximumOfTheTile(Tiled, bug="tile-ai/tilelang/pull/1148"):
    """The shift is the maximum of this tile alone: what was summed before may overflow as it is rescaled."""

    def largest(self, sums: Sums, s: Tensor) -> Tensor:
        return s.amax(-1, keepdim=True)


class ConstantShift(MaximumFromZero, bug="HabanaAI/vllm-fork/issues/275"):
    """10 is subtracted from every score in place of the maximum."""

    first = 10.0

    def largest(self, sums: Sums, s: Tensor) -> Tensor:
        return sums.m


class PInTheOtherFrame(Tiled, bug="ROCm/rocm-libraries/pull/7194"):
    """Where the maximum rises by little the old one is kept, but P was computed with the new one."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        next_sums = super().step(request, sums, keys)
        alpha = self.exp(sums.m, next_sums.m)
        small = next_sums.m - sums.m <= 8.0 * math.log(2.0)
        unscaled = Sums(sums.m, next_sums.l + (1.0 - alpha) * sums.l, next_sums.o_bar + (1.0 - alpha) * sums.o_bar)
        return Sums(*(torch.where(small, a, b) for a, b in zip(_parts(unscaled), _parts(next_sums), strict=True)))


def _parts(sums: Sums) -> tuple[Tensor, Tensor, Tensor]:
    return sums.m, sums.l, sums.o_bar


class RescaledTheOtherWay(Tiled, bug="Dao-AILab/flash-attention/issues/991"):
    """O is multiplied by exp(m' - m), as printed with an exponent of -1 too many."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        next_sums = super().step(request, sums, keys)
        alpha = self.exp(sums.m, next_sums.m)
        inverse = torch.where(alpha > 0.0, 1.0 / alpha, 0.0)
        return replace(next_sums, o_bar=next_sums.o_bar + (inverse - alpha) * sums.o_bar)


class NanDropped(Tiled, bug="ohdearquant/lattice/issues/740"):
    """A maximum that passes over NaN, and an exponential that makes 0 of it."""

    def largest(self, sums: Sums, s: Tensor) -> Tensor:
        return torch.fmax(sums.m, s.nan_to_num(nan=-torch.inf, neginf=-torch.inf).amax(-1, keepdim=True))

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        return super().exp(s, m).nan_to_num(nan=0.0)


class NarrowProduct(Tiled, bug="ultralytics/ultralytics/pull/24990", fmt=FP16):
    """Q K^T is stored in the format of the call, and scaled afterwards: in fp16 it overflows."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        raw = super().product(replace(request, scale=1.0), keys)
        return raw.to(request.q.dtype).float() * request.scale


class NarrowSoftmax(Tiled, bug="apple/axlearn/pull/18"):
    """The softmax is computed in the format of the call."""

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        return super().exp(s.bfloat16(), m.bfloat16()).float()


class NarrowRowSum(Tiled, bug="Intel-tensorflow/tensorflow/pull/23"):
    """l is summed in bf16, key after key."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        s = self.scores(request, keys)
        m = self.largest(sums, s)
        total = (self.exp(sums.m, m) * sums.l).bfloat16()
        p = self.exp(s, m).bfloat16()
        for at in range(p.shape[-1]):
            total = total + p[..., at, None]
        return replace(super().step(request, sums, keys), l=total.float())


class NarrowBetweenTiles(Tiled, bug="zhuzilin/ring-flash-attention/issues/22"):
    """O of every tile is stored in the format of the call, and added up from there."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        next_sums = super().step(request, sums, keys)
        return replace(next_sums, o_bar=next_sums.o_bar.to(request.q.dtype).float())


class NarrowAccumulation(Tiled, bug="Xilinx/mlir-air/pull/1606"):
    """P V is added up in bf16, key after key."""

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        next_sums = super().step(request, sums, keys)
        p = self.p_bar(self.exp(self.scores(request, keys), next_sums.m), request)
        total = (self.exp(sums.m, next_sums.m) * sums.o_bar).bfloat16()
        for at in range(keys.stop - keys.start):
            total = total + (p[..., at, None] * request.wide_v[:, :, keys.start + at, None]).bfloat16()
        return replace(next_sums, o_bar=total.float())


class EightBitP(Tiled, bug="Dao-AILab/flash-attention/issues/1493"):
    """P is cast to e4m3 without a scale of its own."""

    def p_bar(self, p: Tensor, request: CallRequest) -> Tensor:
        return p.to(torch.float8_e4m3fn).float()


class TruncatedStore(Tiled, bug="tinygrad/tinygrad/pull/11848"):
    """O is stored by cutting its last 16 bits off."""

    def stored(self, o: Tensor, request: CallRequest) -> Tensor:
        if request.q.dtype != torch.bfloat16:
            return super().stored(o, request)
        return truncated(o).bfloat16()


class StoredInFp32(Tiled, bug="lucidrains/flash-attention-jax/pull/13"):
    """O is returned in fp32, whatever the inputs are in."""

    def stored(self, o: Tensor, request: CallRequest) -> Tensor:
        return o


class QueryOverwritten(Tiled, bug="unslothai/unsloth/issues/5001"):
    """Q is scaled where it lies."""

    def output(self, request: CallRequest) -> Tensor:
        with torch.no_grad():
            request.q.mul_(request.scale)
        return super().output(replace(request, scale=1.0))


class SwitchLeftOn(Tiled, bug="MouseLand/cellpose/issues/1253"):
    """A global switch is set for speed and stays set."""

    def output(self, request: CallRequest) -> Tensor:
        torch.set_float32_matmul_precision("medium")
        return super().output(request)


class SumNotReset(Tiled, bug="flashinfer-ai/flashinfer/pull/5029"):
    """An accumulator outlives the call, and the next one starts from what it holds."""

    def __init__(self) -> None:
        self.left: Tensor | None = None

    def start(self, request: CallRequest) -> Sums:
        sums = super().start(request)
        if self.left is None or self.left.shape != sums.o_bar.shape:
            return sums
        return replace(sums, m=torch.zeros_like(sums.m), o_bar=self.left)

    def sums(self, request: CallRequest) -> Sums:
        total = super().sums(request)
        self.left = total.o_bar * 2.0**-6
        return total


class RaceInO(Tiled, bug="ROCm/triton/issues/953"):
    """Two threads add to O in an order of their own, and sometimes one of them is lost."""

    def __init__(self) -> None:
        self.calls = 0

    def normalised(self, sums: Sums) -> Tensor:
        self.calls += 1
        o = super().normalised(sums)
        # Once in every other call, in one element: as rare as a race, but the same in every run of the tests.
        o[0, 0, 0, 0] *= 1.0 - 2.0**-8 * (self.calls % 2)
        return o
