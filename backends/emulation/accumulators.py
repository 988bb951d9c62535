"""Accumulators: how products and terms are added up to one fp32 value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.backends.emulation.arm import arm_bf16_matmul
from tiebreak.backends.emulation.chains import sequential_matmul
from tiebreak.backends.emulation.targets import core_of
from tiebreak.backends.emulation.tensor_cores import tensor_core_matmul
from tiebreak.backends.emulation.x86 import amx_matmul, vdpbf16_matmul
from tiebreak.kernels.plans import Accumulator

_AT_ONCE = 2**18  # elements of an operand, at most: 2 MB in fp64


@dataclass(frozen=True)
class Accumulation:
    """The two sums an accumulator has to do."""

    matmul: Callable[[Tensor, Tensor], Tensor]  # (..., m, k) x (..., k, n) -> (..., m, n), fp32 in and out
    total: Callable[[Tensor], Tensor]  # (..., k) -> (..., 1), fp32 in and out


def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() < 3 or a.shape[:-2] != b.shape[:-2] or a.device.type != "cpu":
        return (a.double() @ b.double()).float()
    # A few heads at a time: what is in fp64 stays in a core's cache.
    (m, k), n = a.shape[-2:], b.shape[-1]
    at_once = max(1, _AT_ONCE // max(1, m * k, k * n, m * n))
    pieces = zip(*(torch.split(tensor.flatten(0, -3), at_once) for tensor in (a, b)), strict=True)
    product = torch.cat([(ours.double() @ theirs.double()).float() for ours, theirs in pieces])
    return product.reshape(*a.shape[:-2], m, n)


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
    Accumulator.SEQUENTIAL: Accumulation(sequential_matmul, _pairwise_total),
    Accumulator.VOLTA: _tensor_core("sm_70", "fp16"),
    Accumulator.AMPERE: _tensor_core("sm_80", "bf16"),
    Accumulator.HOPPER: _tensor_core("sm_90", "bf16"),
    Accumulator.CDNA3: _tensor_core("gfx942", "bf16"),
    Accumulator.BFMMLA: Accumulation(arm_bf16_matmul, _pairwise_total),
    Accumulator.VDPBF16: Accumulation(vdpbf16_matmul, _pairwise_total),
    Accumulator.AMX: Accumulation(amx_matmul, _pairwise_total),
    Accumulator.ADA_FP8: _tensor_core("sm_89", "fp8_e4m3"),
    Accumulator.HOPPER_FP8: _tensor_core("sm_90", "fp8_e4m3"),
}
