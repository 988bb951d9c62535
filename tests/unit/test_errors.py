"""Errors and verdicts: signed errors by hand, intervals against tables and by simulation, what NaN does to them."""

import math
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.cases.claims import ROWS_ERR_APART, ROWS_ERR_TOGETHER
from tiebreak.cases.errors import (
    Errors,
    by_key_head,
    coherence,
    difference,
    independent_coherence,
    measure,
    merge,
    signed_error_ulps,
    units_of,
)
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import MARGIN_ULPS, ROUNDED_ONCE, BiasVerdict, Interval, interval, judge, quantile
from tiebreak.kernels.formats import BF16, FP16, Format, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import reference

pytestmark = pytest.mark.quick

NAN, INF = math.nan, math.inf
ULP_1 = 2.0**-7  # of bf16 in [1, 2)


@pytest.mark.parametrize(
    ("out", "ref", "expected"),
    [
        (1.0 + ULP_1, 1.0, 1.0),
        (1.0 - ULP_1, 1.0, -1.0),
        (-1.0 - ULP_1, -1.0, 1.0),
        (1.0, 1.0 + ULP_1 / 4, -0.25),
        # The paper's worked example (v2): -4.703990459442139 rounds to -4.71875, and bf16 is spaced by 2^-5 there.
        (-4.71875, -4.703990459442139, 0.014759540557861328 * 32),
        # The ulp is the reference's, just below a power of two as just above it.
        (4.0, 4.0 - 2.0**-6, 1.0),
        (4.0 - 2.0**-6, 4.0, -0.5),
        # What cannot be compared.
        *((out, ref, NAN) for out, ref in ((1.0, 0.0), (-1.0, -0.0), (NAN, 1.0), (1.0, NAN), (-INF, 1.0), (INF, INF))),
    ],
)
def test_an_error_is_positive_away_from_zero_in_ulps_of_the_reference(out: float, ref: float, expected: float) -> None:
    error = signed_error_ulps(torch.tensor([out]), torch.tensor([ref], dtype=torch.float64), BF16)
    assert error.dtype == torch.float64
    assert error.item() == pytest.approx(expected, rel=1e-12, nan_ok=True)
    tiny = 2.0**-24  # fp16's smallest number: below the normal range an ulp is the spacing of the subnormals
    below = signed_error_ulps(torch.tensor([2 * tiny]), torch.tensor([tiny / 2], dtype=torch.float64), FP16)
    assert below.item() == 1.5


# Two-sided quantiles of Student's distribution, as printed in tables.
@pytest.mark.parametrize(
    ("confidence", "freedom", "table"), [(0.999, 15, 4.073), (0.999, 60, 3.460), (0.99, 30, 2.750), (0.95, 120, 1.980)]
)
def test_the_quantile_is_that_of_tables(confidence: float, freedom: int, table: float) -> None:
    # Twice the first term that the expansion leaves out (Abramowitz and Stegun, 26.7.5), and a table's rounding.
    z = quantile(10**9, confidence, looks=1)
    left_out = (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160 / freedom**4
    assert quantile(freedom + 1, confidence, looks=1) == pytest.approx(table, abs=2 * left_out + 5e-4)


def test_an_interval_by_hand() -> None:
    estimate = interval(torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64))
    # Mean 3; squared deviations 4 + 1 + 0 + 9 over 3 degrees of freedom, over 4 samples.
    assert estimate.mean == 3.0
    assert estimate.half_width == pytest.approx(quantile(4) * math.sqrt(14 / 3 / 4))
    assert (estimate.low, estimate.high) == (estimate.mean - estimate.half_width, estimate.mean + estimate.half_width)
    widths = [quantile(64, looks=looks) for looks in (1, 2, 4, 8)]
    assert widths == sorted(set(widths))
    # No sample and one tell nothing.
    none, single = interval(torch.zeros(0)), interval(torch.ones(1))
    assert quantile(0) == quantile(1) == INF
    assert math.isnan(none.mean)
    assert (single.mean, single.half_width) == (1.0, INF)
    assert judge(none) is judge(single) is BiasVerdict.UNDECIDED


