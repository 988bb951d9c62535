"""The two arithmetics: the emulation's exponential, the device's casts."""

from decimal import Decimal, localcontext

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.registry import BACKENDS
from tiebreak.backends.torch_arithmetic import TorchArithmetic
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.formats import BF16, FP16, FP32, Format, Rounding, ulp
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

pytestmark = pytest.mark.quick

EMULATED = EmulatedArithmetic()
NATIVE = TorchArithmetic()
POLYNOMIAL = (0.01, 0.3, -0.2, -0.1)

each_arithmetic = pytest.mark.parametrize(
    "arithmetic", [backend.arithmetic for backend in BACKENDS.values()], ids=list(BACKENDS)
)
each_format = pytest.mark.parametrize("fmt", [BF16, FP16], ids=lambda fmt: fmt.name)


def _normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _is_nearest(result: float, exact: Decimal) -> bool:
    """Whether no fp32 neighbour of `result` lies nearer to `exact`."""
    value = np.float32(result)
    neighbours = (np.nextafter(value, np.float32(bound)) for bound in (-np.inf, np.inf))
    distance = abs(Decimal(float(value)) - exact)
    return all(distance <= abs(Decimal(float(neighbour)) - exact) for neighbour in neighbours)


@pytest.mark.parametrize("base_two", [False, True], ids=["base_e", "base_two"])
def test_the_emulated_exponential_is_correctly_rounded_in_base_two_of_an_fp32_product(base_two: bool) -> None:
    """Where the softmax works, from subnormal results up to large ones, and next to 0."""
    small = torch.tensor([2.0**-k for k in range(1, 30)])
    x = torch.cat([torch.linspace(-103.0, 20.0, 500), small, -small, torch.tensor([0.0, -87.5, -103.9])])
    arguments = x.numpy() * np.float32(1.4426950408889634) if base_two else x.numpy()
    results = EMULATED.exp(x, Exponential(base_two=base_two))
    assert results.dtype == torch.float32
    with localcontext(prec=40):
        for argument, result in zip(arguments.tolist(), results.tolist(), strict=True):
            exact = Decimal(2) ** Decimal(argument) if base_two else Decimal(argument).exp()
            assert _is_nearest(result, exact), argument


def test_the_emulated_exponential_of_what_no_fp32_number_is_small_enough_for_is_0() -> None:
    """Of masked scores too; NaN stays NaN, and what is too large is Inf."""
    x = torch.tensor([-torch.inf, -1e30, -701.0, -700.0, -104.0, torch.inf, 1e30, torch.nan])
    results = EMULATED.exp(x, Exponential())
    assert results[:5].view(torch.int32).tolist() == [0] * 5
    assert results[5:7].tolist() == [torch.inf] * 2
    assert results[7].isnan()
    assert x[0] == -torch.inf  # which is clamped in a copy


@pytest.mark.parametrize("correction", [(0.0,), (0.25,), POLYNOMIAL], ids=str)
def test_a_fast_exponential_lies_on_lines_between_the_powers_of_two_but_for_its_correction(
    correction: tuple[float, ...],
) -> None:
    x = torch.linspace(-80.0, 80.0, 1001)
    y = (x * 1.4426950408889634).double().numpy()
    y = y - np.polynomial.polynomial.polyval(y - np.floor(y), correction)
    expected = np.exp2(np.floor(y)) * (1.0 + y - np.floor(y))
    values = EMULATED.exp(x, Exponential(correction=correction)).double().numpy()
    # Its bits are an fp32 number of up to 2^31, where these are spaced by 128; a bit is 2^-23 of 1.
    assert np.abs(values / expected - 1.0).max() <= 128 * 2.0**-23


def test_a_fast_exponential_misses_one_at_zero_by_half_its_correction_there() -> None:
    fast = Exponential(correction=POLYNOMIAL)
    assert EMULATED.exp(torch.tensor([0.0, -0.0]), fast).tolist() == pytest.approx([fast.at_zero] * 2, abs=2.0**-17)
    assert (fast.at_zero, Exponential().at_zero) == (0.995, 1.0)
    # Keys that fill no lanes have the exact one.
    values = EMULATED.exp(torch.zeros(2, 3, 10), Exponential(correction=(0.5,), lanes=4))
    assert (values[..., :8] == 0.75).all()
    assert (values[..., 8:] == 1.0).all()


