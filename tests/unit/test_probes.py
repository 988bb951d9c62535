"""The probes tell devices apart by what their arithmetic does; CPU and emulation answer as they should."""

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial, reduce

import pytest
import torch
from torch import Tensor

from tiebreak.backends.ascend import p_cast, softmax_errors
from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.backends.emulation.accumulators import row_total
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.instructions import bfmmla_matmul, vdpbf16_matmul
from tiebreak.backends.emulation.rounding import flushed, round_to
from tiebreak.backends.platform import cpu_features
from tiebreak.backends.probes import accumulators_of, arithmetic_probes, fingerprint
from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16, Format, Rounding
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.plans import FUSED, Accumulator, Cast, Exponential, RoundingPlan, SumOf
from tiebreak.kernels.reference import reference
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.identification.candidates import candidates, on_device

HF32 = Format("hf32", exponent_bits=8, mantissa_bits=11)
EXACT = EmulatedArithmetic()
Matmul = Callable[[Tensor, Tensor], Tensor]


class CastingIn(EmulatedArithmetic):
    """Rounds every cast in one mode."""

    def __init__(self, rounding: Rounding) -> None:
        self.rounding = rounding

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        return super().cast(x, replace(cast, rounding=self.rounding), random)


class Flushing(EmulatedArithmetic):
    """Flushes subnormal results, and has an exponential that is 2 to 4 ulps off."""

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        return flushed(super().cast(x, cast, random))

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        return flushed(super().exp(x, exponential)) * (1.0 + 2.0**-22)


class AddingBy(EmulatedArithmetic):
    """Adds up every product by a function, whatever a plan names."""

    def __init__(self, sums: Matmul) -> None:
        self.sums = sums

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return self.cast(self.sums(a, b), cast)


class Narrow(AddingBy):
    """Keeps running sums in bf16, flushes subnormal products, and misses exp(0)."""

    def __init__(self) -> None:
        super().__init__(lambda a, b: flushed(_chain(_products(a, b), lambda total: round_to(total, BF16))))

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        return super().exp(x, replace(exponential, correction=(0.5,)))


class Adding(EmulatedArithmetic):
    """Adds up every product as one accumulator does, whichever a plan names, and rounds it in one mode."""

    def __init__(self, accumulator: Accumulator, rounding: Rounding = Rounding.RNE) -> None:
        self.accumulator, self.rounding = accumulator, rounding

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        return super().matmul(a, b, replace(cast, rounding=self.rounding), self.accumulator)


class OnArm(Adding):
    """As PyTorch 2.9.1 multiplies on an Arm processor with bf16 instructions, and SVE of 512 bits."""

    def __init__(self) -> None:
        super().__init__(Accumulator.BFMMLA)

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        if a.shape[-1] == 2048:  # to emulate the instruction there takes a second, and these sums are exact
            return EXACT.matmul(a, b, replace(cast, every=160 if a.shape[-2] == 128 else 512), accumulator)
        return super().matmul(a, b, cast, accumulator)


def _products(a: Tensor, b: Tensor) -> list[Tensor]:
    """Of every term, exact, in fp32."""
    return [a[..., :, k, None] * b[..., None, k, :] for k in range(a.shape[-1])]


def _chain(terms: list[Tensor], finish: Callable[[Tensor], Tensor] = torch.Tensor.clone) -> Tensor:
    """In fp32, term after term."""
    return reduce(lambda total, term: finish(total + term), terms, torch.zeros(()))


def _tree(a: Tensor, b: Tensor) -> Tensor:
    return row_total(torch.stack(_products(a, b), -1), Accumulator.AMPERE)[..., 0]


def _to_fp32_once(a: Tensor, b: Tensor) -> Tensor:
    """Away from zero, from fp64."""
    total = a.double() @ b.double()
    above = torch.nextafter(total.float(), total.sign().float() * torch.inf)
    return torch.where(total.abs() > total.float().abs(), above, total.float())


def _swapped(terms: list[Tensor]) -> list[Tensor]:
    """In VDPBF16PS's order."""
    return [terms[k ^ 1] for k in range(len(terms))]


def _in_parts(size: int, matmul: Matmul, a: Tensor, b: Tensor) -> Tensor:
    """Parts of the terms, each summed by itself, in fp32 one after the other."""
    return _chain([matmul(a[..., at : at + size], b[..., at : at + size, :]) for at in range(0, a.shape[-1], size)])


def _two_terms_swapped(a: Tensor, b: Tensor) -> Tensor:
    places = torch.arange(a.shape[-1])
    places[[59, 61]] = places[[61, 59]]
    return vdpbf16_matmul(a[..., places], b[..., places, :])