@pytest.mark.parametrize(
    ("estimate", "verdict"),
    [
        (Interval(0.23, 0.01), BiasVerdict.BIASED),
        (Interval(-0.23, 0.01), BiasVerdict.BIASED),
        (Interval(0.0, 0.01), BiasVerdict.UNBIASED),
        (Interval(-0.03, 0.01), BiasVerdict.UNBIASED),
        (Interval(0.0, MARGIN_ULPS), BiasVerdict.UNBIASED),  # its ends are the margin's
        (Interval(0.0625, 0.0625 - MARGIN_ULPS), BiasVerdict.UNDECIDED),  # begins on the margin
        (Interval(0.045, 0.01), BiasVerdict.UNDECIDED),
        (Interval(NAN, 0.0), BiasVerdict.UNDECIDED),
        (Interval(0.0, NAN), BiasVerdict.UNDECIDED),
    ],
    ids=lambda value: value.value if isinstance(value, BiasVerdict) else f"{value.mean}+-{value.half_width}",
)
def test_the_verdict_on_an_interval(estimate: Interval, verdict: BiasVerdict) -> None:
    assert judge(estimate) is verdict
    if math.isnan(estimate.mean + estimate.half_width):  # neither inside nor beyond any margin
        assert not any(estimate.is_inside(margin) or estimate.is_beyond(margin) for margin in (0.0, MARGIN_ULPS, INF))


def test_by_key_head_averages_what_shares_a_key_head() -> None:
    # 1 batch entry, 4 query heads in 2 groups, 2 queries, 1 column.
    x = torch.tensor([1.0, 2.0, 3.0, 4.0, 10.0, 20.0, 30.0, 40.0]).reshape(1, 4, 2, 1)
    assert by_key_head(x, groups=2).tolist() == [2.5, 25.0]
    assert by_key_head(x, groups=1).tolist() == [1.5, 3.5, 15.0, 35.0]
    assert by_key_head(x.expand(3, 4, 2, 1), groups=4).tolist() == [13.75] * 3
    x = torch.tensor([[1.0, NAN], [NAN, NAN]]).reshape(1, 2, 2)
    assert by_key_head(x, groups=1).tolist() == pytest.approx([1.0, NAN], nan_ok=True)
    assert _measured(_inputs("random_grouped")).head_bias.numel() == 64 // 4


def _inputs(name: str, fmt: Format = BF16) -> AttentionInputs:
    case = next(case for case in SCRIPTED if case.name == name)
    return case.make(0, 0, 64, fmt)


def _measured(inputs: AttentionInputs, output: Tensor | None = None, delta: Tensor | None = None) -> Errors:
    """The measures of an output, by default the reference's own in the format; the bound is one ulp of 1."""
    ref = reference(inputs)
    out = ref.o.bfloat16().float() if output is None else output
    return measure(out, delta, inputs, ref, torch.full_like(ref.o, ULP_1))


@pytest.mark.parametrize("name", ["random_grouped", "nan_in_q"])
def test_merging_batches_is_measuring_all_at_once(name: str) -> None:
    inputs = _inputs(name)
    parts = (inputs.part(entries) for entries in (slice(1), slice(1, None)))
    whole, merged = _measured(inputs), merge(list(map(_measured, parts)))
    for field in fields(Errors):
        ours, theirs = getattr(merged, field.name), getattr(whole, field.name)
        if isinstance(ours, Tensor):
            # Sums over a head in another order of at most 2^10 fp64 terms.
            assert torch.allclose(ours, theirs, rtol=2.0**-42, atol=2.0**-42, equal_nan=True), field.name
        else:
            assert ours == pytest.approx(theirs, rel=2.0**-42), field.name
    for ours_, theirs_ in ((merged.bias, whole.bias), (merged.delta_bias, whole.delta_bias)):
        assert ours_.mean == pytest.approx(theirs_.mean, rel=1e-9)
        assert ours_.half_width == pytest.approx(theirs_.half_width, rel=1e-9)


