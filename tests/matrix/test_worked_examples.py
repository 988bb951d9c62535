"""The papers' worked examples, on the arithmetic of every backend that runs here."""

from dataclasses import dataclass
from itertools import combinations_with_replacement

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.kernels.formats import BF16, Rounding
from tiebreak.kernels.plans import Cast

_REMAINDER = -(2.0**-12)  # of the sign of the operands, far below bf16's last bit and well within fp32's
_ULP = 2.0**-5  # of bf16 in [4, 8)


@dataclass(frozen=True)
class Addition:
    """Two fp32 numbers whose fp32 sum is then rounded to bf16, ties to even."""

    name: str
    first: float
    second: float
    exact: float  # their sum, which fp32 holds exactly
    rounded: float  # that sum in bf16
    error: float  # rounded less exact
    printed: float  # what the source prints as the rounded sum
    source: str

    @property
    def erratum(self) -> bool:
        """Whether the source prints another result than ties to even gives."""
        return self.printed != self.rounded


ADDITIONS = (
    Addition(
        "v2",
        first=-2.4071154594421387,
        second=-2.296875,
        exact=-4.703990459442139,
        rounded=-4.71875,
        error=-0.014759540557861328,
        printed=-4.71875,
        source="arXiv 2510.04212 v2, section 3.3.2: -2.40625 with a remainder of 0.00087 below it",
    ),
    Addition(
        "v1",
        first=-2.40625,
        second=-2.296875,
        exact=-4.703125,
        rounded=-4.6875,
        error=0.015625,
        printed=-4.71875,
        source="arXiv 2510.04212 v1, section 3.3.2: an exact tie between -4.6875 (even) and -4.71875 (odd)",
    ),
)


@dataclass(frozen=True)
class TwoBitAddition:
    """Two significands of one binade, told by their last two bits; their sum is one bit too long for the format."""

    a: int  # last two bits of the first, 0 .. 3
    b: int  # last two bits of the second, 0 .. 3

    @property
    def rounding_bit(self) -> int:
        """The bit that is shifted out."""
        return (self.a + self.b) & 1

    def operands(self) -> tuple[float, float]:
        """Two negative bf16 numbers in [-4, -2) that end in these bits."""
        return -(2.0 + self.a * 2.0**-6), -(2.0 + self.b * 2.0**-6)


# The paper's table of all additions of two 2-bit endings (section 3.3.2): ten, order aside.
TWO_BIT_ADDITIONS = tuple(TwoBitAddition(a, b) for a, b in combinations_with_replacement(range(4), 2))


@pytest.fixture(params=list(BACKENDS.values()), ids=list(BACKENDS))
def backend(request: pytest.FixtureRequest) -> Backend:
    backend: Backend = request.param
    reason = backend.unavailable()
    if reason is not None:
        pytest.skip(reason)
    backend.set_up()
    return backend


def to_bf16(backend: Backend, x: Tensor) -> Tensor:
    return backend.arithmetic.cast(x.to(backend.device), Cast(BF16)).cpu()


def fp32(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


@pytest.mark.parametrize("addition", ADDITIONS, ids=lambda addition: addition.name)
def test_addition_rounds_as_ties_to_even_says(backend: Backend, addition: Addition) -> None:
    exact = fp32(addition.first) + fp32(addition.second)
    rounded = to_bf16(backend, exact)
    assert exact.double().item() == addition.exact
    assert rounded.item() == addition.rounded
    assert rounded.double().item() - exact.double().item() == addition.error


def test_only_v1_prints_another_result_than_ties_to_even() -> None:
    assert [addition.name for addition in ADDITIONS if addition.erratum] == ["v1"]


@pytest.mark.parametrize("addition", TWO_BIT_ADDITIONS, ids=lambda addition: f"{addition.a:02b}+{addition.b:02b}")
def test_a_remainder_makes_the_rounding_bit_round_away(backend: Backend, addition: TwoBitAddition) -> None:
    a, b = addition.operands()
    exact = a + b
    assert to_bf16(backend, fp32(a, b)).tolist() == [a, b], "the operands are bf16 numbers"
    away = to_bf16(backend, fp32(exact + _REMAINDER)).item()
    assert away == exact - 0.5 * _ULP * addition.rounding_bit


@pytest.mark.parametrize("addition", TWO_BIT_ADDITIONS, ids=lambda addition: f"{addition.a:02b}+{addition.b:02b}")
def test_without_a_remainder_ties_go_to_even(backend: Backend, addition: TwoBitAddition) -> None:
    exact = sum(addition.operands())
    rounded = to_bf16(backend, fp32(exact)).item()
    assert abs(rounded - exact) == 0.5 * _ULP * addition.rounding_bit
    assert (rounded / _ULP) % 2 == 0 or not addition.rounding_bit


def test_there_are_ten_two_bit_additions_and_four_have_a_rounding_bit() -> None:
    assert len(TWO_BIT_ADDITIONS) == 10
    assert sum(addition.rounding_bit for addition in TWO_BIT_ADDITIONS) == 4


def _ties() -> Tensor:
    """Every sum of two bf16 numbers of [2, 4) that is a tie in bf16."""
    numbers = 2.0 + torch.arange(128, dtype=torch.float32) * 2.0**-6
    sums = (numbers[:, None] + numbers[None, :]).flatten()
    return sums[(sums / (_ULP / 2)) % 2 == 1]


def _mean_error(rounded: Tensor, exact: Tensor) -> float:
    return ((rounded.double() - exact.double()) / _ULP).mean().item()


def test_half_even_is_fair_on_ties_and_half_up_is_not(backend: Backend) -> None:
    """The commentary (kexue.fm, archive 11371): half up errs by +1/2 ulp on every tie, half even by 0 on average."""
    ties = _ties()
    half_up = Cast(BF16, Rounding.TIES_AWAY)  # of positive numbers
    assert _mean_error(to_bf16(backend, ties), ties) == 0.0
    assert _mean_error(BACKENDS["emulation"].arithmetic.cast(ties, half_up), ties) == 0.5


def test_two_large_and_one_small_is_as_unfair_as_half_up(backend: Backend) -> None:
    """The commentary: any remainder, however small, turns half even into half up."""
    ties = _ties()
    assert _mean_error(to_bf16(backend, ties - _REMAINDER), ties) == 0.5