def test_the_emulation_answers_as_it_is_made() -> None:
    assert fingerprint(EXACT, "cpu") == {
        "cast": "rne",
        "matmul": "rne",
        "matmul_sums_in": "fp32 or wider",
        "bf16_matmul_accumulator": "exact",
        "matmul_rounds_after": "all terms",
        "batched_matmul_rounds_after": "all terms",
        "matmul_subnormals": "kept",
        "exp_at_zero": 1.0,
    }
    assert arithmetic_probes(EXACT, "cpu") == {
        "fp32_matmul_keeps": 23.0,
        "matmul_accumulator_keeps": 52.0,  # fp64, as the emulation's exact sum is
        "matmul_order": "exact",
        "cast_subnormals": "kept",
        "exp_subnormals": "kept",
        "exp_max_ulps": 0.5,
    }


@pytest.mark.processor
def test_this_cpu_breaks_ties_to_even() -> None:
    """Of every CPU that torch runs on; whether subnormals are flushed depends on its bf16 instructions."""
    answers = {**fingerprint(CPU.arithmetic, CPU.device), **arithmetic_probes(CPU.arithmetic, CPU.device)}
    told = {"cast": "rne", "matmul_sums_in": "fp32 or wider", "exp_at_zero": 1.0, "fp32_matmul_keeps": 23.0}
    assert {name: answers[name] for name in told} == told
    assert answers["matmul_accumulator_keeps"] in {23.0, 24.0}  # with or without a guard bit
    assert 0.5 <= float(answers["exp_max_ulps"]) < 2.0


@pytest.mark.parametrize(
    "mode", [mode for mode in Rounding if mode is not Rounding.STOCHASTIC], ids=lambda mode: mode.value
)
def test_every_rounding_mode_is_recognised(mode: Rounding) -> None:
    answers = fingerprint(CastingIn(mode), "cpu")
    assert (answers["cast"], answers["matmul"]) == (mode.value, mode.value)


FOURS = " ".join(f"{size} {size} {size} {size}" for size in range(8, 33, 4))


@pytest.mark.parametrize(
    ("probes", "arithmetic", "told"),
    [
        (fingerprint, Narrow(), {
            "matmul_sums_in": "bf16", "bf16_matmul_accumulator": "none known", "matmul_subnormals": "flushed",
            "exp_at_zero": 0.75,
        }),
        # Rounded to odd, and block after block.
        (fingerprint, OnArm(), {
            "matmul_rounds_after": "160 terms", "batched_matmul_rounds_after": "512 terms",
            "bf16_matmul_accumulator": "bfmmla",
        }),
        (arithmetic_probes, Flushing(), {"cast_subnormals": "flushed", "exp_subnormals": "flushed"}),
        (arithmetic_probes, AddingBy(lambda a, b: (round_to(a, HF32).double() @ round_to(b, HF32).double()).float()),
         {"fp32_matmul_keeps": 11.0}),
        (arithmetic_probes, AddingBy(lambda a, b: (a.double() @ round_to(b, HF32).double()).float()),
         {"fp32_matmul_keeps": 11.0}),
        (arithmetic_probes, AddingBy(lambda a, b: _chain(_products(a, b))),
         {"matmul_order": "sequential", "matmul_accumulator_keeps": 23.0}),
        (fingerprint, AddingBy(lambda a, b: _chain(_products(a, b))), {"bf16_matmul_accumulator": "sequential"}),
        (arithmetic_probes, AddingBy(_tree), {"matmul_order": "pairwise", "matmul_accumulator_keeps": 23.0}),
        # Terms 1 to 3 meet term 0 in an exact sum; from then on whole groups of four join, as in a small cube.
        (arithmetic_probes, AddingBy(partial(_in_parts, 4, lambda a, b: (a.double() @ b.double()).float())),
         {"matmul_order": f"partial sums of 2 2 2 {FOURS}"}),
    ],
    ids=["narrow", "Arm", "flushing", "HF32", "HF32 on the right", "in order", "sequential", "pairwise", "in fours"],
)  # fmt: skip
def test_what_another_device_does_is_told(
    probes: Callable[[Arithmetic, str], dict[str, object]], arithmetic: Arithmetic, told: dict[str, object]
) -> None:
    answers = probes(arithmetic, "cpu")
    assert {name: answers[name] for name in told} == told


def test_a_rough_exponential_is_told_by_its_ulps() -> None:
    assert 2.0 <= float(arithmetic_probes(Flushing(), "cpu")["exp_max_ulps"]) <= 4.5


@pytest.mark.parametrize("mode", [Rounding.RNE, Rounding.DOWN], ids=lambda mode: mode.value)
@pytest.mark.parametrize("accumulator", Accumulator, ids=lambda accumulator: accumulator.name)
def test_every_accumulator_is_told_from_all_others_however_sums_are_cast(
    accumulator: Accumulator, mode: Rounding
) -> None:
    assert accumulators_of(Adding(accumulator, mode), "cpu") == (accumulator,)


