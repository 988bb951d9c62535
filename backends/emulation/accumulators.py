"""Accumulators: how products and terms are added up to one fp32 value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.backends.emulation.targets import core_of
from tiebreak.backends.emulation.tensor_cores import tensor_core_matmul
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


def _pairwise_total(x: Tensor) -> Tensor:
    """In fp32, as a balanced binary tree, depth first."""
    length = x.shape[-1]
    if length == 1:
        return x
    return _pairwise_total(x[..., : length // 2]) + _pairwise_total(x[..., length // 2 :])


def _tensor_core(target: str, operands: str) -> Accumulation:
    core = core_of(target, operands)

    def matmul(a: Tensor, b: Tensor) -> Tensor:
        return tensor_core_matmul(a, b, torch.zeros((), device=a.device), core)

    return Accumulation(matmul, _pairwise_total)


ACCUMULATIONS: Mapping[Accumulator, Accumulation] = {
    Accumulator.EXACT: Accumulation(_exact_matmul, _exact_total),
    Accumulator.VOLTA: _tensor_core("sm_70", "fp16"),
    Accumulator.AMPERE: _tensor_core("sm_80", "bf16"),
    Accumulator.HOPPER: _tensor_core("sm_90", "bf16"),
    Accumulator.CDNA3: _tensor_core("gfx942", "bf16"),
    Accumulator.ADA_FP8: _tensor_core("sm_89", "fp8_e4m3"),
    Accumulator.HOPPER_FP8: _tensor_core("sm_90", "fp8_e4m3"),
}
