"""The probes tell devices apart by what their arithmetic does."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.probes import fingerprint
from tiebreak.kernels.formats import BF16, FP16, Format, Rounding
from tiebreak.kernels.plans import Accumulator, Cast, Exponential


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


def test_a_product_that_is_rounded_block_after_block_is_told() -> None:
    class InBlocks(EmulatedArithmetic):
        def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
            return super().matmul(a, b, replace(cast, every=160 if a.shape[-2] == 128 else 512), accumulator)

    answers = fingerprint(InBlocks(), "cpu")
    assert answers["matmul_rounds_after"] == "160 terms"
    assert answers["batched_matmul_rounds_after"] == "512 terms"
    assert answers["matmul_sums_in"] == "fp32 or wider"


def test_this_cpu_breaks_ties_to_even() -> None:
    """Of every CPU that torch runs on; whether subnormals are flushed depends on its bf16 instructions."""
    answers = fingerprint(CPU.arithmetic, CPU.device)
    assert answers["cast"] == "even"
    assert answers["matmul_sums_in"] == "fp32 or wider"
    assert answers["exp_at_zero"] == 1.0
