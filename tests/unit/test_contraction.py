"""Contraction: the exponential's argument as fma(S, c, -m c), against exact rationals and its sources' formulas."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.rounding import fma
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Declaration, run_declared
from tiebreak.kernels.plans import Exponential
from tiebreak.kernels.reference import reference
from tiebreak.studies.cells import CASES

pytestmark = pytest.mark.quick

EMULATED, NATIVE = EmulatedArithmetic(), TorchArithmetic()
LOG2_E = Fraction(math.log2(math.e))  # the fp64 number, of which FlashAttention-2 takes a product with alpha
TIE = 2.0**12 + 1.0  # its square has 25 bits, the last one set: halfway between two fp32 numbers


def nearest(exact: Fraction) -> float:
    """The fp32 number nearest to a rational, an even one of two: by comparing neighbours, exactly."""
    guess = np.float32(float(exact))
    near = [guess, np.nextafter(guess, np.float32(-np.inf)), np.nextafter(guess, np.float32(np.inf))]
    return min(
        (float(candidate) for candidate in near if np.isfinite(candidate)),
        key=lambda candidate: (abs(Fraction(candidate) - exact), np.float32(candidate).view(np.int32) & 1),
    )


def exact_fma(x: float, factor: float, addend: float) -> float:
    return nearest(Fraction(x) * Fraction(factor) + Fraction(addend))


def fp32(rng: np.random.Generator, n: int, exponents: tuple[int, int]) -> Tensor:
    """Random numbers with 24 bits each, of exponents from a range."""
    bits = rng.integers(2**23, 2**24, n).astype(np.float64) * rng.choice([-1.0, 1.0], n)
    return torch.from_numpy(np.ldexp(bits, rng.integers(*exponents, n) - 23).astype(np.float32))


def by_rationals(x: Tensor, factor: float, addend: Tensor) -> Tensor:
    return torch.tensor([exact_fma(a, factor, b) for a, b in zip(x.tolist(), addend.tolist(), strict=True)])


@pytest.mark.parametrize("apart", [0, 20, 90, None], ids=str)
def test_a_fused_multiply_add_is_rounded_once(apart: int | None) -> None:
    rng = np.random.default_rng(1 if apart is None else apart)
    x, factor = fp32(rng, 300, (-6, 12)), fp32(rng, 1, (-3, 3)).item()
    # The last as at a row's maximum: what is left of S c less the rounded m c is the rounding error of m c.
    addend = -(x * factor) if apart is None else fp32(rng, 300, (-6 - apart, 6 - apart))
    fused = fma(x, factor, addend)
    assert torch.equal(fused, by_rationals(x, factor, addend))
    assert (fused != 0).double().mean() > 0.9


def test_what_fp64_rounds_to_a_tie_is_not_rounded_twice() -> None:
    places = [(sign, added) for sign in (1.0, -1.0) for added in (2.0**-60, -(2.0**-60))]
    once = [exact_fma(sign * TIE, TIE, added) for sign, added in places]
    assert [fma(torch.tensor([sign * TIE]), TIE, torch.tensor([added])).item() for sign, added in places] == once
    # fp64 alone would round some twice.
    twice = [float(np.float32(TIE * TIE * sign + added)) for sign, added in places]
    assert sum(a != b for a, b in zip(twice, once, strict=True)) == 2


def test_a_fused_multiply_add_of_what_is_no_number() -> None:
    x, addend = torch.tensor([-torch.inf, torch.nan, 1.0, 3e38]), torch.tensor([-5.0, 1.0, torch.inf, 3e38])
    sums = fma(x, 2.0, addend)
    assert sums[[0, 2, 3]].tolist() == [-torch.inf, torch.inf, torch.inf]
    assert sums[1].isnan()


class Noted(EmulatedArithmetic):
    """The emulation, that keeps the powers it is called for."""

    def __init__(self) -> None:
        self.calls: list[tuple[Tensor, float, Tensor]] = []

    def exp_of_fma(self, x: Tensor, factor: float, addend: Tensor, exponential: Exponential) -> Tensor:
        self.calls.append((x, factor, addend))
        return super().exp_of_fma(x, factor, addend, exponential)


def inputs(d: int = 20, keys: int = 6) -> AttentionInputs:
    """The scale 1/sqrt(20) is no power of two."""
    rng = np.random.default_rng(3)
    q, k, v, do = (
        torch.from_numpy(2 * rng.standard_normal((1, 2, n, d), np.float32)).bfloat16().float()
        for n in (3, keys, keys, 3)
    )
    return AttentionInputs(q, k, v, do, Formats.of(BF16))


def declared(text: str, block: Block | None = None) -> Declaration:
    declaration = parse_declaration(text)
    return declaration if block is None else replace(declaration, block=block)


def test_the_argument_is_that_of_flash_attention_2() -> None:
    """softmax.h: max_scaled = max * scale, exp2f(tensor * scale - max_scaled), scores_scale of (max - max') * scale."""
    call, noted = inputs(), Noted()
    run_declared(declared("fused_contracted", Block(3, 3)), call, noted, gradients=False)
    s = call.q.double() @ call.k.double().transpose(-1, -2)
    c = nearest(Fraction(np.float32(call.scale).item()) * LOG2_E)
    first, second, rescaled = noted.calls
    earlier = s[..., :3].float().amax(-1, keepdim=True)
    largest = torch.maximum(earlier, s[..., 3:].float().amax(-1, keepdim=True))
    for (x, factor, addend), tile, top in ((first, s[..., :3], earlier), (second, s[..., 3:], largest)):
        assert torch.equal(x, tile.float())  # alpha is in the factor alone
        assert factor == c
        assert addend.flatten().tolist() == [-nearest(Fraction(m) * Fraction(c)) for m in top.flatten().tolist()]
    assert torch.equal(rescaled[0], earlier - largest)
    assert (rescaled[1], rescaled[2].abs().max().item()) == (c, 0.0)


def test_the_backward_pass_contracts_with_the_log_sum_exp() -> None:
    call, noted = inputs(), Noted()
    out = run_declared(declared("fused_contracted", Block(3, 6)), call, noted, gradients=True)
    assert out.lse is not None
    (x, factor, addend) = noted.calls[-1]
    assert torch.equal(x, (call.q.double() @ call.k.double().transpose(-1, -2)).float())
    assert factor == nearest(Fraction(np.float32(call.scale).item()) * LOG2_E)
    rounded_log2_e = Fraction(np.float32(math.log2(math.e)).item())
    assert addend.flatten().tolist() == [-nearest(Fraction(lse) * rounded_log2_e) for lse in out.lse.flatten().tolist()]


def test_where_s_is_cast_its_scale_comes_before() -> None:
    call, noted = inputs(), Noted()
    run_declared(declared("fused_contracted,s=bf16"), call, noted, gradients=False)
    ((x, factor, _),) = noted.calls
    assert torch.equal(x, x.bfloat16().float())
    assert factor == np.float32(math.log2(math.e)).item()


MOVING = {
    **dict.fromkeys(("fixed_offset", "dithered", "lazy"), "growing_maximum"),
    "gamma": "repeated_negative",
    "stabilized": "near_tie_inside",
}


@pytest.mark.parametrize(("rule", "case"), MOVING.items())
def test_a_shift_rule_does_the_same_to_scores_without_their_scale(rule: str, case: str) -> None:
    """Where alpha is a power of two there is no difference but the contraction's own, and in base e none."""
    call = CASES[case].make(1, 0, 16, BF16)
    sound, contracted = (
        run_declared(declared(f"{rule}@fused{end}"), call, EMULATED, False) for end in ("", ",contract=yes")
    )
    assert torch.equal(sound.o, contracted.o)
    plain = run_declared(declared("fused"), call, EMULATED, False)
    assert not torch.equal(sound.o, plain.o)


@pytest.mark.parametrize(
    ("text", "coherence", "bias"), [("fused_contracted", 0.157, 0.022), ("fused,base=2", 0.035, 0.004)]
)
def test_contraction_gives_a_row_a_bias_of_its_own(text: str, coherence: float, bias: float) -> None:
    """The figures of the prototype, run on this arithmetic; docs/science.md."""
    call = CASES["no_tail"].make(1, 0, 256, BF16)
    o = run_declared(declared(text), call, EMULATED, gradients=False).o
    of_rows = signed_error_ulps(o, reference(call).o, BF16).mean(-1)
    assert of_rows.abs().mean().item() == pytest.approx(coherence, abs=0.001)
    assert of_rows.mean().item() == pytest.approx(bias, abs=0.001)


def test_a_device_takes_the_same_argument_if_it_has_fp64() -> None:
    x, addend = torch.linspace(-40.0, 40.0, 1001), torch.full((1001,), -7.3)
    for base in (Exponential(base_two=True), Exponential()):
        native, emulated = (each.exp_of_fma(x, 0.3, addend, base) for each in (NATIVE, EMULATED))
        torch.testing.assert_close(native, emulated, rtol=3e-7, atol=0)  # torch's errs by an ulp or so
    with pytest.raises(CannotRunError, match="fused multiply-add"):
        TorchArithmetic(has_fp64=False).exp_of_fma(x, 1.0, addend, Exponential())
