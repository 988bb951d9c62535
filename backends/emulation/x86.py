"""Matrix products as x86's bf16 instructions add them up (Intel SDM, volume 2, VDPBF16PS and TDPBF16PS).

A fused multiply-add of fp32 adds every product, to even. Subnormal operands and results are flushed.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import flushed, fma
from tiebreak.kernels.formats import BF16, FP32

_OF_A_TILE = 32  # terms of a row that AMX takes at once
_BEYOND_BF16 = 0xFFFF  # bits of an fp32 number that bf16 lacks


def vdpbf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by VDPBF16PS: of two terms the second is added first.

    Args:
        a: (..., m, k) fp32, values of bf16.
        b: (..., k, n) fp32, values of bf16; the leading dimensions broadcast.

    Returns:
        (..., m, n), fp32. A NaN's bits are not the hardware's.
    """
    return add_dots(a, b, _zeros(a, b))


def add_dots(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """As `vdpbf16_matmul`, added to fp32 numbers of the product's shape, as an instruction does."""
    terms, total = _Terms.of(a, b), flushed(addend)
    for k in range(0, len(terms.columns), 2):
        total = terms.added(terms.added(total, k + 1), k)
    return total


def amx_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by TDPBF16PS: of 32 terms the even and the odd are added up apart, then their sum to what there is.

    As the document has it: no AMX has run here.
    """
    terms, total = _Terms.of(a, b), _zeros(a, b)
    count = len(terms.columns)
    for start in range(0, count, _OF_A_TILE):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(start, min(start + _OF_A_TILE, count), 2):
            even, odd = terms.added(even, k), terms.added(odd, k + 1)
        total = flushed(total + flushed(even + odd))
    return total


@dataclass(frozen=True)
class _Terms:
    """Operands, flushed, with an even number of terms: a zero's products change nothing."""

    columns: tuple[Tensor, ...]  # of a, (..., m, 1)
    rows: tuple[Tensor, ...]  # of b, (..., 1, n)
    grain: float  # what every product is a multiple of; 0 where fp32 may not hold one

    @classmethod
    def of(cls, a: Tensor, b: Tensor) -> "_Terms":
        if a.shape[-1] % 2:
            a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
        a, b = flushed(a), flushed(b)
        return cls(a.unsqueeze(-1).unbind(-2), b.unsqueeze(-3).unbind(-2), _grain(a, b))

    def added(self, total: Tensor, k: int) -> Tensor:
        """A product added to what there is, which may be overwritten."""
        if not self.grain:
            return flushed(fma(self.columns[k].expand_as(total), self.rows[k], total))
        # A product that fp32 holds is as good as unrounded; what is no smaller than a normal number is never flushed.
        total = total.addcmul_(self.columns[k], self.rows[k])
        return total if self.grain >= FP32.smallest_normal else flushed(total)


def _grain(a: Tensor, b: Tensor) -> float:
    sizes = [x.abs() for x in (a, b) if x.numel() and not x.view(torch.int32).bitwise_and(_BEYOND_BF16).any()]
    if len(sizes) < 2 or not math.prod(size.max().item() for size in sizes) < 2.0 ** (FP32.max_exponent + 1):
        return 0.0  # something else than bf16, or beyond the range of fp32, or no number
    least = (size.masked_fill_(size == 0, 1.0).min().item() for size in sizes)
    grain = math.prod(2.0 ** (math.frexp(size)[1] - 1 - BF16.mantissa_bits) for size in least)
    return grain if grain >= FP32.smallest_subnormal else 0.0


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.zeros(*lead, a.shape[-2], b.shape[-1], device=a.device)
