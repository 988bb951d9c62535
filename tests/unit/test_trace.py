"""The paper's equation 5: the error of O-bar key by key, and where it steps."""

from itertools import product

import torch
from torch import Tensor

from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, FP16, ulp
from tiebreak.kernels.reference import reference
from tiebreak.matrix.traces import Trace, error_trace, trace
from tiebreak.studies.cells import CASES

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
    assert Trace(torch.zeros(5), p_bar).at_one == [1, 3]
    # fp16 is spaced by 2^-9 and 2^-8 there: it holds both values and their sum.
    pair = torch.tensor([-2.40625, -2.296875])
    assert error_trace(torch.ones(2), pair, BF16).tolist() == [0.0, 0.015625]
    assert error_trace(torch.ones(2), pair, FP16).tolist() == [0.0, 0.0]


def _traces(name: str, kernel: str = "flash@paper") -> list[tuple[Trace, Tensor]]:
    """Traces of every eighth column of every head's first two rows, each with its steps in ulps of O-bar."""
    inputs, traces = CASES[name].make(0, 0, HEADS, BF16), []
    ref, declaration = reference(inputs), parse_declaration(kernel)
    for head, row, column in product(range(HEADS), range(2), range(0, 64, 8)):
        traced = trace(declaration, inputs, ref, head=head, row=row, column=column)
        o_bar = (traced.p_bar.double() * inputs.v[0, head, :, column].double()).sum()
        steps = torch.diff(traced.error, prepend=torch.zeros(1, dtype=torch.float64))
        traces.append((traced, steps.abs() / ulp(o_bar[None], BF16)))
    return traces


def test_the_error_steps_only_where_the_probability_is_one_which_none_is_where_a_rule_shifts_further() -> None:
    # A tail 12 or more below adds at most 126 e^-12 |V| < 3e-3 in all. At a maximum the partial sum is that less than a
    # multiple of 2^-7, or 2^-6 from |V| = 2 on, while the boundaries of rounding are odd multiples of half an ulp: the
    # tail takes no partial sum over one, except off a tie, which the first tail key breaks. So a step of over a quarter
    # of O-bar's ulp happens at a maximum, if the last maximum has a tail key before it.
    steps_at_one = 0
    for traced, steps in _traces("tied_maxima[k=3]"):
        assert len(traced.at_one) == 3
        assert traced.at_one != [0, 1, 2]
        large = set((steps > 0.25).nonzero().flatten().tolist())
        assert large <= set(traced.at_one)
        steps_at_one += len(large)
    # Of the sums of two bf16 numbers of a binade every other is a tie: half of 256 traces, less 5 standard deviations.
    assert steps_at_one >= 256 / 2 - 5 * (256 / 4) ** 0.5
    # The traced case. Its tail, 9 below, can take a partial sum of one maximum over a boundary: a whole ulp there, but
    # half an ulp of O-bar, which lies in the binade above.
    assert CASES["tied_maxima[k=2]"].traced
    for traced, steps in _traces("tied_maxima[k=2]"):
        assert set((steps > 0.5).nonzero().flatten().tolist()) <= set(traced.at_one)
    assert all(traced.at_one == [] for traced, _ in _traces("tied_maxima[k=2]", "stabilized@paper"))
