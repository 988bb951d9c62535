"""Measures of gradients, delta's error read off dQ among them, and errors of O beside those of a plan."""

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.bounds import UNDECLARED, ErrorBounds
from tiebreak.cases.gradients import (
    ExactGradients,
    GradientBounds,
    GradientErrorBounds,
    delta_errors_of,
    row_units,
    ulps_of_rows,
)
from tiebreak.cases.verdicts import LIMIT, ROUNDED_ONCE, WORSE, interval
from tiebreak.defects.kernel import SOUND, Request, Switch
from tiebreak.defects.planted import twin, users
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, Format, Formats
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.reference import reference, reference_gradients
from tiebreak.kernels.roster import composed_kernel
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.experiments import contract
from tiebreak.matrix.experiments.contract import Contract
from tiebreak.matrix.identification.candidates import accepted, candidates
from tiebreak.matrix.measures import BESIDE_A_PLAN, ratio_of_means
from tiebreak.matrix.workbench import Named, Settings, Settled, Workbench
from tiebreak.reports.records.record import FAILED, MEASURED, PASSED, Record
from tiebreak.studies.cells import CASES, judged

HEADS = 64
Change = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def record(case: str | Contract, change: Change) -> Record:
    """Of a kernel whose gradients are the reference's, rounded once, then changed."""

    def compute(inputs: AttentionInputs, arithmetic: object, gradients: bool) -> AttentionOutput:
        ref = reference(inputs)
        dq, dk, dv = (gradient.float().bfloat16().float() for gradient in change(*reference_gradients(inputs, ref)))
        return AttentionOutput(ref.o.bfloat16().float(), gradients=Gradients(dq, dk, dv))

    kernel = Kernel("theirs", compute, None, takes=COMMON)
    return judged(kernel, case, 32)


def bounds_of(inputs: AttentionInputs) -> GradientBounds:
    """Of whoever declares nothing."""
    ref = reference(inputs)
    return GradientErrorBounds(ErrorBounds(inputs, ref), reference_gradients(inputs, ref)).of(UNDECLARED)


@pytest.mark.parametrize("case", ["random_causal", "random_grouped", "random_scaled", "padded", "wholly_masked"])
def test_right_gradients_are_within_their_bounds(case: str) -> None:
    """Behind a mask too: keys that nobody sees, and rows that see nothing, where 0 times NaN is what goes wrong."""
    right = record(case, lambda *gradients: gradients)
    assert right.passed("gradients")
    assert max(right.number(f"{name}_ulps") or 9.0 for name in ("dq", "dk", "dv")) < 0.5
    if case in ("padded", "wholly_masked"):
        unseen = record(case, lambda dq, dk, dv: (dq, torch.where(dk == 0, torch.nan, dk), dv))
        assert unseen.passed("gradients") is False


@pytest.mark.parametrize(
    ("fmt", "exponents"),
    [(BF16, (1, -102, 0, -43)), (FP16, (0, 0, 0, -18)), (FP16, (0, -14, -14, 0))],
    ids=["bf16", "fp16 dO", "fp16 k and v"],
)
def test_gradients_of_numbers_that_end_below_the_normal_ones_are_within_their_bounds(
    fmt: Format, exponents: tuple[int, int, int, int]
) -> None:
    """A cast there errs by a part of the smallest subnormal, however small the number; found by the fuzz."""
    rng = np.random.default_rng(1)
    dtype, rows = TORCH_DTYPES[fmt], ((1, 2, 5, 8), (1, 2, 218, 8), (1, 2, 218, 8), (1, 2, 5, 8))
    q, k, v, do = (
        torch.from_numpy(rng.standard_normal(shape) * 2.0**exponent).to(dtype).float()
        for shape, exponent in zip(rows, exponents, strict=True)
    )
    inputs = AttentionInputs(q, k, v, do, Formats.of(fmt), causal=True)
    kernel, ref = composed_kernel("flash@fused"), reference(inputs)
    assert kernel.declaration is not None
    actual, exact = EMULATION.run(kernel, inputs, gradients=True).gradients, ExactGradients.of(inputs, ref)
    assert actual is not None
    bounds = GradientErrorBounds(ErrorBounds(inputs, ref), exact.gradients).of(kernel.declaration)
    errors = exact.errors(actual, bounds, inputs.groups)
    assert any(bool(error.rows.any()) for error in errors.each)
    assert errors.faults.over_bound <= 1.0


