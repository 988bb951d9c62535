"""Matrix products as chains of fused multiply-adds in fp32."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import flushed, fma
from tiebreak.kernels.formats import BF16, FP32

_BEYOND_BF16 = 0xFFFF  # bits of an fp32 number that bf16 lacks


def sequential_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, term after term.

    Args:
        a: (..., m, k) fp32.
        b: (..., k, n) fp32; the leading dimensions broadcast.

    Returns:
        (..., m, n), fp32.
    """
    terms, total = Terms.of(a, b), zeros(a, b)
    for k in range(len(terms.columns)):
        total = terms.added(total, k)
    return total


@dataclass(frozen=True)
class Terms:
    """What a chain of fused multiply-adds adds up."""

    columns: tuple[Tensor, ...]  # of a, (..., m, 1)
    rows: tuple[Tensor, ...]  # of b, (..., 1, n)
    grain: float  # what every product is a multiple of; 0 where fp32 may not hold one
    flushes: bool = False  # whether subnormal sums are

    @classmethod
    def of(cls, a: Tensor, b: Tensor, *, flushes: bool = False) -> "Terms":
        """Of a product, (..., m, k) by (..., k, n)."""
        return cls(a.unsqueeze(-1).unbind(-2), b.unsqueeze(-3).unbind(-2), _grain(a, b), flushes)

    @classmethod
    def in_pairs(cls, a: Tensor, b: Tensor) -> "Terms":
        """With an even number of terms (a zero's products change nothing), operands and sums flushed."""
        if a.shape[-1] % 2:
            a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
        return cls.of(flushed(a), flushed(b), flushes=True)

    def added(self, total: Tensor, k: int) -> Tensor:
        """A product added to what there is, which may be overwritten."""
        if not self.grain:
            total = fma(self.columns[k].expand_as(total), self.rows[k], total)
        else:  # a product that fp32 holds is as good as unrounded
            total = total.addcmul_(self.columns[k], self.rows[k])
        # What is no smaller than a normal number is never flushed.
        return flushed(total) if self.flushes and self.grain < FP32.smallest_normal else total


def _grain(a: Tensor, b: Tensor) -> float:
    sizes = [x.abs() for x in (a, b) if x.numel() and not x.view(torch.int32).bitwise_and(_BEYOND_BF16).any()]
    if len(sizes) < 2 or not math.prod(size.max().item() for size in sizes) < 2.0 ** (FP32.max_exponent + 1):
        return 0.0  # something else than bf16, or beyond the range of fp32, or no number
    least = (size.masked_fill_(size == 0, 1.0).min().item() for size in sizes)
    grain = math.prod(2.0 ** (math.frexp(size)[1] - 1 - BF16.mantissa_bits) for size in least)
    return grain if grain >= FP32.smallest_subnormal else 0.0


def zeros(a: Tensor, b: Tensor) -> Tensor:
    """Of the shape of a @ b."""
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.zeros(*lead, a.shape[-2], b.shape[-1], device=a.device)