def test_an_output_one_ulp_off_is_measured_as_that() -> None:
    inputs = _inputs("random")
    o = reference(inputs).o
    # V is about 1, O within [0.5, 2): ulps of 2^-8 and 2^-7. fp32 holds O only to 2^-24, 2^-16 ulp at most.
    exponent = torch.where(o.abs() < 1, -8.0, -7.0)
    away = (o + o.sign() * 2.0**exponent).float()
    assert (o.abs() > 0.5).all()
    assert (o.abs() < 2).all()
    errors = _measured(inputs, away)
    assert errors.bias.mean == pytest.approx(1.0, abs=2.0**-16)
    assert errors.rms_ulps == pytest.approx(1.0, abs=2.0**-16)
    assert errors.max_ulps == pytest.approx(1.0, abs=2.0**-15)
    assert errors.error_over_bound == pytest.approx(1.0, abs=2.0**-15)
    assert errors.gain > 1
    toward = _measured(inputs, (o - o.sign() * 2.0**exponent).float())
    assert toward.bias.mean == pytest.approx(-1.0, abs=2.0**-16)
    assert toward.gain < 1
    assert [_measured(inputs, out).gain for out in (torch.zeros_like(o), o)] == [0.0, 1.0]


def test_the_bias_of_delta_is_relative_to_its_size_and_that_of_the_output_where_the_kernel_tells_none() -> None:
    inputs = _inputs("random")
    ref = reference(inputs)
    off = ref.delta + 0.01 * ref.delta.abs().mean()
    assert _measured(inputs, delta=off).delta_bias.mean == pytest.approx(0.01)
    assert _measured(inputs, delta=ref.delta).delta_bias.mean == 0.0
    out = ref.o.bfloat16().float()
    delta = (inputs.do.double() * out.double()).sum(-1, keepdim=True)
    assert torch.equal(_measured(inputs, out).head_delta, _measured(inputs, out, delta).head_delta)


def test_what_is_left_out_not_finite_and_missed_is_counted() -> None:
    inputs = _inputs("random")
    ref = reference(inputs)
    o = ref.o.clone()
    o[0, 0, 0, :3] = 0.0
    o[0, 0, 1, :2] = NAN
    out = o.clone()
    out[0, 0, 0, 0] = 1.0  # no sign to err by
    out[0, 0, 1, :2] = torch.tensor([NAN, 1.0])  # the second is finite where the reference is not
    out[0, 0, 2, :5] = torch.tensor([NAN, INF, -INF, NAN, NAN])
    errors = measure(out, None, inputs, replace(ref, o=o), torch.ones_like(o))
    assert (errors.left_out, errors.nonfinite, errors.missed, errors.elements) == (3, 5, 1, o.numel())
    assert math.isfinite(errors.bias.mean)
    assert math.isfinite(errors.rms_ulps)
    assert math.isfinite(errors.gain)
    assert errors.bias.mean == errors.max_ulps == 0.0


def test_heads_beside_one_of_nan_have_the_same_bits_as_where_nothing_is_left_out() -> None:
    inputs = _inputs("random_mixed_v")
    ref, out = reference(inputs), reference(inputs).o.bfloat16().float()
    units = units_of(ref.magnitude, BF16)
    whole = measure(out, None, inputs, ref, torch.ones_like(ref.o), size_units=units)
    out[-1, -1] = NAN
    beside = measure(out, None, inputs, ref, torch.ones_like(ref.o), size_units=units)
    heads = [field.name for field in fields(Errors) if field.name.startswith("head_")]
    assert [name for name in heads if not torch.equal(vars(beside)[name][:-1], vars(whole)[name][:-1])] == []
    assert (beside.left_out, beside.elements) == (whole.left_out, whole.elements)