def test_how_much_of_the_gradients_repeats_is_measured_and_no_failure() -> None:
    """Of 3 tensors of as many elements, half of one differ from run to run, to both sides: atomics do that."""
    calls = itertools.count()

    def racing(dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        if next(calls) % 2:
            dq[:, :, ::4] *= 1 + 2.0**-7  # a last bit or two of bf16
            dq[:, :, 2::4] *= 1 - 2.0**-7
        return dq, dk, dv

    twice = Contract(contract.CASES[0])
    raced = record(twice, racing)
    assert raced.number("gradients_repeated") == pytest.approx(5 / 6, abs=0.01)
    assert raced.passed("repeatable")
    assert raced.outcome == MEASURED
    assert record(twice, lambda *gradients: gradients).number("gradients_repeated") == 1.0


@pytest.mark.parametrize(
    ("v", "after", "why"),
    [
        # It writes into what its own backward pass needs, as kernels for inference do.
        ("v", "o[0, 0, 0, 0] *= 1", "raised RuntimeError: one of the variables"),
        ("v.detach()", "pass", "has no gradient of v"),
    ],
)
def test_a_backward_pass_that_fails_takes_no_forward_pass_with_it(tmp_path: Path, v: str, after: str, why: str) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n\ndef mine(q, k, v, *, causal=False, scale=None):\n"
        f"    o = torch.nn.functional.scaled_dot_product_attention(q, k, {v}, is_causal=causal, scale=scale)\n"
        f"    {after}\n    return o\n"
    )
    target = f"{tmp_path / 'mine.py'}:mine"
    backward, none = (judged(external_kernel(target, flags=flags), "random", 32) for flags in ((), ("backward=none",)))
    assert backward.outcome == FAILED
    assert backward.passed("bound")
    assert f"its backward pass {why}" in backward.answers["gradients"].why
    assert none.outcome == PASSED
    assert "gradients" not in none.answers
    assert backward.digest == none.digest


def test_bounds_are_some_times_what_kernels_err_by_and_grow_with_the_inputs() -> None:
    """A bound of everything would catch nothing; with dO twice as large it is twice as large, subnormals aside."""
    for name in ("sdpa_flash", "sdpa_math"):
        over_bound = judged(CPU.kernel(name), "random", 32).number("gradient_error_over_bound")
        assert 0.1 < (over_bound or 0.0) <= 1.0
    inputs = CASES["random"].make(1, 0, 16, BF16)
    twice = replace(inputs, do=2 * inputs.do)
    first, second = (bounds_of(call).elements for call in (inputs, twice))
    assert all(torch.allclose(2 * small, large, rtol=1e-9) for small, large in zip(first, second, strict=True))


@pytest.mark.parametrize("case", ["nan_in_q", "inf_in_v", "huge_logits"])
def test_what_rounding_can_do_anything_to_is_bounded_by_inf(case: str) -> None:
    """A bound that is NaN would let everything through."""
    inputs = CASES[case].make(1, 0, 4, BF16)
    bounds = bounds_of(inputs)
    assert torch.inf in bounds.norms
    assert not any(element.isnan().any() for element in bounds.elements)
    assert not any(math.isnan(norm) for norm in bounds.norms)


def test_deltas_error_is_read_off_dq() -> None:
    """dQ with a delta that is 1 % of mean |delta| too large in every row: equation 1 turned round."""
    inputs = CASES["random"].make(1, 0, 16, BF16)
    ref = reference(inputs)
    exact = reference_gradients(inputs, ref)[0]
    error = 0.01 * ref.delta.abs().mean()
    estimate = interval(delta_errors_of(exact - inputs.scale * error * ref.pk, inputs, ref, exact))
    assert estimate.mean == pytest.approx(0.01, rel=1e-9)
    assert estimate.half_width < 1e-9


def test_a_row_is_measured_in_ulps_of_its_largest_element() -> None:
    exact = torch.tensor([[[[3.0, 0.001], [0.0, 0.0]]]], dtype=torch.float64)
    off = exact + torch.tensor([[[[2.0**-6, -(2.0**-6)], [5.0, 5.0]]]], dtype=torch.float64)
    rows = torch.linalg.vector_norm(off - exact, dim=-1, keepdim=True)
    assert ulps_of_rows(rows, row_units(exact, BF16), 2) == 1.0  # an ulp of 3 in bf16 is 2^-6; a row of zeros has none


@pytest.mark.parametrize("case", ["near_tie_inside", "random_scaled", "mixed_sign_v", "repeated_large[r=105]"])
def test_a_sound_kernel_that_has_no_plans_bits_passes(case: str) -> None:
    """Split in two it has 87 % of the bits of any plan in the first case, and errs no more."""
    assert judged(twin("split"), case, HEADS, seed=3).passed("accuracy") is True


