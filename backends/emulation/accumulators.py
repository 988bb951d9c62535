"""Accumulators: how products and terms are added up to one fp32 value."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.formats import FP32, Rounding
from tiebreak.kernels.plans import Accumulator

_NO_EXPONENT = -(2**15)  # of a zero: below that of any product


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


@dataclass(frozen=True)
class _TensorCore:
    """One step of a tensor core: some products and the sum so far, added at once."""

    products: int  # of a step
    fraction_bits: int  # that each term keeps below the largest exponent


# MMA-Sim, arXiv 2511.10909. A K of 16 is two steps on Ampere and Ada.
_AMPERE = _TensorCore(products=8, fraction_bits=24)
_HOPPER = _TensorCore(products=16, fraction_bits=25)


def _tensor_core_matmul(core: _TensorCore, a: Tensor, b: Tensor) -> Tensor:
    """Step after step: terms are cut off below the largest exponent's last bit, summed exactly, rounded toward zero."""
    heads = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2])  # type: ignore[no-untyped-call]
    shape = (*heads, a.shape[-2], b.shape[-1])
    total = torch.zeros(shape, device=a.device)
    columns = b.transpose(-1, -2)
    for start in range(0, a.shape[-1], core.products):
        step = slice(start, start + core.products)
        total = _add_at_once(core, a[..., :, None, step], columns[..., None, :, step], total[..., None])
    return total


def _add_at_once(core: _TensorCore, a: Tensor, b: Tensor, addend: Tensor) -> Tensor:
    """Sum of a * b over the last dimension and of the addend, whose last dimension is 1."""
    products = a.double() * b.double()
    terms = torch.cat([products, addend.double().expand(*products.shape[:-1], 1)], -1)
    # The hardware adds the operands' exponents: those of the products themselves may be one higher.
    exponents = torch.cat([_exponent(a) + _exponent(b), _exponent(addend).expand(*products.shape[:-1], 1)], -1)
    largest = exponents.masked_fill(terms == 0, _NO_EXPONENT).amax(-1, keepdim=True)
    scale = torch.ldexp(torch.ones_like(terms[..., :1]), core.fraction_bits - largest.clamp(min=-300))
    total = (terms * scale).trunc().sum(-1) / scale[..., 0]
    rounded = round_to(total, FP32, Rounding.TOWARD_ZERO)
    plain = terms.sum(-1)
    return torch.where(plain.isfinite(), rounded, plain).float()


def _exponent(x: Tensor) -> Tensor:
    return torch.frexp(x)[1] - 1


ACCUMULATIONS: Mapping[Accumulator, Accumulation] = MappingProxyType(
    {
        Accumulator.EXACT: Accumulation(_exact_matmul, _exact_total),
        Accumulator.AMPERE: Accumulation(partial(_tensor_core_matmul, _AMPERE), _pairwise_total),
        Accumulator.HOPPER: Accumulation(partial(_tensor_core_matmul, _HOPPER), _pairwise_total),
    }
)