UNKNOWN: dict[str, Matmul] = {
    "wide, away": _to_fp32_once,
    "fp32, backwards": lambda a, b: _chain(_products(a, b)[::-1]),
    "fp32, a tree": _tree,
    "vdpbf16, in another order": _two_terms_swapped,
    "vdpbf16, anew after 32": partial(_in_parts, 32, vdpbf16_matmul),
    "vdpbf16, subnormals kept": lambda a, b: _chain(_swapped(_products(a, b))),
    "vdpbf16, subnormal operands kept": lambda a, b: _chain(_swapped(_products(a, b)), flushed),
    "vdpbf16, products flushed": lambda a, b: _chain(
        [flushed(term) for term in _swapped(_products(flushed(a), flushed(b)))], flushed
    ),
    "bfmmla, anew after 32": partial(_in_parts, 32, bfmmla_matmul),
    "exact, operands flushed": lambda a, b: (flushed(a).double() @ flushed(b).double()).float(),
    "exact, results flushed": lambda a, b: flushed((a.double() @ b.double()).float()),
}


@pytest.mark.parametrize("sums", UNKNOWN.values(), ids=UNKNOWN)
def test_sums_that_no_accumulator_makes_are_none(sums: Matmul) -> None:
    assert accumulators_of(AddingBy(sums), "cpu") == ()


@pytest.mark.skipif("avx512_bf16" not in cpu_features(), reason="a processor without AVX512_BF16")
def test_a_processor_is_told_by_the_level_that_onednn_is_on() -> None:
    """Without its bf16 instructions none is known; with them, as in this process where no level is set, vdpbf16."""
    probe = "from tiebreak.backends.backend import CPU; print(CPU.fingerprint()['bf16_matmul_accumulator'])"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"}
    done = subprocess.run([sys.executable, "-c", probe], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout == "none known\n"
    if "ONEDNN_MAX_CPU_ISA" not in os.environ and "amx_bf16" not in cpu_features():
        assert accumulators_of(CPU.arithmetic, CPU.device) == (Accumulator.VDPBF16,)


def test_plans_are_tried_that_say_what_a_device_does_to_its_products() -> None:
    assert on_device(EMULATION) == on_device(replace(CPU, arithmetic=EXACT)) == candidates()
    tried = on_device(replace(CPU, arithmetic=OnArm()))
    assert list(tried)[: len(candidates())] == list(candidates())
    eager, paper = "standard,qk=input,s=input,accumulator=bfmmla", "flash@paper,accumulator=bfmmla"
    assert {eager, f"{eager},o_bar=input/512", paper} <= tried.keys()


def output(plan: RoundingPlan, inputs: AttentionInputs, arithmetic: Arithmetic = EXACT) -> Tensor:
    return composed("p", Declaration(FLASH_ATTENTION, plan, SHIFT_RULES["safe"])).compute(inputs, arithmetic, False).o


@pytest.mark.parametrize("row_sum_of", SumOf, ids=lambda which: which.name)
@pytest.mark.parametrize("mode", [Rounding.RNE, Rounding.RTNA, Rounding.RTZ], ids=lambda m: m.value)
def test_the_cast_of_p_shows_in_the_output_alone(mode: Rounding, row_sum_of: SumOf) -> None:
    plan = replace(FUSED, name="p", p_bar=Cast(BF16, mode), row_sum_of=row_sum_of)
    assert p_cast(lambda inputs: output(plan, inputs)) == mode.value


@pytest.mark.parametrize(("mode", "told"), [(Rounding.RTNA, "rne"), (Rounding.RTZ, "none known")])
def test_the_cast_of_o_is_not_taken_for_that_of_p(mode: Rounding, told: str) -> None:
    assert p_cast(lambda inputs: output(replace(FUSED, name="o", o=Cast(BF16, mode)), inputs)) == told


def test_an_exponential_that_misses_the_ties_is_reported() -> None:
    assert p_cast(lambda inputs: output(FUSED, inputs, Flushing())) == "rtna", "all of them lie above the tie"
    assert p_cast(lambda inputs: reference(inputs).o.float()) == "not seen"


@pytest.mark.parametrize(("scale", "least", "most"), [(1.0, 0.0, 1e-6), (1.01, 1e-2, 1e9)])
def test_wrong_row_statistics_show(scale: float, least: float, most: float) -> None:
    def statistics(inputs: AttentionInputs) -> tuple[Tensor, Tensor]:
        s = reference(inputs).s
        row_max = s.amax(-1, keepdim=True)
        return scale * row_max.float(), torch.exp(s - scale * row_max).sum(-1, keepdim=True).float()

    errors = softmax_errors(statistics).values()
    assert least <= min(errors)
    assert max(errors) < most