def test_one_head_that_cancels_does_not_fail_and_a_share_of_all_heads_does() -> None:
    plans = torch.linspace(0.05, 0.15, HEADS, dtype=torch.float64)
    outlier = plans.clone()
    outlier[0] *= 1000
    one, all_heads = ratio_of_means(outlier, plans), ratio_of_means(plans * (LIMIT + 0.02), plans)
    assert one is not None
    assert all_heads is not None
    assert one.mean > LIMIT > one.low
    assert all_heads.low > LIMIT


def test_one_head_that_errs_alone_is_the_worst_one() -> None:
    plans = torch.linspace(0.1, 0.15, HEADS, dtype=torch.float64)
    ours = plans.clone()
    ours[3] *= WORSE + 1.0
    sample: Any = SimpleNamespace(
        errors=SimpleNamespace(head_size_square=ours),
        plan_errors=SimpleNamespace(head_size_square=plans, head_rounded_once=torch.full((HEADS,), ROUNDED_ONCE)),
        bench=SimpleNamespace(case=SimpleNamespace(normal=True)),
    )
    assert BESIDE_A_PLAN["worst_head"].of(sample) == pytest.approx(WORSE + 1.0)


def test_errors_of_an_exact_plan_count_as_those_of_one_rounding() -> None:
    exact, last_bits = torch.zeros(HEADS), torch.full((HEADS,), ROUNDED_ONCE / 2)
    ratio = ratio_of_means(last_bits, exact, ROUNDED_ONCE)
    assert ratio is not None
    assert ratio.mean == pytest.approx(0.5)
    assert ratio_of_means(torch.full((HEADS,), torch.nan), exact) is None


def test_two_heads_are_enough_for_equal_errors_below_those_of_one_rounding() -> None:
    """Causal rows that see few keys err by less; an engine's dump may have two key heads."""
    few = torch.tensor([0.2, 0.8], dtype=torch.float64) * ROUNDED_ONCE
    equal, alone, tripled = (ratio_of_means(ours, few, ROUNDED_ONCE) for ours in (few, 1.01 * few.flip(0), 3.0 * few))
    assert equal is not None
    assert alone is not None
    assert tripled is not None
    assert (equal.mean, equal.half_width) == (1.0, 0.0)
    assert alone.low < LIMIT < alone.high  # two heads apart by chance
    assert tripled.mean == pytest.approx(1.5)  # surely three times the plan's errors: what is above the floor decides


def test_plans_that_nobody_ships_are_known_and_not_accepted() -> None:
    plans, formats = candidates(), Formats.of(BF16)
    refused = {text: plan for text, plan in plans.items() if text not in accepted(plans, formats)}
    of_8_bits = {text for text in refused if text.startswith("flash@fused_fp8")}
    assert of_8_bits == refused.keys() & accepted(plans, replace(formats, v=FP8_E4M3)).keys() != set()
    # A narrow sum, term after term, is a runtime's: no reason to accept it of a kernel that does not declare it.
    narrow = {text for text, plan in refused.items() if "l=input/1" in text or plan.plan.o_bar.fmt is FP16}
    assert len(narrow) == 2
    rules = {plan.shift_rule.name for text, plan in refused.items() if text not in of_8_bits | narrow}
    assert rules == {name for name, rule in SHIFT_RULES.items() if not rule.accepted} - {"as_printed_v1"}
    assert {"always_scaled", "gamma", "fixed_offset", "as_printed_v2"} <= rules


def _stochastic(_: Switch, p: Tensor, __: Request) -> Tensor:
    noise = (torch.arange(p.numel()) * 40503 % 65536).view(p.shape).int()
    return (p.contiguous().view(torch.int32) + noise).bitwise_and(-65536).view(torch.float32)


def _in_e4m3(_: Switch, p: Tensor, __: Request) -> Tensor:
    return p.to(torch.float8_e4m3fn).float()


@cache
def _settled() -> dict[Named, Settled]:
    return {}


@pytest.mark.parametrize("case", ["growing_maximum", "tied_p_bar", "random"])
def test_random_bits_of_a_users_own_are_held_to_the_law_of_a_plan(case: str) -> None:
    """By bits the nearest is one that errs less where maxima tie: a shift of the row's own was blamed for it."""
    bench = Workbench(Settings(seed=1, heads=4 * HEADS), settled=_settled())
    kernels: list[tuple[str, Any, bool, str]] = [
        ("dithered", {}, True, "dithered@fused"),  # of which random bits are few: one a row
        ("dithered", {"p_bar": _in_e4m3}, False, ""),
        ("tiled", {"p_bar": _stochastic}, True, "P cast at random"),
    ]
    for sound, changes, passed, law in kernels:
        kernel = users(partial(SOUND[sound], **changes), " ".join([sound, *changes]))
        answer = judged(kernel, case, bench=bench).answers["accuracy"]
        assert answer.passed is passed, answer
        assert case != "tied_p_bar" or law in answer.asked
