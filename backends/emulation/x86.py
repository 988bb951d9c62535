"""Matrix products as x86's bf16 instructions add them up (Intel SDM, volume 2, VDPBF16PS and TDPBF16PS).

A fused multiply-add of fp32 adds every product, to even. Subnormal operands and results are flushed.
"""

import numpy as np
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import flushed, fma

_OF_A_TILE = 32  # terms of a row that AMX takes at once


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
    a, b = _even(a, b)
    total = flushed(addend)
    for k in range(0, a.shape[-1], 2):
        total = _added(_added(total, a, b, k + 1), a, b, k)
    return total


def amx_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by TDPBF16PS: of 32 terms the even and the odd are added up apart, then their sum to what there is.

    As the document has it: no AMX has run here.
    """
    a, b = _even(a, b)
    total = _zeros(a, b)
    for start in range(0, a.shape[-1], _OF_A_TILE):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(start, min(start + _OF_A_TILE, a.shape[-1]), 2):
            even, odd = _added(even, a, b, k), _added(odd, a, b, k + 1)
        total = flushed(total + flushed(even + odd))
    return total


def _even(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Flushed, and with an even number of terms: a zero's products change nothing."""
    if a.shape[-1] % 2:
        a, b = torch.nn.functional.pad(a, (0, 1)), torch.nn.functional.pad(b, (0, 0, 0, 1))
    return flushed(a), flushed(b)


def _zeros(a: Tensor, b: Tensor) -> Tensor:
    lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return torch.zeros(*lead, a.shape[-2], b.shape[-1], device=a.device)


def _added(total: Tensor, a: Tensor, b: Tensor, k: int) -> Tensor:
    return flushed(fma(a[..., :, k, None].expand_as(total), b[..., None, k, :], total))
