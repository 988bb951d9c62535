"""Accumulators: how products and terms are added up to one fp32 value."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from tiebreak.backends.emulation.instructions import amx_matmul, bfmmla_matmul, sequential_matmul, vdpbf16_matmul
from tiebreak.backends.emulation.tensor_cores import core_of, tensor_core_matmul
from tiebreak.kernels.plans import Accumulator

Matmul = Callable[[Tensor, Tensor], Tensor]  # (..., m, k) x (..., k, n) -> (..., m, n), fp32 in and out
_AT_ONCE = 2**18  # elements of an operand, at most: 2 MB in fp64


def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape[-2:], b.shape[-1]
    at_once, heads = max(1, _AT_ONCE // max(1, m * k, k * n, m * n)), a.shape[:-2].numel()
    if heads <= at_once or a.shape[:-2] != b.shape[:-2] or a.device.type != "cpu":
        return (a.double() @ b.double()).float()
    # A few heads at a time: what is in fp64 stays in a core's cache.
    pieces = zip(*(torch.split(tensor.flatten(0, -3), at_once) for tensor in (a, b)), strict=True)
    product = torch.cat([(ours.double() @ theirs.double()).float() for ours, theirs in pieces])
    return product.reshape(*a.shape[:-2], m, n)


def _on_tensor_cores(target: str, operands: str) -> Matmul:
    core = core_of(target, operands)
    return lambda a, b: tensor_core_matmul(a, b, torch.zeros((), device=a.device), core)


MATMULS: Mapping[Accumulator, Matmul] = {
    Accumulator.EXACT: _exact_matmul,
    Accumulator.SEQUENTIAL: sequential_matmul,
    Accumulator.VOLTA: _on_tensor_cores("sm_70", "fp16"),
    Accumulator.AMPERE: _on_tensor_cores("sm_80", "bf16"),
    Accumulator.HOPPER: _on_tensor_cores("sm_90", "bf16"),
    Accumulator.CDNA3: _on_tensor_cores("gfx942", "bf16"),
    Accumulator.BFMMLA: bfmmla_matmul,
    Accumulator.VDPBF16: vdpbf16_matmul,
    Accumulator.AMX: amx_matmul,
    Accumulator.ADA_FP8: _on_tensor_cores("sm_89", "fp8_e4m3"),
    Accumulator.HOPPER_FP8: _on_tensor_cores("sm_90", "fp8_e4m3"),
}


def row_total(x: Tensor, accumulator: Accumulator) -> Tensor:
    """Return sums of rows, (..., k) -> (..., 1), fp32: exact and rounded once, or by a balanced binary tree in fp32."""
    if accumulator is Accumulator.EXACT:
        return x.sum(-1, keepdim=True, dtype=torch.float64).float()
    half = x.shape[-1] // 2
    return row_total(x[..., :half], accumulator) + row_total(x[..., half:], accumulator) if half else x