def test_an_o_that_is_rounded_once_errs_as_much_as_is_derived_where_terms_cancel() -> None:
    inputs = _inputs("random_mixed_v")
    ref = reference(inputs)
    units = units_of(ref.magnitude, BF16)
    errors = measure(ref.o.bfloat16().float(), None, inputs, ref, torch.ones_like(ref.o), size_units=units)
    assert errors.head_size_square.mean().item() == pytest.approx(errors.head_rounded_once.mean().item(), rel=0.05)
    assert errors.head_rounded_once.mean().item() < ROUNDED_ONCE / 2


def test_a_difference_is_paired_head_by_head() -> None:
    base = _measured(_inputs("random"))
    spread = replace(base, head_bias=torch.linspace(-1.0, 1.0, 64, dtype=torch.float64))
    shifted = replace(base, head_bias=spread.head_bias + 0.125)
    paired = difference(shifted, spread)
    # Unpaired, the spread of the heads would widen it to over 0.1.
    assert paired.mean == pytest.approx(0.125)
    assert paired.half_width < 1e-12
    assert difference(spread, shifted).mean == pytest.approx(-0.125)
    ours = replace(base, head_bias=torch.tensor([1.0, NAN, 3.0, 4.0], dtype=torch.float64))
    theirs = replace(base, head_bias=torch.tensor([NAN, 2.0, 2.0, 2.0], dtype=torch.float64))
    assert difference(ours, theirs).mean == 1.5  # without the heads that either lacks


def test_the_coherence_of_a_row_is_its_absolute_mean() -> None:
    rows = torch.tensor([[0.5, 0.5, -0.25, -0.25], [-0.5, -0.5, -0.5, -0.5], [0.5, NAN, -0.5, NAN]])
    assert coherence(rows).tolist() == [0.125, 0.5, 0.0]
    # sqrt(2/pi) rms / sqrt(n), NaN no element: rms 0.395, 0.5 and 0.5 of 4, 4 and 2.
    expected = [math.sqrt(2 / math.pi) * rms for rms in (math.sqrt(0.15625 / 4), 0.25, 0.5 / math.sqrt(2))]
    assert independent_coherence(rows).tolist() == pytest.approx(expected)


def _of_rows(error: Tensor) -> Errors:
    """What an output is measured at whose errors are these, in ulps of 1.5."""
    heads, queries, d = error.shape
    zeros = torch.zeros(1, heads, queries, d)
    inputs = AttentionInputs(zeros, zeros, zeros, zeros, Formats.of(BF16))
    o = torch.full((1, heads, queries, d), 1.5, dtype=torch.float64)
    ref = replace(reference(inputs), o=o, delta=o.sum(-1, keepdim=True))
    return measure(o + error * ULP_1, None, inputs, ref, torch.ones_like(o))


@pytest.mark.parametrize(
    ("size", "together"), [(0.0, False), (0.03, False), (0.25, True)], ids=["none", "small", "as_of_a_tie"]
)
def test_what_errors_of_a_row_have_in_common_is_held_to_the_margin(size: float, together: bool) -> None:
    rng = np.random.Generator(np.random.Philox(2))
    common = size * torch.from_numpy(rng.choice([-1.0, 1.0], (64, 4, 1)))
    errors = _of_rows(common + 0.25 * torch.from_numpy(rng.standard_normal((64, 4, 64))))
    assert abs(errors.bias.mean) < 0.05  # heads average out
    assert ROWS_ERR_TOGETHER.passed(errors) is together
    assert ROWS_ERR_APART.passed(errors) is not together
    assert "row coherence" in ROWS_ERR_APART.text(errors)
    error = 0.25 * torch.from_numpy(rng.standard_normal((1, 4, 64)))
    assert ROWS_ERR_APART.passed(_of_rows(error)) is None  # too few heads
    broken = error.repeat(8, 1, 1)
    broken[0, 0, 0] = NAN
    assert ROWS_ERR_APART.passed(_of_rows(broken)) is ROWS_ERR_TOGETHER.passed(_of_rows(broken)) is False
