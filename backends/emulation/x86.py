"""Matrix products as x86's bf16 instructions add them up (Intel SDM, volume 2, VDPBF16PS and TDPBF16PS).

A fused multiply-add of fp32 adds every product, to even. Subnormal operands and results are flushed.
"""

import torch
from torch import Tensor

from tiebreak.backends.emulation.chains import Terms, zeros
from tiebreak.backends.emulation.rounding import flushed

_OF_A_TILE = 32  # terms of a row that AMX takes at once


def vdpbf16_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by VDPBF16PS: of two terms the second is added first.

    Args:
        a: (..., m, k) fp32, values of bf16.
        b: (..., k, n) fp32, values of bf16; the leading dimensions broadcast.

    Returns:
        (..., m, n), fp32. A NaN's bits are not the hardware's.
    """
    return add_dots(a, b, zeros(a, b))


def add_dots(a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """As `vdpbf16_matmul`, added to fp32 numbers of the product's shape, as an instruction does."""
    terms, total = Terms.in_pairs(a, b), flushed(addend)
    for k in range(0, len(terms.columns), 2):
        total = terms.added(terms.added(total, k + 1), k)
    return total


def amx_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b by TDPBF16PS: of 32 terms the even and the odd are added up apart, then their sum to what there is.

    As the document has it: no AMX has run here.
    """
    terms, total = Terms.in_pairs(a, b), zeros(a, b)
    count = len(terms.columns)
    for start in range(0, count, _OF_A_TILE):
        even, odd = torch.zeros_like(total), torch.zeros_like(total)
        for k in range(start, min(start + _OF_A_TILE, count), 2):
            even, odd = terms.added(even, k), terms.added(odd, k + 1)
        total = flushed(total + flushed(even + odd))
    return total
