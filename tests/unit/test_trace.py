"""The paper's equation 5: the error of O-bar key by key, and where it steps."""

from functools import cache

import pytest
import torch
from torch import Tensor

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.trace import Trace, error_trace, trace
from tiebreak.kernels.formats import BF16, FP16, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import Reference, reference
from tiebreak.kernels.roster import composed_kernel

CASES = {case.name: case for case in SCRIPTED}
HEADS = 16


def test_the_error_of_a_row_is_as_worked_out_by_hand() -> None:
    # The paper's v1 example with a tail. bf16 is spaced by 2^-6 in [2, 4) and by 2^-5 in [4, 8).
    p_bar = torch.tensor([2.0**-10, 1.0, 0.0, 1.0, 2.0**-10])
    v = torch.tensor([-1.0, -2.40625, -3.0, -2.296875, 1.0])
    expected = [
        0.0,  # -2^-10 is a bf16 number
        2.0**-10,  # -2.40625 - 2^-10 goes back to -2.40625
        2.0**-10,  # nothing is added
        -4.71875 + 4.703125 + 2.0**-10,  # the remainder breaks the tie of -4.703125 away from zero, to -4.71875
        -4.6875 + 4.703125,  # without a remainder the tie goes to even: -4.6875 = -150/32
    ]
    assert error_trace(p_bar, v, BF16).tolist() == expected


def test_the_error_depends_on_the_format() -> None:
    # fp16 is spaced by 2^-9 and 2^-8 there: it holds both values and their sum.
    p_bar, v = torch.tensor([1.0, 1.0]), torch.tensor([-2.40625, -2.296875])
    assert error_trace(p_bar, v, BF16).tolist() == [0.0, 0.015625]
    assert error_trace(p_bar, v, FP16).tolist() == [0.0, 0.0]


def test_at_one_lists_the_keys_whose_rounded_probability_is_one() -> None:
    p_bar = torch.tensor([1.0, 0.5, 1.0 - 2.0**-8, 1.0])
    assert Trace(torch.zeros(4, dtype=torch.float64), p_bar).at_one == [0, 3]


@cache
def _case(name: str) -> tuple[AttentionInputs, Reference]:
    inputs = CASES[name].make(0, 0, HEADS, BF16)
    return inputs, reference(inputs)


def _declaration(kernel: str) -> Declaration:
    declaration = composed_kernel(kernel).declaration
    assert declaration is not None
    return declaration


def _traces(name: str, kernel: str = "flash@paper") -> list[tuple[Trace, Tensor]]:
    """Traces of every eighth column of every head's first two rows, each with its steps in ulps of O-bar."""
    inputs, ref = _case(name)
    traces = []
    for head in range(HEADS):
        for row in range(2):
            for column in range(0, 64, 8):
                traced = trace(_declaration(kernel), inputs, ref, head=head, row=row, column=column)
                o_bar = (traced.p_bar.double() * inputs.v[0, head, :, column].double()).sum()
                steps = torch.diff(traced.error, prepend=torch.zeros(1, dtype=torch.float64))
                traces.append((traced, steps.abs() / ulp(o_bar[None], BF16)))
    return traces


@pytest.mark.parametrize(("name", "maxima"), [("tied_maxima_positive_v", 2), ("tied_maxima[k=3]", 3)])
def test_the_error_steps_only_where_the_probability_is_one(name: str, maxima: int) -> None:
    # A tail 12 or more below adds at most 126 e^-12 |V| < 3e-3 in all. At a maximum the partial sum is that less than a
    # multiple of 2^-7, or 2^-6 from |V| = 2 on, while the boundaries of rounding are odd multiples of half an ulp: the
    # tail takes no partial sum over one, except off a tie, which the first tail key breaks. So a step of over a quarter
    # of O-bar's ulp happens at a maximum, if the last maximum has a tail key before it.
    steps_at_one = 0
    for traced, steps in _traces(name):
        assert len(traced.at_one) == maxima
        assert traced.at_one != list(range(maxima))
        large = set((steps > 0.25).nonzero().flatten().tolist())
        assert large <= set(traced.at_one)
        steps_at_one += len(large)
    # Of the sums of two bf16 numbers of a binade every other is a tie: half of 256 traces, less 5 standard deviations.
    assert steps_at_one >= 256 / 2 - 5 * (256 / 4) ** 0.5


def test_with_a_thicker_tail_steps_of_over_half_an_ulp_happen_only_where_the_probability_is_one() -> None:
    # The traced case. Its tail, 9 below, can take a partial sum of one maximum over a boundary: a whole ulp there, but
    # half an ulp of O-bar, which lies in the binade above.
    assert CASES["tied_maxima[k=2]"].traced
    for traced, steps in _traces("tied_maxima[k=2]"):
        assert set((steps > 0.5).nonzero().flatten().tolist()) <= set(traced.at_one)


@pytest.mark.parametrize("kernel", ["stabilized@paper", "stabilized_v1@paper", "fixed_offset@paper"])
def test_a_rule_that_shifts_further_leaves_no_probability_at_one(kernel: str) -> None:
    assert all(traced.at_one == [] for traced, _ in _traces("tied_maxima_positive_v", kernel))


@pytest.mark.parametrize("kernel", ["flash@paper", "as_printed_v1@paper"])
def test_the_trace_ends_away_from_zero_on_average(kernel: str) -> None:
    # V is positive: an error away from zero is positive. In ulps of O-bar it is the case's bias, +0.23, with one head's
    # spread of 1/sqrt(12) ulp over 16 independent heads.
    inputs, _ = _case("tied_maxima_positive_v")
    last = [traced.error[-1].item() / 2.0**-5 for traced, _ in _traces("tied_maxima_positive_v", kernel)]
    assert (inputs.v > 0).all()
    assert sum(last) / len(last) > 0.23 - 5 * (1 / 12 / HEADS) ** 0.5 / 8**0.5
