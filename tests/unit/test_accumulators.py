"""The emulation's accumulators against sums written out one addition at a time."""

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tiebreak.backends.emulation.accumulators import ACCUMULATIONS
from tiebreak.backends.emulation.targets import core_of
from tiebreak.backends.emulation.tensor_cores import tensor_core_matmul
from tiebreak.kernels.plans import Accumulator

Array = npt.NDArray[Any]
LENGTHS = [1, 2, 3, 7, 33, 64, 100]


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
# Of row sums: those of a tensor core's plans are a balanced tree's.
TOTALS: dict[Accumulator, Callable[[list[np.float32]], np.float32]] = {
    Accumulator.EXACT: _exact,
    # tests/unit/test_bf16_instructions.py has the last three's products, test_probes.py those of the first.
    **dict.fromkeys(
        (Accumulator.SEQUENTIAL, *CORES, Accumulator.BFMMLA, Accumulator.VDPBF16, Accumulator.AMX), _pairwise
    ),
}

each_length = pytest.mark.parametrize("length", LENGTHS)


def _terms(*shape: int, seed: int = 0) -> Array:
    """Both signs, up to about 2^5, multiples of 2^-26: most sums round in fp32, and all fit fp64."""
    rng = np.random.default_rng(seed)
    scaled = rng.standard_normal(shape) * 2.0 ** rng.integers(-4, 3, shape)
    return (np.round(scaled * 2.0**26) / 2.0**26).astype(np.float32)


def _bf16_terms(*shape: int, seed: int = 0) -> Array:
    """Values of 8 bits, whose products fp32 holds exactly."""
    return torch.from_numpy(_terms(*shape, seed=seed)).bfloat16().float().numpy()


def test_every_accumulator_is_held_to_an_oracle() -> None:
    assert set(TOTALS) == set(Accumulator) == set(ACCUMULATIONS)


@pytest.mark.parametrize(
    ("accumulator", "total"),
    [
        # fp32 is spaced by 2 from 2^24 on. The true sum, 2^24 + 3, is a tie, and the even neighbour is the upper one.
        (Accumulator.EXACT, 2.0**24 + 4),
        # (2^24 + 1) + (1 + 1): the first pair is a tie that goes back to the even 2^24, the second is kept.
        (Accumulator.AMPERE, 2.0**24 + 2),
        (Accumulator.HOPPER, 2.0**24 + 2),
    ],
    ids=["exact", "ampere", "hopper"],
)
def test_a_row_sum_that_tells_a_tree_from_an_exact_sum_by_hand(accumulator: Accumulator, total: float) -> None:
    terms = torch.tensor([2.0**24, 1.0, 1.0, 1.0])
    assert ACCUMULATIONS[accumulator].total(terms).tolist() == [total]


@each_length
@pytest.mark.parametrize("accumulator", TOTALS, ids=lambda accumulator: accumulator.value)
def test_a_total_adds_in_the_accumulators_order(accumulator: Accumulator, length: int) -> None:
    x = _terms(2, 5, length)
    total = ACCUMULATIONS[accumulator].total(torch.from_numpy(x))
    expected = [[[TOTALS[accumulator](list(row))] for row in rows] for rows in x]
    assert total.dtype == torch.float32
    assert np.array_equal(total.numpy(), np.array(expected))


@each_length
def test_an_exact_product_is_rounded_once(length: int) -> None:
    a, b = _bf16_terms(2, 3, length), _bf16_terms(2, length, 4, seed=1)
    product = ACCUMULATIONS[Accumulator.EXACT].matmul(torch.from_numpy(a), torch.from_numpy(b))
    assert product.shape == (2, 3, 4)
    assert product.dtype == torch.float32
    for batch, row, column in np.ndindex(2, 3, 4):
        assert product[batch, row, column].item() == _exact(list(a[batch, row] * b[batch, :, column]))


def test_an_exact_product_does_not_round_its_products() -> None:
    # (1 + 2^-12)^2 - 1 = 2^-11 + 2^-24, but the square is a tie of fp32 whose even neighbour lacks the last term.
    a, b = torch.tensor([[1.0 + 2.0**-12, -1.0]]), torch.tensor([[1.0 + 2.0**-12], [1.0]])
    assert ACCUMULATIONS[Accumulator.EXACT].matmul(a, b).item() == 2.0**-11 + 2.0**-24


@pytest.mark.parametrize("accumulator", CORES, ids=lambda accumulator: accumulator.value)
def test_a_product_is_added_to_zero_in_its_core(accumulator: Accumulator) -> None:
    a, b = torch.from_numpy(_terms(2, 3, 70)), torch.from_numpy(_terms(2, 70, 4, seed=1))
    product = ACCUMULATIONS[accumulator].matmul(a, b)
    assert torch.equal(product, tensor_core_matmul(a, b, torch.zeros(2, 3, 4), core_of(*CORES[accumulator])))
    others = (ACCUMULATIONS[other].matmul(a, b) for other in Accumulator if other is not accumulator)
    assert not any(torch.equal(product, other) for other in others)


@pytest.mark.parametrize("length", [33, 64, 100])
def test_the_oracles_differ_on_the_inputs_they_judge(length: int) -> None:
    rows = [list(row) for row in _terms(2, 5, length).reshape(10, length)]
    assert [_exact(row) for row in rows] != [_pairwise(row) for row in rows]
