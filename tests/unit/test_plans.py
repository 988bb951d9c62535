"""The presets as DESIGN.md states them, and the kernels composed of an algorithm, a shift rule and a plan."""

from dataclasses import replace

import pytest
import torch

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.claims import UNBIASED, claim
from tiebreak.cases.gpt2.attention import HeadKernel, LayerCall, attend
from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION, Algorithm
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import CAUSAL
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP16, FP32, TF32, Formats, Rounding
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, composed, run_declared
from tiebreak.kernels.plans import FUSED, ISOLATION, PLANS, PRESETS, Accumulator, Cast, DeltaSource, RoundingPlan, SumOf
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule
from tiebreak.kernels.triton.launch import refusal
from tiebreak.studies.cells import CASES

pytestmark = pytest.mark.quick

ARITHMETIC = EmulatedArithmetic()
OF_PRODUCTS = {"p", "ds", "gradients"}  # operands of the tensor cores' products, and what is returned
# The rounding points that a preset narrows to bf16; all others are fp32.
NARROW: dict[str, set[str]] = {
    "paper": {"p_bar", "o_bar", "o"},
    "all_bf16": {"s", "p_bar", "o_bar", "row_sum", "o"},
    "fused": {"p_bar", "o"} | OF_PRODUCTS,
    "standard": {"p_bar", "o"},
    "fused_stochastic": {"p_bar", "o"} | OF_PRODUCTS,
    "fp32": set(),
}
each_plan = pytest.mark.parametrize("plan", [*PRESETS, *ISOLATION], ids=lambda plan: plan.name)


def _narrow(plan: RoundingPlan) -> set[str]:
    return {name for name, cast in plan.casts() if cast.fmt == BF16}


@pytest.mark.parametrize("name", NARROW)
def test_a_preset_is_what_the_design_says(name: str) -> None:
    plan = PLANS[name]
    assert plan in PRESETS
    assert len(PRESETS) == len(NARROW)
    assert _narrow(plan) == NARROW[name]
    assert {cast.fmt for _, cast in plan.casts()} <= {BF16, FP32}
    assert (plan.row_sum_of, plan.accumulator) == (SumOf.UNROUNDED, Accumulator.EXACT)
    assert (plan.exponential.base_two, plan.exponential.correction) == (False, ())
    assert plan.delta_from is (DeltaSource.PROBABILITIES if name == "standard" else DeltaSource.OUTPUT)
    others = {each for each, cast in plan.casts() if cast.rounding is not Rounding.RNE}
    assert others == ({"o"} if name == "fused_stochastic" else set())
    assert plan.is_stochastic is (name == "fused_stochastic")


@each_plan
def test_operands_and_output_follow_formats_of_their_own(plan: RoundingPlan) -> None:
    assert plan.in_formats(Formats.of(BF16)) == plan
    moved = plan.in_formats(Formats.of(BF16, operands=FP16, output=TF32))
    outputs = {"o", "gradients"} & _narrow(plan)
    for name, before in plan.casts():
        fmt = TF32 if name in outputs else FP16 if before.fmt == BF16 else before.fmt
        assert getattr(moved, name) == replace(before, fmt=fmt), name
    assert moved.name == plan.name


def test_a_point_that_follows_nothing_stays_in_its_format() -> None:
    fixed, eight = replace(FUSED, p_bar=Cast(BF16)), PLANS["fused_fp8"]
    assert fixed.in_formats(Formats.of(FP16)).p_bar == Cast(BF16)
    assert eight.in_formats(Formats.of(FP16)).p_bar == Cast(FP8_E4M3, saturates=True)


@pytest.mark.parametrize(
    ("name", "ignored"),
    [("flash_1@fp8", "offset, v8 of plan fp8"), ("flash_1@mxfp8", "p8, v8"), ("flash_1@sage", "pv of plan sage")],
)
def test_no_algorithm_takes_a_plan_that_it_would_leave_parts_of_out(name: str, ignored: str) -> None:
    with pytest.raises(ValueError, match=f"flash_1 attention makes nothing of {ignored}"):
        composed_kernel(name)


