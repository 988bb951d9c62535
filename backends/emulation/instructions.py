"""Matrix products as a CPU's instructions add them up: fused multiply-adds of fp32, and the bf16 instructions.

All take a (..., m, k) and b (..., k, n) in fp32, whose leading dimensions broadcast, and return (..., m, n) in fp32.
The bf16 instructions take values of bf16 and flush subnormal operands and sums. A NaN's bits are not the hardware's.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import flushed, fma, odd_sum
from tiebreak.kernels.formats import BF16, FP32

_LACKS_BF16 = 0xFFFF  # bits of an fp32 number that bf16 lacks
_LACKS_FP32 = (1 << 29) - 1  # bits of an fp64 fraction that fp32 lacks
_AMX_TERMS = 32  # of a row that a tile takes at once


def sequential_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b by fused multiply-adds of fp32, term after term."""
    add, total = _adder(a, b)
    for k in range(a.shape[-1]):
        total = add(total, k)
    return total


def vdpbf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b by x86's VDPBF16PS (Intel SDM, volume 2): fused multiply-adds, of two terms the second first."""
    add, total = _adder(*_pairs(a, b), flushes=True)
    for k in range(0, a.shape[-1], 2):
        total = add(add(total, k + 1), k)
    return total


def amx_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b by x86's TDPBF16PS: of 32 terms the even and the odd are summed apart, then added to the total.

    This follows the document (Intel SDM, volume 2): no AMX has run here.
    """
    add, total = _adder(*_pairs(a, b), flushes=True)
    for start in range(0, a.shape[-1], _AMX_TERMS):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(start, min(start + _AMX_TERMS, a.shape[-1]), 2):
            even, odd = add(even, k), add(odd, k + 1)
        total = flushed(total + flushed(even + odd))
    return total


def bfmmla_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b by Arm's BFMMLA and BFDOT (Arm ARM, DDI 0487, BFDotAdd).

    The sum of two products is rounded to odd, and so is its sum with the total. Products are flushed too, as where
    FPCR.EBF is 0 or FEAT_EBF16 is missing.
    """
    a, b = (x.double() for x in _pairs(a, b))
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for k in range(0, a.shape[-1], 2):
        # fp32 holds a product of bf16, or it is beyond its range.
        products = (flushed(a[..., :, j, None] * b[..., None, j, :]).float().double() for j in (k, k + 1))
        total = _odd_fp32_sum(total, _odd_fp32_sum(*products))
    return total.float()


def _odd_fp32_sum(x: Tensor, y: Tensor) -> Tensor:
    """Return the sum of fp32 numbers rounded to odd, in fp64; flushed."""
    # To odd in fp64 first, which keeps apart what is odd in fp32: its last bit represents all that is lost.
    total = odd_sum(x, y)
    bits = total.view(torch.int64)
    odd = torch.where(bits & _LACKS_FP32 != 0, bits | (_LACKS_FP32 + 1), bits) & ~_LACKS_FP32
    # Beyond fp32's range a sum is Inf.
    return torch.where(total.isfinite(), flushed(odd.view(torch.float64)).float().double(), total)


def _pairs(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return flushed operands, padded with zeros to an even number of terms."""
    if a.shape[-1] % 2:
        a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
    return flushed(a), flushed(b)


def _adder(a: Tensor, b: Tensor, *, flushes: bool = False) -> tuple[Callable[[Tensor, int], Tensor], Tensor]:
    """Return a function that adds the products of term k to a total in place, every sum RNE, and a total of zeros."""
    heads = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    columns, rows = a.unsqueeze(-1).unbind(-2), b.unsqueeze(-3).unbind(-2)
    exact = _has_exact_products(a, b)

    def add(total: Tensor, k: int) -> Tensor:
        if exact:
            return total.addcmul_(columns[k], rows[k])
        total = fma(columns[k].expand_as(total), rows[k], total)
        return flushed(total) if flushes else total

    return add, torch.zeros(*heads, a.shape[-2], b.shape[-1], device=a.device)


def holds_bf16(x: Tensor) -> bool:
    """Return whether all that an fp32 tensor holds are numbers of bf16."""
    return not x.view(torch.int32).bitwise_and(_LACKS_BF16).any()


def _has_exact_products(a: Tensor, b: Tensor) -> bool:
    """Return whether fp32 holds all products, and no sum is subnormal: then rounding a product changes nothing."""
    sizes = [x.abs() for x in (a, b) if x.numel() and holds_bf16(x)]
    if len(sizes) < 2 or not math.prod(size.max().item() for size in sizes) < 2.0 ** (FP32.max_exponent + 1):
        return False  # something else than bf16, or beyond the range of fp32, or no number
    # All products, and so all sums, are multiples of the product of the last bits of the smallest operands.
    least = (size.masked_fill_(size == 0, 1.0).min().item() for size in sizes)
    return math.prod(2.0 ** (math.frexp(size)[1] - 1 - BF16.mantissa_bits) for size in least) >= FP32.smallest_normal
