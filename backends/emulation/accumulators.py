"""Accumulators: how products and terms are added up to one fp32 value."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from tiebreak.backends.emulation import instructions
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.plans import Accumulator
from tiebreak.plugins import Door

Matmul = Callable[[Tensor, Tensor], Tensor]  # (..., m, k) x (..., k, n) -> (..., m, n), fp32 in and out
_AT_ONCE = 2**18  # elements of an operand, at most: 2 MB in fp64


def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    (m, k), n = a.shape[-2:], b.shape[-1]
    at_once, heads = max(1, _AT_ONCE // max(1, m * k, k * n, m * n)), a.shape[:-2].numel()
    if heads <= at_once or a.shape[:-2] != b.shape[:-2] or a.device.type != "cpu":
        return (a.double() @ b.double()).float()
    # A few heads at a time: what is in fp64 stays in a core's cache.
    product = torch.empty(heads, m, n, dtype=torch.float32)
    for x, y, piece in zip(*(torch.split(t.flatten(0, -3), at_once) for t in (a, b, product)), strict=True):
        piece.copy_(x.double() @ y.double())
    return product.view(*a.shape[:-2], m, n)


def _of_bf16(instruction: Matmul, a: Tensor, b: Tensor) -> Tensor:
    """Return a product by an instruction that takes bf16 alone; of wider operands it is a product of fp32, exact."""
    return (instruction if all(map(instructions.holds_bf16, (a, b))) else _exact_matmul)(a, b)


def _rounded_products(a: Tensor, b: Tensor) -> Tensor:
    """Return a product whose terms are rounded to bf16 each, then added up in fp32, one after another."""
    total = a.new_zeros(*a.shape[:-1], b.shape[-1])
    for term in range(a.shape[-1]):
        total += round_to(a[..., term : term + 1] * b[..., term : term + 1, :], BF16)
    return total


#: The core's own; those of a device come with its backend.
MATMULS: Mapping[Accumulator, Matmul] = {
    Accumulator.EXACT: _exact_matmul,
    Accumulator.SEQUENTIAL: instructions.sequential_matmul,
    Accumulator.ROUNDED: _rounded_products,
    Accumulator.BFMMLA: partial(_of_bf16, instructions.bfmmla_matmul),
    Accumulator.VDPBF16: partial(_of_bf16, instructions.vdpbf16_matmul),
    Accumulator.AMX: partial(_of_bf16, instructions.amx_matmul),
}


@cache
def matmul_by(accumulator: Accumulator) -> Matmul:
    """Return the product that adds up so, of a device what its backend brings; CannotRunError: none does."""
    if accumulator in MATMULS:
        return MATMULS[accumulator]
    for each in Door[Any]("tiebreak.backends").usable().values():
        own: Mapping[Accumulator, Matmul] = each.accumulators
        if accumulator in own:
            return own[accumulator]
    raise CannotRunError(f"no backend here says how products are added up by {accumulator.name.lower()}")


def row_total(x: Tensor, accumulator: Accumulator) -> Tensor:
    """Return sums of rows, (..., k) -> (..., 1), fp32: exact and rounded once, or by a balanced binary tree in fp32."""
    if accumulator is Accumulator.EXACT:
        return x.sum(-1, keepdim=True, dtype=torch.float64).float()
    half = x.shape[-1] // 2
    return row_total(x[..., :half], accumulator) + row_total(x[..., half:], accumulator) if half else x
