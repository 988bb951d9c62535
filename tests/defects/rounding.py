"""Users' kernels that round where they should not, or as they should not: forward, and in their own backward passes."""

from dataclasses import replace

import torch
from torch import Tensor

from tiebreak.defects.forward import Split
from tiebreak.defects.tiled import CallRequest, Sums, Tiled, truncated
from tiebreak.kernels.operands import LOG2_E


class ClampedLogits(Tiled, bug="prescient-design/e3tools/pull/3"):
    """Scores are clamped at 50, against overflow."""

    def product(self, request: CallRequest, keys: slice) -> Tensor:
        return super().product(request, keys).clamp(-50.0, 50.0)


class ConstantInTheShift(Tiled, bug="facebookexperimental/triton/pull/3408"):
    """A constant is added to every row's maximum."""

    def largest(self, sums: Sums, s: Tensor) -> Tensor:
        return super().largest(sums, s + 0.4)


class PoorExponential(Tiled, bug="pytorch/pytorch/pull/151441"):
    """A parabola between powers of two, off by 0.5 % at most, at 0 by 0.15 %."""

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        y = (s - torch.where(m == -torch.inf, 0.0, m)) * LOG2_E
        whole = y.floor()
        part = (y - whole).nan_to_num(nan=0.0)
        return torch.exp2(whole) * (0.9985 + part * (0.6545 + 0.3440 * part))


class TruncatedP(Tiled, bug="ROCm/flash-attention/pull/78"):
    """P is truncated for its product with V."""

    def p_bar(self, p: Tensor, request: CallRequest) -> Tensor:
        return truncated(p)


class ScaleInBf16(Tiled, bug="ml-explore/mlx/pull/3119"):
    """The scale is kept in bf16, forward and backward."""

    def prepared(self, request: CallRequest) -> CallRequest:
        return replace(request, scale=torch.tensor(request.scale).bfloat16().item())


class PartialOTruncated(Split, bug="flashinfer-ai/flashinfer/issues/5107", twin="split"):
    """What a part of the keys gives is stored in bf16, truncated, and combined from there."""

    def sums(self, request: CallRequest) -> Sums:
        self.parts = True
        total = super().sums(request)
        self.parts = False
        return total

    def normalised(self, sums: Sums) -> Tensor:
        o = super().normalised(sums)
        return truncated(o) if self.parts else o


class Flash1(Tiled):
    """FlashAttention-1: O is normalised after every tile, and P before its cast."""

    def kept(self, o: Tensor) -> Tensor:
        """O between two tiles."""
        return o

    def step(self, request: CallRequest, sums: Sums, keys: slice) -> Sums:
        s = self.scores(request, keys)
        m = self.largest(sums, s)
        p, alpha = self.exp(s, m), self.exp(sums.m, m)
        l = alpha * sums.l + p.sum(-1, keepdim=True)
        divisor = torch.where(l == 0.0, 1.0, l)
        added = self.p_bar(p / divisor, request) @ request.wide_v[:, :, keys]
        return Sums(m, l, self.kept(sums.o_bar * (sums.l / divisor * alpha) + added))

    def normalised(self, sums: Sums) -> Tensor:
        return sums.o_bar


class RunningOTruncated(Flash1, bug="ROCm/aiter/issues/5151", twin="flash_1"):
    """O is stored in bf16 after every tile, truncated: an error of one sign that adds up."""

    def kept(self, o: Tensor) -> Tensor:
        return truncated(o)


class AnyOrder(Tiled):
    """Key tiles add to dQ in another order than in the forward pass, as with atomic additions."""

    def backward_tiles(self, request: CallRequest) -> list[slice]:
        return self.tiles(request)[::-1]


class DqWithoutTheLastTile(AnyOrder, bug="flagos-ai/FlagGems/pull/898", twin="any_order"):
    """The last key tile adds nothing to dQ."""

    def dq(self, request: CallRequest, dq: Tensor, ds: Tensor, keys: slice) -> Tensor:
        return dq if keys.start and keys.stop == request.keys else super().dq(request, dq, ds, keys)


class DkInBf16(AnyOrder, bug="facebookresearch/xformers/pull/467", twin="any_order"):
    """dK is added up in bf16, query after query."""

    def dk(self, request: CallRequest, ds: Tensor) -> Tensor:
        total = torch.zeros_like(ds[..., 0, :, None] * request.wide_q[..., :1, :])
        for row in range(request.queries):
            total = (total + ds[..., row, :, None] * request.wide_q[..., row, None, :]).bfloat16().float()
        return total * request.scale


class ScaleOfTheDimension(Tiled, bug="tenstorrent/tt-metal/pull/53217"):
    """1 / sqrt(d) is written into the backward pass, where the scale may be another."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        return super().gradients(replace(request, scale=request.q.shape[-1] ** -0.5), do, o)


class LseInBf16(Tiled, bug="NVIDIA/TransformerEngine/pull/716"):
    """The log-sum-exp that the backward pass is given is stored in bf16."""

    def lse(self, request: CallRequest) -> Tensor:
        return super().lse(request).bfloat16().float()


class DeltaTruncated(Tiled, bug="ROCm/aiter/issues/5151"):
    """Delta is stored in bf16, truncated."""

    def delta(self, do: Tensor, o: Tensor) -> Tensor:
        return truncated(super().delta(do, o))


class DsTruncated(Tiled, bug="PaddlePaddle/Paddle/pull/68689"):
    """DS is truncated for its products."""

    def ds(self, ds: Tensor, request: CallRequest) -> Tensor:
        return truncated(ds)


class PTruncatedInBackward(Tiled, bug="PaddlePaddle/Paddle/pull/68689"):
    """P is truncated for its product with dO."""

    def p_of_dv(self, p: Tensor, request: CallRequest) -> Tensor:
        return truncated(p)