def test_a_fast_exponential_of_no_number_or_one_out_of_range() -> None:
    x = torch.tensor([-torch.inf, -90.0, 90.0, torch.inf, torch.nan])
    values = EMULATED.exp(x, Exponential(correction=(0.1, 0.1)))
    expected = torch.tensor([0.0, 0.0, torch.inf, torch.inf, torch.nan])
    torch.testing.assert_close(values, expected, rtol=0.0, atol=0.0, equal_nan=True)


@each_format
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.STOCHASTIC], ids=lambda mode: mode.value)
def test_both_arithmetics_cast_alike(fmt: Format, rounding: Rounding) -> None:
    x = torch.cat([_normal(2000) * 2.0**e for e in (-30, -20, -10, 0, 10, 20)])
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 65519.0, 65520.0])
    # Every tie between 1 and 2, which tests/unit/test_rounding.py holds the emulation to, and a step of fp32 beside it.
    ties = 1.0 + (torch.arange(2**fmt.mantissa_bits) + 0.5) / 2**fmt.mantissa_bits
    for values in (x, special, ties, -ties, ties - 2.0**-23, ties + 2.0**-23):
        bits = random_bits(3, torch.arange(len(values))) if rounding is Rounding.STOCHASTIC else None
        emulated, native = (each.cast(values, Cast(fmt, rounding), bits) for each in (EMULATED, NATIVE))
        assert torch.equal(emulated.view(torch.int32), native.view(torch.int32))


@each_arithmetic
def test_what_is_wide_keeps_fp32_and_a_masked_score_has_no_weight(arithmetic: Arithmetic) -> None:
    a, b = _normal(3, 40).abs(), _normal(40, 4, seed=1).abs()
    product, total = arithmetic.matmul(a, b, Cast(FP32), Accumulator.EXACT), arithmetic.row_sum(a, Accumulator.EXACT)
    # Any order of summation of n one-signed terms, each product rounded too: n unit roundoffs (Higham, 4.2).
    assert torch.allclose(product.double(), a.double() @ b.double(), rtol=40 * FP32.unit_roundoff, atol=0.0)
    assert torch.allclose(total.double(), a.double().sum(-1, keepdim=True), rtol=40 * FP32.unit_roundoff, atol=0.0)
    assert torch.equal(arithmetic.cast(a, Cast(FP32)), a)
    for base_two in (False, True):
        assert arithmetic.exp(torch.tensor([-torch.inf]), Exponential(base_two)).item() == 0.0


@each_arithmetic
@each_format
def test_a_narrow_product_lies_on_the_grid_within_an_ulp(arithmetic: Arithmetic, fmt: Format) -> None:
    # One signed, so that the fp32 accumulation errs by at most 40 * 2^-24, far less than the half ulp over the cast's.
    a, b = (_normal(*shape).abs().to(TORCH_DTYPES[fmt]).float() for shape in [(2, 5, 40), (2, 40, 6)])
    product = arithmetic.matmul(a, b, Cast(fmt), Accumulator.EXACT)
    exact = a.double() @ b.double()
    assert product.dtype == torch.float32
    assert torch.equal(product, product.to(TORCH_DTYPES[fmt]).float())
    assert ((product.double() - exact).abs() < ulp(exact, fmt)).all()


@pytest.mark.parametrize("name", ["flash@fused_fp8", "flash@sage"])
def test_torch_says_that_it_computes_in_no_8_bits(name: str) -> None:
    inputs = next(case for case in SCRIPTED if case.name == "fp8_ties").make(1, 0, 8, BF16)
    cpu = BACKENDS["cpu"]
    with pytest.raises(CannotRunError, match=r"casts to (fp8_e4m3|int8), in which torch computes nothing"):
        cpu.run(cpu.kernel(name), inputs, gradients=False)
