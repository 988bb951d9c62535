"""The probes tell apart what an NPU may do; CPU and emulation answer as they should."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.backends.ascend.probes import arithmetic_probes, order_name, p_cast, softmax_errors, subtree_sizes
from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16, FP32, Format, Rounding
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.plans import FUSED, Accumulator, Cast, Exponential, RoundingPlan, SumOf
from tiebreak.kernels.probe_inputs import tied_p_bar
from tiebreak.kernels.reference import reference
from tiebreak.kernels.shift_rules import SHIFT_RULES

HF32 = Format("hf32", exponent_bits=8, mantissa_bits=11)
MODES = [Rounding.TO_EVEN, Rounding.TIES_AWAY, Rounding.TOWARD_ZERO]


class Summing(EmulatedArithmetic):
    """Adds up exactly, with fp32 operands cut to a format."""

    def __init__(self, operands: Format = FP32) -> None:
        self.operands = operands

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return super().matmul(round_to(a, self.operands), round_to(b, self.operands), cast, accumulator)


def _sequential(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _pairwise(terms: list[Tensor]) -> Tensor:
    half = len(terms) // 2
    return _pairwise(terms[:half]) + _pairwise(terms[half:]) if half else terms[0]


ORDERS = {"sequential": _sequential, "pairwise": _pairwise}


class InOrder(EmulatedArithmetic):
    """Adds up in fp32, in one order."""

    def __init__(self, order: Callable[[list[Tensor]], Tensor]) -> None:
        self.order = order

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        del accumulator
        products = [a[..., :, i, None] * b[..., None, i, :] for i in range(a.shape[-1])]
        return self.cast(self.order(products), cast)


class Flushing(EmulatedArithmetic):
    """Flushes subnormal results, and has an exponential that is 2 to 4 ulps off."""

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        rounded = super().cast(x, cast, random)
        return torch.where(rounded.abs() < cast.fmt.smallest_normal, torch.zeros_like(rounded), rounded)

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        exact = super().exp(x, exponential)
        return torch.where(exact < FP32.smallest_normal, torch.zeros_like(exact), exact * (1.0 + 2.0**-22))


def test_the_emulation_answers_as_it_is_made() -> None:
    assert arithmetic_probes(EmulatedArithmetic(), "cpu") == {
        "fp32_matmul_keeps": 23.0,
        "matmul_accumulator_keeps": 52.0,  # fp64, as the emulation's exact sum is
        "matmul_order": "exact",
        "cast_subnormals": "kept",
        "exp_subnormals": "kept",
        "exp_max_ulps": 0.5,
    }


def test_this_cpu_keeps_fp32_operands_and_sums() -> None:
    answers = arithmetic_probes(CPU.arithmetic, CPU.device)
    assert answers["fp32_matmul_keeps"] == 23.0
    assert answers["matmul_accumulator_keeps"] in {23.0, 24.0}  # with or without a guard bit
    assert 0.5 <= float(answers["exp_max_ulps"]) < 2.0


def test_operands_cut_to_hf32_are_reported() -> None:
    assert arithmetic_probes(Summing(operands=HF32), "cpu")["fp32_matmul_keeps"] == 11.0


@pytest.mark.parametrize("order", ORDERS)
def test_the_order_of_a_sum_and_its_width_are_reported(order: str) -> None:
    answers = arithmetic_probes(InOrder(ORDERS[order]), "cpu")
    assert answers["matmul_order"] == order
    assert answers["matmul_accumulator_keeps"] == 23.0


class InFours(Summing):
    """Adds four products exactly before they join the running sum, as a small cube would."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        parts = [
            super(InFours, self).matmul(a[..., i : i + 4], b[..., i : i + 4, :], Cast(FP32), accumulator)
            for i in range(0, a.shape[-1], 4)
        ]
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return self.cast(total, cast)


def test_any_other_order_is_reported_by_its_partial_sums() -> None:
    # Terms 1 to 3 meet term 0 in an exact sum; from then on whole groups of four join.
    assert subtree_sizes(InFours(), "cpu") == (2, 2, 2, *(size for size in range(8, 33, 4) for _ in range(4)))
    assert order_name((2, 2, 5)) == "partial sums of 2 2 5"


def test_flushed_subnormals_and_a_rough_exponential_are_reported() -> None:
    answers = arithmetic_probes(Flushing(), "cpu")
    assert answers["cast_subnormals"] == "flushed"
    assert answers["exp_subnormals"] == "flushed"
    assert 2.0 <= float(answers["exp_max_ulps"]) <= 4.5


def output(plan: RoundingPlan, inputs: AttentionInputs, arithmetic: Arithmetic = EMULATION.arithmetic) -> Tensor:
    return composed("p", Declaration(FLASH_ATTENTION, plan, SHIFT_RULES["safe"])).compute(inputs, arithmetic, False).o


@pytest.mark.parametrize("rounded", [False, True], ids=["l unrounded", "l rounded"])
@pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
def test_the_cast_of_p_shows_in_the_output_alone(mode: Rounding, rounded: bool) -> None:
    plan = replace(FUSED, name="p", p_bar=Cast(BF16, mode), row_sum_of=SumOf.ROUNDED if rounded else SumOf.UNROUNDED)
    assert p_cast(lambda inputs: output(plan, inputs)) == mode.value


@pytest.mark.parametrize(
    ("mode", "expected_cast"), [(Rounding.TIES_AWAY, "even"), (Rounding.TOWARD_ZERO, "none known")]
)
def test_the_cast_of_o_is_not_taken_for_that_of_p(mode: Rounding, expected_cast: str) -> None:
    assert p_cast(lambda inputs: output(replace(FUSED, name="o", o=Cast(BF16, mode)), inputs)) == expected_cast


def test_an_exponential_that_misses_the_ties_is_reported() -> None:
    assert p_cast(lambda inputs: output(FUSED, inputs, Flushing())) == "away", "all of them lie above the tie"
    assert p_cast(lambda inputs: reference(inputs).o.float()) == "not seen"


def test_every_p_is_a_tie_above_a_neighbour_of_the_parity_asked_for() -> None:
    odd = torch.tensor([[False, True], [True, True]])
    inputs = tied_p_bar(np.random.Generator(np.random.Philox(3)), odd)
    p = torch.exp((inputs.q @ inputs.k.transpose(-1, -2) * inputs.scale).double()).float()[..., 1:]
    lower = torch.floor(p * 256)
    assert torch.equal(p * 256 - lower, torch.full_like(p, 0.5))
    assert torch.equal(lower % 2 == 1, odd[..., None, None].expand_as(lower))


def test_wrong_row_statistics_show() -> None:
    def run(scale: float) -> dict[str, float]:
        def statistics(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
            s = reference(inputs).s
            row_max = s.amax(-1, keepdim=True)
            return scale * row_max.float(), torch.exp(s - scale * row_max).sum(-1, keepdim=True).float()

        return dict(softmax_errors(statistics))

    assert max(run(1.0).values()) < 1e-6
    assert min(run(1.01).values()) > 1e-2
