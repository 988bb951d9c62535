"""The emulation's accumulators against sums written out one addition at a time."""

from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tiebreak.backends.emulation.accumulators import matmul_by, row_total
from tiebreak.backends.emulation.tensor_cores import core_of, tensor_core_matmul
from tiebreak.kernels.plans import Accumulator

pytestmark = pytest.mark.quick

Array = npt.NDArray[Any]


def _exact(terms: list[np.float32]) -> np.float32:
    """The sum of rationals; here it always fits fp64, so that there is one rounding."""
    total = sum((Fraction(float(term)) for term in terms), Fraction(0))
    assert Fraction(float(total)) == total, "choose terms whose sum fits fp64"
    return np.float32(float(total))


def _pairwise(terms: list[np.float32]) -> np.float32:
    if len(terms) == 1:
        return terms[0]
    half = len(terms) // 2
    return np.float32(_pairwise(terms[:half]) + _pairwise(terms[half:]))


# What core_of calls them: tests/unit/test_tensor_cores.py holds all that it knows to rationals.
CORES = {
    Accumulator.VOLTA: ("sm_70", "fp16"),
    Accumulator.AMPERE: ("sm_80", "bf16"),
    Accumulator.HOPPER: ("sm_90", "bf16"),
    Accumulator.CDNA3: ("gfx942", "bf16"),
    Accumulator.ADA_FP8: ("sm_89", "fp8_e4m3"),
    Accumulator.HOPPER_FP8: ("sm_90", "fp8_e4m3"),
}


def _terms(*shape: int, seed: int = 0) -> Array:
    """Both signs, up to about 2^5, multiples of 2^-26: most sums round in fp32, and all fit fp64."""
    rng = np.random.default_rng(seed)
    scaled = rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 3, shape)
    return (np.round(scaled * 2.0**26) / 2.0**26).astype(np.float32)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 33, 100])
@pytest.mark.parametrize("accumulator", Accumulator, ids=lambda accumulator: accumulator.value)
def test_a_row_is_summed_exactly_or_as_a_balanced_tree(accumulator: Accumulator, length: int) -> None:
    x = _terms(2, 5, length)
    total = row_total(torch.from_numpy(x), accumulator)
    add = _exact if accumulator is Accumulator.EXACT else _pairwise
    assert total.dtype == torch.float32
    assert np.array_equal(total.numpy(), np.array([[[add(list(row))] for row in rows] for rows in x]))
    if length > 7:
        assert [_exact(list(row)) for row in x[0]] != [_pairwise(list(row)) for row in x[0]]


@pytest.mark.parametrize("length", [1, 7, 100])
def test_an_exact_product_is_rounded_once(length: int) -> None:
    # Values of 8 bits, whose products fp32 holds exactly.
    a, b = (torch.from_numpy(x).bfloat16().float() for x in (_terms(2, 3, length), _terms(2, length, 4, seed=1)))
    product = matmul_by(Accumulator.EXACT)(a, b)
    assert product.shape == (2, 3, 4)
    assert product.dtype == torch.float32
    for batch, row, column in np.ndindex(2, 3, 4):
        terms = list((a[batch, row] * b[batch, :, column]).numpy())
        assert product[batch, row, column].item() == _exact(terms)


def test_products_may_be_rounded_to_bf16_before_they_are_added_up() -> None:
    a, b = (torch.from_numpy(x).bfloat16().float() for x in (_terms(2, 3, 33), _terms(2, 33, 4, seed=1)))
    product = matmul_by(Accumulator.ROUNDED)(a, b)
    for batch, row, column in np.ndindex(2, 3, 4):
        terms = (a[batch, row] * b[batch, :, column]).bfloat16().float().numpy()
        assert product[batch, row, column].item() == np.cumsum(terms, dtype=np.float32)[-1]
    assert not torch.equal(product, matmul_by(Accumulator.EXACT)(a, b))


def test_an_exact_product_does_not_round_its_products() -> None:
    # (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24, but the square is a tie of fp32 whose even neighbour lacks the last term.
    a, b = torch.tensor([[1.0 + 2.0**-12, -1.0]]), torch.tensor([[1.0 + 2.0**-12], [1.0]])
    assert matmul_by(Accumulator.EXACT)(a, b).item() == 2.0**-11 + 2.0**-24


@pytest.mark.parametrize("accumulator", CORES, ids=lambda accumulator: accumulator.value)
def test_a_product_is_added_to_zero_in_its_core(accumulator: Accumulator) -> None:
    a, b = torch.from_numpy(_terms(2, 3, 70)), torch.from_numpy(_terms(2, 70, 4, seed=1))
    product = matmul_by(accumulator)(a, b)
    assert torch.equal(product, tensor_core_matmul(a, b, torch.zeros(2, 3, 4), core_of(*CORES[accumulator])))
    others = (matmul_by(other)(a, b) for other in Accumulator if other is not accumulator)
    assert not any(torch.equal(product, other) for other in others)
