"""The probes tell devices apart by what their arithmetic does."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import pytest
import torch
from torch import Tensor

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.emulation.accumulators import row_total
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.instructions import bfmmla_matmul, vdpbf16_matmul
from tiebreak.backends.emulation.rounding import flushed
from tiebreak.backends.platform import cpu_features
from tiebreak.backends.probes import accumulators_of, fingerprint
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP16, Format, Rounding
from tiebreak.kernels.kernel import run_forward
from tiebreak.kernels.plans import Accumulator, Cast, Exponential
from tiebreak.kernels.reference import reference
from tiebreak.matrix.candidates import candidates, on_device
from tiebreak.matrix.fits import fits
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
        "bf16_matmul_accumulator": "exact",
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
    assert answers["bf16_matmul_accumulator"] == "none known"
    assert answers["matmul_subnormals"] == "flushed"
    assert answers["exp_at_zero"] == 0.75


class Adding(EmulatedArithmetic):
    """Adds up every product as one accumulator does, whichever a plan names, and rounds it in one mode."""

    def __init__(self, accumulator: Accumulator, rounding: Rounding = Rounding.TO_EVEN) -> None:
        self.accumulator, self.rounding = accumulator, rounding

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return super().matmul(a, b, replace(cast, rounding=self.rounding), self.accumulator)


class OnArm(Adding):
    """As PyTorch 2.9.1 multiplies on an Arm processor with bf16 instructions, and SVE of 512 bits."""

    def __init__(self) -> None:
        super().__init__(Accumulator.BFMMLA)

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return super().matmul(a, b, replace(cast, every=160 if a.shape[-2] == 128 else 512), accumulator)


def test_a_product_that_is_rounded_to_odd_and_block_after_block_is_told() -> None:
    answers = fingerprint(OnArm(), "cpu")
    assert answers["matmul_rounds_after"] == "160 terms"
    assert answers["batched_matmul_rounds_after"] == "512 terms"
    assert answers["bf16_matmul_accumulator"] == "bfmmla"


@pytest.mark.parametrize("mode", [Rounding.TO_EVEN, Rounding.DOWN], ids=lambda mode: mode.value)
@pytest.mark.parametrize("accumulator", Accumulator, ids=lambda accumulator: accumulator.name)
def test_every_accumulator_is_told_from_all_others_however_sums_are_cast(
    accumulator: Accumulator, mode: Rounding
) -> None:
    assert accumulators_of(Adding(accumulator, mode), "cpu") == (accumulator,)


def _to_fp32_once(a: Tensor, b: Tensor) -> Tensor:
    """Away from zero, from fp64."""
    total = a.double() @ b.double()
    above = torch.nextafter(total.float(), total.sign().float() * torch.inf)
    return torch.where(total.abs() > total.float().abs(), above, total.float())


def _products(a: Tensor, b: Tensor) -> list[Tensor]:
    """Of every term, exact, in fp32."""
    return [a[..., :, k, None] * b[..., None, k, :] for k in range(a.shape[-1])]


def _chain(terms: list[Tensor], flush: Callable[[Tensor], Tensor] = torch.Tensor.clone) -> Tensor:
    """In fp32, term after term."""
    return reduce(lambda total, term: flush(total + term), terms, torch.zeros(()))


def _swapped(terms: list[Tensor]) -> list[Tensor]:
    """In VDPBF16PS's order."""
    return [terms[k ^ 1] for k in range(len(terms))]


def _in_halves(matmul: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Tensor:
    return matmul(a[..., :32], b[..., :32, :]) + matmul(a[..., 32:], b[..., 32:, :])


def _two_terms_swapped(a: Tensor, b: Tensor) -> Tensor:
    places = torch.arange(a.shape[-1])
    places[[59, 61]] = places[[61, 59]]
    return vdpbf16_matmul(a[..., places], b[..., places, :])


UNKNOWN: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "wide, away": _to_fp32_once,
    "fp32, backwards": lambda a, b: _chain(_products(a, b)[::-1]),
    "fp32, a tree": lambda a, b: row_total(torch.stack(_products(a, b), -1), Accumulator.AMPERE)[..., 0],
    "vdpbf16, in another order": _two_terms_swapped,
    "vdpbf16, anew after 32": partial(_in_halves, vdpbf16_matmul),
    "vdpbf16, subnormals kept": lambda a, b: _chain(_swapped(_products(a, b))),
    "vdpbf16, subnormal operands kept": lambda a, b: _chain(_swapped(_products(a, b)), flushed),
    "vdpbf16, products flushed": lambda a, b: _chain(
        [flushed(term) for term in _swapped(_products(flushed(a), flushed(b)))], flushed
    ),
    "bfmmla, anew after 32": partial(_in_halves, bfmmla_matmul),
    "exact, operands flushed": lambda a, b: (flushed(a).double() @ flushed(b).double()).float(),
    "exact, results flushed": lambda a, b: flushed((a.double() @ b.double()).float()),
}


class AddingBy(EmulatedArithmetic):
    """Adds up every product by a function, whatever a plan names."""

    def __init__(self, sums: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.sums = sums

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return self.cast(self.sums(a, b), cast)


@pytest.mark.parametrize("sums", UNKNOWN.values(), ids=UNKNOWN)
def test_sums_that_no_accumulator_makes_are_none(sums: Callable[[Tensor, Tensor], Tensor]) -> None:
    assert accumulators_of(AddingBy(sums), "cpu") == ()


def test_a_chain_in_fp32_is_sequential() -> None:
    assert accumulators_of(AddingBy(lambda a, b: _chain(_products(a, b))), "cpu") == (Accumulator.SEQUENTIAL,)


@pytest.mark.skipif("avx512_bf16" not in cpu_features(), reason="a processor without AVX512_BF16")
@pytest.mark.parametrize(("limit", "accumulator"), [("AVX512_CORE_BF16", "vdpbf16"), ("AVX512_CORE", "none known")])
def test_a_processor_is_told_by_the_level_that_onednn_is_on(limit: str, accumulator: str) -> None:
    probe = "from tiebreak.backends.backend import CPU; print(CPU.fingerprint()['bf16_matmul_accumulator'])"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": limit}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == f"{accumulator}\n"


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


def test_this_cpu_breaks_ties_to_even() -> None:
    """Of every CPU that torch runs on; whether subnormals are flushed depends on its bf16 instructions."""
    answers = fingerprint(CPU.arithmetic, CPU.device)
    assert answers["cast"] == "even"
    assert answers["matmul_sums_in"] == "fp32 or wider"
    assert answers["exp_at_zero"] == 1.0
