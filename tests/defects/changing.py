"""Users' kernels that are right in any one call, and whose answer changes with what should not matter."""

import torch
from torch import Tensor

from tiebreak.defects.forward import Split
from tiebreak.defects.tiled import CallRequest, Sums, Tiled, truncated

_VECTOR = 16  # numbers that a wide load or a vector has
_FAST_AT_0 = 1.0 - 2.0**-14.2  # what PyTorch's fast exponential has at 0


class BatchInvariant(Tiled, invariant="batch"):
    """Its author says that neighbours change no bit."""


class TileOfTheLongest(BatchInvariant, bug="vllm-project/vllm/issues/51902", twin="batch_invariant", invariant="batch"):
    """The tile is chosen by the longest sequence of queries in the batch: up to 9 a small one."""

    def tiles(self, request: CallRequest) -> list[slice]:
        size = 32 if request.queries < 10 else self.tile
        return [slice(at, min(at + size, request.keys)) for at in range(0, request.keys, size)]


class SplitsOfTheBatch(Split, bug="Dao-AILab/flash-attention/pull/2450", twin="batch_invariant", invariant="batch"):
    """The number of splits is chosen by the keys of all sequences together."""

    def tiles(self, request: CallRequest) -> list[slice]:
        splits = max(1, 1024 // (request.q.shape[0] * request.keys))
        return [slice(part[0], part[-1] + 1) for part in torch.arange(request.keys).chunk(splits)]


class NumberedSplits(Split):
    """As many splits as it is told."""

    splits = 1

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool = False,
        scale: float | None = None,
        attn_mask: Tensor | None = None,
        enable_gqa: bool = False,
        num_splits: int = 1,
    ) -> Tensor | tuple[Tensor, Tensor]:
        self.splits = num_splits
        return super().__call__(q, k, v, causal, scale, attn_mask, enable_gqa)

    def tiles(self, request: CallRequest) -> list[slice]:
        return [slice(part[0], part[-1] + 1) for part in torch.arange(request.keys).chunk(self.splits)]


class PartialORounded(NumberedSplits, bug="flashinfer-ai/flashinfer/issues/5107", twin="numbered_splits"):
    """O of a split is stored in the format of q where there are several: each half of a tie is rounded by itself."""

    def sums(self, request: CallRequest) -> Sums:
        if self.splits == 1:
            return super().sums(request)
        self.fmt = request.q.dtype
        total = super().sums(request)
        del self.fmt
        return total

    def normalised(self, sums: Sums) -> Tensor:
        o = super().normalised(sums)
        return o.to(self.fmt).float() if hasattr(self, "fmt") else o


class FastInWholeVectors(Tiled, bug="pytorch/pytorch/pull/151441"):
    """A fast exponential, a little below 1 at 0, takes whole vectors of keys, the exact one those that are left."""

    def exp(self, s: Tensor, m: Tensor) -> Tensor:
        p = super().exp(s, m)
        if s.shape[-1] > 1:
            p[..., : s.shape[-1] // _VECTOR * _VECTOR] *= _FAST_AT_0
        return p


class DecodedTruncated(Tiled, bug="vllm-project/vllm/issues/54035"):
    """One query alone has a kernel of its own, whose O is truncated."""

    def stored(self, o: Tensor, request: CallRequest) -> Tensor:
        return super().stored(truncated(o) if request.queries == 1 else o, request)


class PTruncatedUnaligned(Tiled, bug="intel/torch-xpu-ops/pull/3328"):
    """Where v does not start at a multiple of 16 bytes it is read by another path, which truncates P."""

    def p_bar(self, p: Tensor, request: CallRequest) -> Tensor:
        return super().p_bar(p, request) if request.v.data_ptr() % 16 == 0 else truncated(p)
