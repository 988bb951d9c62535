"""Accumulators: how products and terms are added up to one fp32 value.

A tensor-core accumulator joins here: one more `Accumulator` member and its two functions in the table below.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from tiebreak.kernels.plans import Accumulator


@dataclass(frozen=True)
class Accumulation:
    """The two sums an accumulator has to do."""

    matmul: Callable[[Tensor, Tensor], Tensor]  # (..., m, k) x (..., k, n) -> (..., m, n), fp32 in and out
    total: Callable[[Tensor], Tensor]  # (..., k) -> (..., 1), fp32 in and out


def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    return (a.double() @ b.double()).float()


def _exact_total(x: Tensor) -> Tensor:
    return x.sum(-1, keepdim=True, dtype=torch.float64).float()


def _product(a: Tensor, b: Tensor, index: int) -> Tensor:
    """The rank-one term `index` of a @ b, each product rounded to fp32 (exact where the operands have 12 bits)."""
    return a[..., :, index, None] * b[..., None, index, :]


def _sequential_matmul(a: Tensor, b: Tensor) -> Tensor:
    total = _product(a, b, 0)
    for index in range(1, a.shape[-1]):
        total = total + _product(a, b, index)
    return total


def _sequential_total(x: Tensor) -> Tensor:
    total = x[..., :1]
    for index in range(1, x.shape[-1]):
        total = total + x[..., index : index + 1]
    return total


def _pairwise(term: Callable[[int], Tensor], first: int, last: int) -> Tensor:
    """Sum of term(first) .. term(last - 1) as a balanced binary tree, depth first: memory grows with its depth only."""
    if last - first == 1:
        return term(first)
    middle = (first + last) // 2
    return _pairwise(term, first, middle) + _pairwise(term, middle, last)


def _pairwise_matmul(a: Tensor, b: Tensor) -> Tensor:
    return _pairwise(lambda index: _product(a, b, index), 0, a.shape[-1])


def _pairwise_total(x: Tensor) -> Tensor:
    return _pairwise(lambda index: x[..., index : index + 1], 0, x.shape[-1])


ACCUMULATIONS: Mapping[Accumulator, Accumulation] = MappingProxyType(
    {
        Accumulator.EXACT: Accumulation(_exact_matmul, _exact_total),
        Accumulator.SEQUENTIAL: Accumulation(_sequential_matmul, _sequential_total),
        Accumulator.PAIRWISE: Accumulation(_pairwise_matmul, _pairwise_total),
    }
)
