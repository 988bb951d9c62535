"""The probes tell devices apart by what their arithmetic does."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.probes import fingerprint, of_products
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP16, Format, Rounding
from tiebreak.kernels.kernel import run_forward
from tiebreak.kernels.plans import Accumulator, Cast, Exponential
from tiebreak.kernels.reference import reference
from tiebreak.matrix.attribution import fits
from tiebreak.matrix.candidates import candidates, on_device
from tiebreak.matrix.workbench import SharedBatch
from tiebreak.reports.records.record import FOLLOWED


class CastingIn(EmulatedArithmetic):
    """Rounds every cast in one mode."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        return super().cast(x, replace(cast, rounding=self.rounding), random)


class Narrow(EmulatedArithmetic):
    """Keeps running sums in the narrow format, flushes subnormal products, and misses exp(0)."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        total = torch.zeros(*a.shape[:-1], b.shape[-1])
        for index in range(a.shape[-1]):
            total = self.cast(total + a[..., :, index, None] * b[..., None, index, :], cast)
        return torch.where(total.abs() < cast.fmt.smallest_normal, torch.zeros_like(total), total)

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        return super().exp(x, replace(exponential, correction=(0.5,)))


@pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)
def test_the_emulation_rounds_as_it_declares(fmt: Format) -> None:
    assert fingerprint(EmulatedArithmetic(), "cpu", fmt) == {
        "cast": "even",
        "matmul": "even",
        "matmul_sums_in": "fp32 or wider",
        "matmul_rounds_after": "all terms",
        "batched_matmul_rounds_after": "all terms",
        "matmul_subnormals": "kept",
        "exp_at_zero": 1.0,
    }


@pytest.mark.parametrize(
    "mode", [mode for mode in Rounding if mode is not Rounding.STOCHASTIC], ids=lambda mode: mode.value
)
def test_every_rounding_mode_is_recognised(mode: Rounding) -> None:
    answers = fingerprint(CastingIn(mode), "cpu")
    assert answers["cast"] == mode.value
    assert answers["matmul"] == mode.value


def test_a_narrow_device_is_told() -> None:
    answers = fingerprint(Narrow(), "cpu")
    assert answers["matmul_sums_in"] == "bf16"
    assert answers["matmul_subnormals"] == "flushed"
    assert answers["exp_at_zero"] == 0.75


class OnArm(EmulatedArithmetic):
    """As PyTorch 2.9.1 multiplies on an Arm processor with bf16 instructions, and SVE of 512 bits."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return super().matmul(a, b, replace(cast, every=160 if a.shape[-2] == 128 else 512), Accumulator.BFMMLA)


def test_a_product_that_is_rounded_to_odd_and_block_after_block_is_told() -> None:
    answers = fingerprint(OnArm(), "cpu")
    assert answers["matmul_rounds_after"] == "160 terms"
    assert answers["batched_matmul_rounds_after"] == "512 terms"
    assert answers["matmul_sums_in"] == "fp32, rounded to odd"


def test_plans_are_tried_that_say_what_a_device_does_to_its_products() -> None:
    assert on_device(EMULATION) == on_device(replace(CPU, arithmetic=EmulatedArithmetic())) == candidates()
    tried = on_device(replace(CPU, arithmetic=OnArm()))
    assert list(tried)[: len(candidates())] == list(candidates())
    eager, paper = "standard,qk=input,s=input,accumulator=bfmmla", "flash@paper,accumulator=bfmmla"
    assert {eager, f"{eager},o_bar=input/512", paper} <= tried.keys()
    (case,) = (case for case in SCRIPTED if case.name == "faint_tail")
    batch = SharedBatch(inputs := case.make(1, 0, 32, BF16), reference(inputs))
    o = run_forward(tried[paper], inputs, EMULATION.arithmetic).o
    shares = fits(o, batch, {plan: tried[plan] for plan in (paper, "flash@paper")})
    assert shares[paper].bits == 1.0
    assert shares["flash@paper"].bits < FOLLOWED


def test_a_sum_wider_than_fp32_is_not_taken_for_one_to_odd() -> None:
    class Wide(EmulatedArithmetic):
        def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
            total = a.double() @ b.double()
            above = torch.nextafter(total.float(), torch.tensor(torch.inf))
            return self.cast(torch.where(total > total.float(), above, total.float()), cast)

    assert of_products(Wide(), "cpu") == ()


def test_this_cpu_breaks_ties_to_even() -> None:
    """Of every CPU that torch runs on; whether subnormals are flushed depends on its bf16 instructions."""
    answers = fingerprint(CPU.arithmetic, CPU.device)
    assert answers["cast"] == "even"
    assert answers["matmul_sums_in"] == "fp32 or wider"
    assert answers["exp_at_zero"] == 1.0
