"""Matrix products as Arm's bf16 instructions add them up, BFMMLA and BFDOT alike (Arm ARM, DDI 0487, BFDotAdd)."""

import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import flushed

_OF_FP64 = (1 << 29) - 1  # bits of an fp64 fraction that fp32 lacks


def arm_bf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, two products at a time: their sum is rounded to odd, and so is its sum with what there is.

    Subnormal numbers are flushed: operands, products, sums and what they are added to. So it is where FPCR.EBF is 0, or
    FEAT_EBF16 is not there.

    Args:
        a: (..., m, k) fp32, values of bf16.
        b: (..., k, n) fp32, values of bf16; the leading dimensions broadcast.

    Returns:
        (..., m, n), fp32. A NaN's bits are not the hardware's.
    """
    return add_pairs(a, b, torch.zeros((), device=a.device))


def add_pairs(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """As `arm_bf16_matmul`, added to fp32 numbers that broadcast to the product, as an instruction does."""
    a, b = (flushed(x.double()) for x in (a, b))
    if a.shape[-1] % 2:  # a zero's products change nothing
        a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
    total = flushed(addend.double())
    for k in range(0, a.shape[-1], 2):
        total = _to_odd(total, _to_odd(_product(a, b, k), _product(a, b, k + 1)))
    return total.float()


def _product(a: Tensor, b: Tensor, k: int) -> Tensor:
    """Of column k and row k: fp32 holds it, or it is beyond its range."""
    return flushed(a[..., :, k, None] * b[..., None, k, :]).float().double()


def _to_odd(x: Tensor, y: Tensor) -> Tensor:
    """The sum of fp32 numbers, in fp64. Of the neighbours of one that fp32 lacks, it is that whose last bit is 1."""
    total = x + y
    of_y = total - x
    lost = (x - (total - of_y)) + (y - of_y)
    bits = total.view(torch.int64)
    # First to odd in fp64, which keeps apart what is odd in fp32: its last bit stands for all that is lost.
    beside = torch.where((lost > 0) == (total > 0), bits + 1, bits - 1)
    bits = torch.where((lost != 0) & (bits & 1 == 0), beside, bits)
    odd = torch.where(bits & _OF_FP64 != 0, bits | (_OF_FP64 + 1), bits) & ~_OF_FP64
    # Beyond fp32's range a sum is Inf.
    finite = flushed(odd.view(torch.float64)).float().double()
    return torch.where(total.isfinite(), finite, total)
