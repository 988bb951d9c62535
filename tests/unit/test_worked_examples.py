"""The papers' worked examples, on the arithmetic of every backend that runs here."""

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
# The paper's table of all additions of two significands of one binade, told by their last two bits (section 3.3.2):
# ten, order aside.
TWO_BIT_ADDITIONS = list(combinations_with_replacement(range(4), 2))


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


@pytest.mark.parametrize(
    ("first", "exact", "rounded", "error", "printed"),
    [
        # arXiv 2510.04212 v2, section 3.3.2: -2.40625 with a remainder of 0.00087 below it.
        (-2.4071154594421387, -4.703990459442139, -4.71875, -0.014759540557861328, -4.71875),
        # v1, section 3.3.2: an exact tie between -4.6875 (even) and -4.71875 (odd). What it prints is an erratum.
        (-2.40625, -4.703125, -4.6875, 0.015625, -4.71875),
    ],
    ids=["v2", "v1"],
)
def test_addition_rounds_as_ties_to_even_says_which_v1_does_not_print(
    backend: Backend, first: float, exact: float, rounded: float, error: float, printed: float
) -> None:
    total = fp32(first) + fp32(-2.296875)
    in_bf16 = to_bf16(backend, total).item()
    assert total.double().item() == exact
    assert in_bf16 == rounded
    assert in_bf16 - exact == error
    assert (in_bf16 == printed) is (first != -2.40625)


@pytest.mark.parametrize(("a", "b"), TWO_BIT_ADDITIONS)
def test_a_remainder_makes_the_rounding_bit_round_away_and_without_it_ties_go_to_even(
    backend: Backend, a: int, b: int
) -> None:
    numbers = [-(2.0 + bits * 2.0**-6) for bits in (a, b)]
    exact, shifted_out = sum(numbers), (a + b) & 1
    assert to_bf16(backend, fp32(*numbers)).tolist() == numbers, "the operands are bf16 numbers"
    assert to_bf16(backend, fp32(exact + _REMAINDER)).item() == exact - 0.5 * _ULP * shifted_out
    rounded = to_bf16(backend, fp32(exact)).item()
    assert abs(rounded - exact) == 0.5 * _ULP * shifted_out
    assert (rounded / _ULP) % 2 == 0 or not shifted_out


def test_half_even_is_fair_on_ties_half_up_is_not_and_a_remainder_is_as_unfair(backend: Backend) -> None:
    """The commentary (kexue.fm, archive 11371): half up errs by +1/2 ulp on every tie, half even by 0 on average.

    Any remainder, however small, turns half even into half up.
    """
    numbers = 2.0 + torch.arange(128, dtype=torch.float32) * 2.0**-6
    sums = (numbers[:, None] + numbers[None, :]).flatten()
    ties = sums[(sums / (_ULP / 2)) % 2 == 1]

    def mean_error(rounded: Tensor) -> float:
        return ((rounded.double() - ties.double()) / _ULP).mean().item()

    half_up = Cast(BF16, Rounding.TIES_AWAY)  # of positive numbers
    assert mean_error(to_bf16(backend, ties)) == 0.0
    assert mean_error(BACKENDS["emulation"].arithmetic.cast(ties, half_up)) == 0.5
    assert mean_error(to_bf16(backend, ties - _REMAINDER)) == 0.5
