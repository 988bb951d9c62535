"""Users' kernels whose O is right and whose gradients are wrong."""

import math
from dataclasses import replace

import torch
from torch import Tensor

from tiebreak.defects.tiled import CallRequest, Tiled, by_group
from tiebreak.matrix.questions.placements import read_as_contiguous


class UnscaledDk(Tiled, bug="Dao-AILab/flash-attention/issues/2651"):
    """dK lacks the scale: there an error, here silent."""

    def dk(self, request: CallRequest, ds: Tensor) -> Tensor:
        return super().dk(request, ds) / request.scale


class FirstOfGroup(Tiled, bug="marin-community/levanter/pull/449"):
    """dK and dV of a key head are those of one of its query heads."""

    def summed(self, gradient: Tensor, request: CallRequest) -> Tensor:
        return by_group(gradient, request.groups)[:, :, 0]


class GroupsTransposed(Tiled, bug="XunhaoLai/native-sparse-attention-triton/issues/27"):
    """The index of a query head is split the other way round than in the forward pass."""

    def summed(self, gradient: Tensor, request: CallRequest) -> Tensor:
        return by_group(gradient, gradient.shape[1] // request.groups).sum(1)


class BackwardWithoutCausal(Tiled, bug="Dao-AILab/flash-attention/issues/2424"):
    """The mask is not passed on to the backward pass."""

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        return super().recomputed(replace(request, causal=False), keys, lse)


class BackwardAlwaysCausal(Tiled, bug="triton-lang/triton/issues/4541"):
    """The backward pass takes every call for a causal one."""

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        return super().recomputed(replace(request, causal=True), keys, lse)


class LseInBaseTwo(Tiled, bug="pytorch/pytorch/issues/181645"):
    """The log-sum-exp is converted from base two, in which it is not."""

    def lse(self, request: CallRequest) -> Tensor:
        return super().lse(request) * math.log(2.0)


class NarrowRecomputation(Tiled, bug="NVIDIA/cudnn-frontend/issues/744"):
    """The backward pass recomputes the scores in 16 bits."""

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        s = self.scores(request, keys).to(request.q.dtype).float()
        return torch.exp(s - lse).masked_fill(lse == -torch.inf, 0.0)


class NarrowDq(Tiled, bug="NVIDIA/TransformerEngine/pull/821"):
    """dQ is added up over the key tiles in the format of the call."""

    def dq(self, request: CallRequest, dq: Tensor, ds: Tensor, keys: slice) -> Tensor:
        return super().dq(request, dq, ds, keys).to(request.q.dtype).float()


class DqOfTheFirstEntry(Tiled, bug="ROCm/TransformerEngine/pull/657"):
    """dQ of every batch entry is added up in the place of the first."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        dq, dk, dv = super().gradients(request, do, o)
        return torch.cat([dq[:1], torch.zeros_like(dq[1:])]), dk, dv


class BlindGradients(Tiled, bug="pytorch/pytorch/issues/41508"):
    """0 * NaN in the backward pass of rows without a visible key."""

    def recomputed(self, request: CallRequest, keys: slice, lse: Tensor) -> Tensor:
        return torch.exp(self.scores(request, keys) - lse)


class StridesOfDoIgnored(Tiled, bug="Dao-AILab/flash-attention/issues/355"):
    """dO is read as if it were contiguous."""

    def gradients(self, request: CallRequest, do: Tensor, o: Tensor) -> tuple[Tensor, ...]:
        return super().gradients(request, read_as_contiguous(do), o)


class RaceInDq(Tiled, bug="Dao-AILab/flash-attention/issues/414"):
    """Atomic additions: the order in which key tiles add to dQ differs from call to call."""

    def __init__(self) -> None:
        self.calls = 0

    def dq(self, request: CallRequest, dq: Tensor, ds: Tensor, keys: slice) -> Tensor:
        self.calls += 1
        total = super().dq(request, dq, ds, keys)
        return total * (1.0 + 2.0**-9) if self.calls % 3 == 0 else total