@pytest.mark.parametrize(
    "name", ["", "flash", "paper", "flash@", "@paper", "flash@papers", "flashy@paper", "flash@standard", "flash@paper@"]
)
def test_an_unknown_kernel_is_named_and_the_known_ones_are_listed(name: str) -> None:
    with pytest.raises(ValueError, match=f"unknown kernel '{name}'") as caught:
        composed_kernel(name)
    message = str(caught.value)
    names = ["standard", "fair", "flash", *(rule for rule in SHIFT_RULES if rule != "safe"), *PLANS]
    assert all(part in message for part in names)
    assert "\n" not in message


def test_the_default_roster_has_every_rule_and_every_preset_once() -> None:
    assert len(set(DEFAULT_ROSTER)) == len(DEFAULT_ROSTER)
    declarations = [composed_kernel(name).declaration for name in DEFAULT_ROSTER]
    # FlashAttention-4's lag in fp8 is that in bf16, halved: only plans in 8 bits have a use for it.
    assert {declaration.shift_rule.name for declaration in declarations if declaration} == set(SHIFT_RULES) - {"lazy_4"}
    assert {declaration.plan.name for declaration in declarations if declaration} == {*NARROW, "fused_contracted"}


def _halved(
    inputs: AttentionInputs, plan: RoundingPlan, shift_rule: ShiftRule, arithmetic: Arithmetic, block: Block
) -> AttentionOutput:
    """Flash attention whose O is half of it, to be told from every other."""
    whole = FLASH_ATTENTION.forward(inputs, plan, shift_rule, arithmetic, block)
    return replace(whole, o=whole.o / 2)


THIRD = Algorithm("third", _halved, tiled=True, takes=frozenset({CAUSAL}), claimed_as="third")


@pytest.mark.parametrize(
    ("algorithm", "rule", "label", "claimed_as"),
    [
        (FLASH_ATTENTION, "safe", "flash@fused", "safe"),
        (FLASH_ATTENTION, "stabilized", "stabilized@fused", "stabilized"),
        (STANDARD_ATTENTION, "safe", "standard", "standard"),
        (THIRD, "safe", "third@fused", "third"),
    ],
)
def test_what_tables_and_claims_call_it(algorithm: Algorithm, rule: str, label: str, claimed_as: str) -> None:
    declaration = Declaration(algorithm, FUSED, SHIFT_RULES[rule])
    assert (declaration.label, declaration.claimed_as) == (label, claimed_as)
    assert claim(UNBIASED, "", rules=claimed_as).concerns(declaration, BF16)
    assert claim(UNBIASED, "", rules="safe").concerns(declaration, BF16) == (claimed_as == "safe")


def test_a_third_one_runs_wherever_declared_kernels_run() -> None:
    inputs = CASES["random_causal"].make(1, 0, 16, BF16)
    third, flash = (Declaration(algorithm, FUSED, SHIFT_RULES["safe"]) for algorithm in (THIRD, FLASH_ATTENTION))
    expected = run_declared(flash, inputs, ARITHMETIC, False).o / 2
    assert torch.equal(run_declared(third, inputs, ARITHMETIC, False).o, expected)
    heads = (HeadKernel(third),) * inputs.q.shape[1]
    assert torch.equal(attend(inputs.q, inputs.k, inputs.v, heads, LayerCall(ARITHMETIC, 0, 0, (), inputs.q)), expected)
    # A composed kernel takes what its algorithm takes; the Triton kernels say that they do not have it.
    assert composed("third", third).refusal(inputs) is None
    assert composed("third", third).refusal(CASES["padded"].make(1, 0, 16, BF16)) == "third takes no key padding mask"
    reason = refusal(inputs, third, interpreted=True)
    assert reason == "the Triton kernels have no algorithm third: they have flash, standard"
