"""The error bound of a plan: it holds, not so wide that nothing breaks it, and is Inf where nothing is sure."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.bounds import UNDECLARED, ErrorBounds
from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import BLOCK, Block
from tiebreak.kernels.formats import BF16, FP16, Format
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.plans import ALL_BF16, FP32_PLAN, ISOLATION, PAPER, PLANS, PRESETS, RoundingPlan
from tiebreak.kernels.reference import reference
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.studies.cells import CASES

pytestmark = pytest.mark.quick

RANDOM = ["random", "random_causal", "random_grouped", "random_odd", "random_mixed_v", "padded", "wholly_masked"]

each_format = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
BLOCKS = (BLOCK, Block(7, 16))
NAMED = [*PRESETS, *ISOLATION]
LOW = ALL_BF16.s
# As other people round: eager attention, MLX, flax, the authors' code, flash attention 1; a shift far from the
# maximum.
FOREIGN = {
    name: parse_declaration(text)
    for name, text in {
        "eager": "standard,qk=input,s=input",
        "mlx": "standard,scale=input,q=input,s=input",
        "flax": "standard,divisor=input,q=input,s=input,shifted=input,exp=input,l=input",
        "authors": "flash@all_bf16,shifted=input,l_from=rounded",
        "flash_1": "flash_1@fused",
        "flash_1@paper": "flash_1@paper",
        "split": "split@fused,tile=32",
        "split@paper": "split@paper,tile=32",
        "onnx": "standard,scale=input,q=input,k=input,s=input,shifted=input,exp=input,l=input/1",
        "iree": "flash@fp32_inside,scale=input,log2_e=input,base=2",
        "tinygrad": "standard,s=input,shifted=input,exp=input,l=input,accumulator=rounded",
        "ggml": "flash@fp32_inside,o_bar=fp16:kept,tile=1",
        "scaled": "always_scaled@fused,shifted=input",
    }.items()
}


def _declared(plan: RoundingPlan, block: Block = BLOCK) -> Declaration:
    return Declaration(
        STANDARD_ATTENTION if plan.name == "standard" else FLASH_ATTENTION, plan, SHIFT_RULES["safe"], block
    )


def _inputs(name: str, fmt: Format) -> AttentionInputs:
    return CASES[name].make(2, 0, 32, fmt)


def _bounds(inputs: AttentionInputs) -> ErrorBounds:
    return ErrorBounds(inputs, reference(inputs))


def _output(inputs: AttentionInputs, declaration: Declaration) -> Tensor:
    return EMULATION.run(composed(declaration.label, declaration), inputs, gradients=False).o.double()


def _error_over_bound(bounds: ErrorBounds, declaration: Declaration, factor: float = 1.0) -> float:
    """Largest error, of an output `factor` times too large, as a share of the bound."""
    error = (_output(bounds.inputs, declaration) * factor - bounds.ref.o).abs()
    bound = bounds.of(declaration)
    assert bound.shape == bounds.ref.o.shape
    assert (bound > 0).all()
    return (error / bound).max().item()


@each_format
@pytest.mark.parametrize("name", [*RANDOM, "tied_maxima[k=2]"])
def test_the_bound_of_every_plan_and_of_other_peoples_kernels_holds(name: str, fmt: Format) -> None:
    bounds = _bounds(_inputs(name, fmt))
    declared = {plan.name: _declared(plan) for plan in NAMED} | FOREIGN
    shares = {
        (label, block): _error_over_bound(bounds, replace(each, block=block))
        for label, each in declared.items()
        for block in BLOCKS
    }
    assert {plan: share for plan, share in shares.items() if not share <= 1.0} == {}


@pytest.mark.parametrize("name", [*(plan.name for plan in PRESETS if plan != FP32_PLAN), *FOREIGN])
def test_some_error_comes_near_the_bound(name: str) -> None:
    for fmt in (BF16, FP16) if name in PLANS else (BF16,):
        assert _error_over_bound(_bounds(_inputs("random", fmt)), FOREIGN.get(name) or _declared(PLANS[name])) > 1 / 50


@pytest.mark.parametrize("rule", ["safe", "fixed_offset", "dithered"])
@pytest.mark.parametrize("block", [BLOCK, Block(7, 1)], ids=str)
def test_the_bound_holds_where_o_bar_is_below_the_normal_numbers(rule: str, block: Block) -> None:
    """Each of its roundings then loses a part of the spacing, and the division by l makes more of it (the fuzz)."""
    inputs = _inputs("random", FP16)
    inputs = replace(
        inputs,
        q=inputs.q[:, :, :3] * 8,
        do=inputs.do[:, :, :3],
        k=inputs.k[:, :, :6],
        v=(inputs.v[:, :, :6] * 2.0**-17).half().float(),
    )
    declaration = Declaration(FLASH_ATTENTION, PAPER, SHIFT_RULES[rule], block)
    batch = SharedBatch(inputs, reference(inputs))
    assert 0 < _error_over_bound(batch.bounds, declaration) <= 1.0
    assert batch.outside_values(_output(inputs, declaration), declaration) <= 1.0


@pytest.mark.parametrize("point", ["scale", "divisor", "q", "qk", "shifted", "exp"])
def test_a_point_before_the_sum_takes_a_bound_of_its_own(point: str) -> None:
    inputs = _inputs("random", BF16)
    # Few keys carry a row, so their errors do not average out; bf16 has neither the scale nor its inverse.
    inputs = replace(inputs, q=8 * inputs.q, softmax_scale=0.12)
    bounds = _bounds(inputs)
    rounded = _declared(replace(FP32_PLAN, **{point: LOW}))  # type: ignore[arg-type]
    assert _error_over_bound(bounds, rounded) <= 1.0
    error = (_output(inputs, rounded) - bounds.ref.o).abs()
    assert (error > bounds.of(_declared(FP32_PLAN))).any()


@each_format
@pytest.mark.parametrize("name", ["random", "random_causal", "random_grouped", "random_odd"])
def test_an_output_a_few_ulps_off_breaks_the_bound_of_every_plan(name: str, fmt: Format) -> None:
    # 1 % in fp16, and as many ulps in bf16: each rounding point may take half an ulp or more, so that 1 % in bf16,
    # whose ulp is up to 0.8 %, breaks no bound on three narrow points.
    factor = 1.0 + 0.01 * fmt.unit_roundoff / FP16.unit_roundoff
    bounds = _bounds(_inputs(name, fmt))
    shares = {plan.name: _error_over_bound(bounds, _declared(plan), factor) for plan in NAMED}
    assert {plan: share for plan, share in shares.items() if not share > 1.0} == {}


def test_a_kernel_that_declares_nothing_is_held_to_the_loosest_bound() -> None:
    bounds = _bounds(_inputs("random_causal", BF16))
    loosest = bounds.of(UNDECLARED)
    foreign = (FOREIGN[name] for name in ("eager", "authors", "flash_1", "split@paper"))
    for declared in (*map(_declared, NAMED), *foreign):
        assert (loosest >= bounds.of(declared)).all()
    of_p = _bounds(_inputs("sink_tie", BF16)).of_probabilities  # of keys 18 below the maximum, where fp16 has no number
    for text in ("flash@paper", "flash@fused,p_bar=fp16", "flash@fused,exp=fp16"):
        assert (of_p(UNDECLARED) >= of_p(parse_declaration(text))).all()
    whole, tiled = (bounds.of(_declared(PAPER, block)) for block in BLOCKS)
    assert (tiled > whole).all()  # O-bar is rounded block by block


def test_where_rounding_the_scores_can_do_anything_the_bound_is_infinite() -> None:
    # Scores of about 1e6 err by 4e3 in bf16, and exp(4e3) is beyond fp64.
    inputs = _inputs("huge_logits", BF16)
    inputs = replace(inputs, q=100 * inputs.q)
    bound = ErrorBounds(inputs, reference(inputs)).of(_declared(PLANS["all_bf16"]))
    assert torch.isinf(bound).any()
    assert not torch.isnan(bound).any()
    # Of a row that sees no key the bound is the smallest number alone.
    inputs = _inputs("wholly_masked", BF16)
    hidden = inputs.hidden()
    assert hidden is not None
    assert hidden[0].all()
    assert (ErrorBounds(inputs, reference(inputs)).of(_declared(PAPER))[0] == BF16.smallest_subnormal).all()
