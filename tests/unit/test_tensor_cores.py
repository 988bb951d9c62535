"""Tensor cores against sums of rationals, written out term by term, and by hand where each rule decides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation import tensor_cores
from tiebreak.backends.emulation.tensor_cores import OPERANDS, TARGETS, core_of, tensor_core_matmul

Array = npt.NDArray[Any]

# Exponent of the smallest normal number, fraction bits, largest number.
FORMATS = {
    "fp16": (-14, 10, 65504.0),
    "bf16": (-126, 7, 3.3895313892515355e38),
    "tf32": (-126, 10, 3.4011621342146535e38),
    "fp8_e4m3": (-6, 3, 448.0),
    "fp8_e5m2": (-14, 2, 57344.0),
    "fp8_e4m3fnuz": (-7, 3, 240.0),
    "fp8_e5m2fnuz": (-15, 2, 57344.0),
}


@dataclass(frozen=True)
class Rules:
    """A core, as MMA-Sim (arXiv 2511.10909) found it."""

    products: int
    bits: int
    result: int = 23  # fraction bits of a sum
    amd: bool = False
    halves: bool = False  # even and odd keys apart


HALVES = ("fp16", "bf16")
FP8, FNUZ = ("fp8_e4m3", "fp8_e5m2"), ("fp8_e4m3fnuz", "fp8_e5m2fnuz")
AMPERE = dict.fromkeys(HALVES, Rules(8, 24)) | {"tf32": Rules(4, 24)}
HOPPER = dict.fromkeys(HALVES, Rules(16, 25)) | {"tf32": Rules(8, 25)}
CDNA3 = dict.fromkeys(HALVES, Rules(8, 24, amd=True)) | {"tf32": Rules(4, 24, amd=True)}
RULES = {
    "sm_70": {"fp16": Rules(4, 23)},
    "sm_75": {"fp16": Rules(8, 24)},
    "sm_80": AMPERE,
    "sm_86": AMPERE,
    "sm_89": AMPERE | dict.fromkeys(FP8, Rules(16, 13, 13)),
    "sm_90": HOPPER | dict.fromkeys(FP8, Rules(32, 13, 13)),
    "sm_100": HOPPER | dict.fromkeys(FP8, Rules(32, 25)),
    "sm_120": HOPPER | dict.fromkeys(FP8, Rules(32, 25)),
    "gfx942": CDNA3 | dict.fromkeys(FNUZ, Rules(16, 24, amd=True, halves=True)),
}
each_core = pytest.mark.parametrize(
    ("target", "operands"),
    [(target, operands) for target, operand_types in RULES.items() for operands in operand_types],
)

Term = tuple[Fraction, int]  # a value, and the exponent that it is aligned by


def _exponent(x: float, least: int) -> int:
    """What a core takes for a number's exponent: of a subnormal its format's least, of a zero -126 in every format."""
    return max(math.frexp(x)[1] - 1, least) if x else -126


def _on_grid(x: Fraction, power: int, bits: int, down: bool = False) -> Fraction:
    spacing = Fraction(2) ** (power - bits)
    return (math.floor if down else math.trunc)(x / spacing) * spacing


def _cut_and_summed(terms: Sequence[Term], bits: int) -> Term:
    largest = max(power for _, power in terms)
    return sum((_on_grid(value, largest, bits) for value, _ in terms), Fraction(0)), largest


def _toward_zero(x: Fraction, bits: int) -> float:
    if abs(x) >= 2**128:
        return math.inf if x > 0 else -math.inf
    return float(_on_grid(x, _exponent(float(x), -126), bits))


def _step(terms: Sequence[Term], addend: float, rules: Rules) -> float:
    of_addend = (Fraction(addend), _exponent(addend, -126))
    if not rules.amd:
        return _toward_zero(_cut_and_summed([*terms, of_addend], rules.bits)[0], rules.result)
    if rules.halves:
        halves = [_cut_and_summed(terms[first::2], rules.bits) for first in (0, 1) if terms[first::2]]
        power = max(part for _, part in halves)
        products = sum((_on_grid(value, power, rules.bits, down=True) for value, _ in halves), Fraction(0))
    else:
        products, power = _cut_and_summed(terms, rules.bits)
    largest = max(power, of_addend[1])
    addend_part = _on_grid(of_addend[0], largest, rules.bits, down=True)
    if rules.halves and of_addend[1] < largest - 25:
        addend_part = Fraction(0)
    total = float(_on_grid(products, largest, 31, down=True) + addend_part)  # exact: of less than 53 bits
    with np.errstate(over="ignore"):
        return float(np.float32(total))


def oracle(row: Array, column: Array, addend: float, target: str, operands: str) -> float:
    """One element of finite operands, in rationals."""
    rules, least = RULES[target][operands], FORMATS[operands][0]
    for start in range(0, len(row), rules.products):
        step = slice(start, start + rules.products)
        pairs = list(zip(row[step].tolist(), column[step].tolist(), strict=True))
        terms = [(Fraction(x) * Fraction(y), _exponent(x, least) + _exponent(y, least)) for x, y in pairs]
        if rules.amd and any(abs(value) >= 2**128 for value, _ in terms):
            return math.nan  # not this oracle's: see the test of products beyond fp32
        addend = _step(terms, addend, rules)
        if math.isinf(addend):
            break
    return addend


def _values(rng: np.random.Generator, shape: tuple[int, int], operands: str, low: int, high: int) -> Array:
    """Of a format, subnormals and zeros among them, with exponents from low to high or the nearest it has."""
    least, bits, largest = FORMATS[operands]
    first, last = (min(max(end, least - bits), int(math.log2(largest))) for end in (low, high))
    exponents = rng.integers(first, last + 1, shape)
    spacing = 2.0 ** (np.maximum(exponents, least) - bits)
    whole = np.trunc(rng.uniform(1, 2, shape) * 2.0**exponents / spacing)
    signed = rng.choice([-1.0, 1.0], shape) * (rng.random(shape) < 0.9) * whole * spacing
    return signed.clip(-largest, largest).astype(np.float32)


def _tensors(a: Array, b: Array, c: Array) -> tuple[Tensor, Tensor, Tensor]:
    return torch.from_numpy(a), torch.from_numpy(b), torch.from_numpy(c)


def _same(actual: Tensor, expected: Array) -> bool:
    return np.array_equal(actual.numpy().view(np.int32), expected.view(np.int32))


@each_core
@pytest.mark.parametrize(("low", "high", "addends"), [(-3, 2, (-4, 4)), (-14, 12, (-30, 26)), (-75, -55, (-149, -110))])
def test_a_core_is_the_sum_of_rationals(
    target: str, operands: str, low: int, high: int, addends: tuple[int, int]
) -> None:
    rng = np.random.default_rng(len(operands) + low + 100)
    k = 2 * RULES[target][operands].products
    a, b = _values(rng, (5, k), operands, low, high), _values(rng, (k, 6), operands, low, high)
    c = (rng.choice([-1, 1], (5, 6)) * 2.0 ** rng.uniform(*addends, (5, 6))).astype(np.float32)
    product = tensor_core_matmul(*_tensors(a, b, c), core_of(target, operands))
    expected = [
        [oracle(row, column, float(x), target, operands) for column, x in zip(b.T, line, strict=True)]
        for row, line in zip(a, c, strict=True)
    ]
    assert product.dtype == torch.float32
    assert _same(product, np.array(expected, np.float32))


def _sum(products: Sequence[float | tuple[float, float]], addend: float, target: str, operands: str) -> float:
    """Of products, each of two factors or of one and 1."""
    pairs = [term if isinstance(term, tuple) else (term, 1.0) for term in products]
    a, b = torch.tensor([[x for x, _ in pairs]]), torch.tensor([[y] for _, y in pairs])
    return tensor_core_matmul(a, b, torch.tensor([[addend]]), core_of(target, operands)).item()


NVIDIA = [(target, "bf16") for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")]
LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of fp32


@pytest.mark.parametrize(("target", "operands"), [*NVIDIA, ("gfx942", "bf16")])
def test_a_sum_that_overflows_is_inf(target: str, operands: str) -> None:
    half = (2.0**63, 2.0**63)  # 2^126
    assert _sum([half, half, half, half], 0.0, target, operands) == math.inf
    assert _sum([half, half], -(2.0**127), target, operands) == 0.0
    assert _sum([(-(2.0**63), 2.0**63)] * 2, -(2.0**127), target, operands) == -math.inf


@pytest.mark.parametrize(("target", "operands"), NVIDIA)
def test_a_sum_below_the_first_number_that_fp32_lacks_is_its_largest(target: str, operands: str) -> None:
    # The largest number and half an ulp of it. To even it would be Inf, as it is on CDNA3.
    half_an_ulp = [(2.0**51, 2.0**52)]
    assert Fraction(LARGEST) + Fraction(2) ** 103 == Fraction(2) ** 128 - Fraction(2) ** 103
    assert _sum(half_an_ulp, LARGEST, target, operands) == LARGEST
    assert _sum(half_an_ulp, LARGEST, "gfx942", operands) == math.inf
    assert _sum(half_an_ulp * 2, LARGEST, target, operands) == math.inf


def test_a_subnormal_counts_as_the_smallest_normal_number() -> None:
    # 2^-24 is fp16's smallest subnormal. Counted as 2^-14, its product with 1 keeps 2^-38 and more; 2^-24, 2^-48.
    assert _sum([2.0**-24], 2.0**-38, "sm_80", "fp16") == 2.0**-24 + 2.0**-38
    assert _sum([2.0**-24], 2.0**-39, "sm_80", "fp16") == 2.0**-24
    assert _sum([2.0**-24], 2.0**-39, "sm_90", "fp16") == 2.0**-24 + 2.0**-39
    assert _sum([2.0**-24], 2.0**-40, "sm_90", "fp16") == 2.0**-24
    assert _sum([2.0**-24], 2.0**-39, "sm_80", "bf16") == 2.0**-24 + 2.0**-39  # no subnormal there


@pytest.mark.parametrize(("target", "lost"), [("sm_89", 2.0**-20), ("sm_90", 2.0**-20), ("sm_100", 2.0**-32)])
def test_subnormals_of_fp8_count_as_its_smallest_normal_number(target: str, lost: float) -> None:
    # e4m3: the smallest normal number is 2^-6, the smallest of all 2^-9.
    assert _sum([2.0**-9], 2 * lost, target, "fp8_e4m3") == 2.0**-9 + 2 * lost
    assert _sum([2.0**-9], lost, target, "fp8_e4m3") == 2.0**-9


def test_a_subnormal_of_fp32_counts_as_its_smallest_normal_number() -> None:
    # A product of 2^-150 and the addend 2^-149: aligned to -126 with 24 bits, 2^-150 is the last one.
    product = (2.0**-75, 2.0**-75)
    assert _sum([product, product], 2.0**-149, "sm_80", "bf16") == 2.0**-148
    half = (2.0**-75, 2.0**-76)  # 2^-151: lost there, kept with 25 bits
    assert _sum([half, half], 2.0**-149, "sm_80", "bf16") == 2.0**-149
    assert _sum([half] * 2, 2.0**-149, "sm_90", "bf16") == 2.0**-149
    assert _sum([half] * 4, 2.0**-149, "sm_90", "bf16") == 2.0**-148
    assert _sum([half] * 4, 2.0**-149, "sm_80", "bf16") == 2.0**-149


@pytest.mark.parametrize(("target", "bits"), [("sm_80", 24), ("sm_90", 25), ("sm_100", 25), ("gfx942", 24)])
def test_a_zero_counts_as_the_smallest_normal_number_of_fp32(target: str, bits: int) -> None:
    # 0 * 2^100 is aligned by -126 + 100: below that less the bits kept, an addend is lost.
    last = 2.0 ** (-26 - bits)
    assert _sum([(0.0, 2.0**100)], last, target, "bf16") == last
    assert _sum([(0.0, 2.0**100)], last / 2, target, "bf16") == 0.0
    assert _sum([(0.0, 1.0)], last / 2, target, "bf16") == last / 2
    # So is a product; fp16's zeros, too, are -126 and not its own -14.
    if target != "gfx942":
        assert _sum([(0.0, 2.0**100), (2.0**-40, 2.0 ** (14 - bits))], 0.0, target, "bf16") == last
        assert _sum([(0.0, 2.0**100), (2.0**-40, 2.0 ** (13 - bits))], 0.0, target, "bf16") == 0.0
    assert _sum([(0.0, 2.0**15)], 2.0**-100, target, "fp16") == 2.0**-100


def test_cdna3_rounds_the_addend_and_the_products_down_and_their_sum_to_even() -> None:
    # -2^-40 is nothing to a term cut off; rounded down it is one last bit, 2^-24, to the addend, and 2^-31 to products.
    tiny = -(2.0**-40)
    assert _sum([1.0], tiny, "gfx942", "bf16") == 1.0 - 2.0**-24
    assert _sum([1.0], -tiny, "gfx942", "bf16") == 1.0
    assert _sum([1.0], tiny, "sm_80", "bf16") == 1.0
    assert _sum([(2.0**-20, -(2.0**-20))], 1.0, "gfx942", "bf16") == 1.0  # 1 - 2^-31, to even
    # 1 + 2^-23 - 2^-24 is a tie, which goes to the even 1; less 2^-31 it is none, and goes down too; more, up.
    above = 1.0 + 2.0**-23
    assert _sum([-(2.0**-24)], above, "gfx942", "bf16") == 1.0
    assert _sum([-(2.0**-24), 2.0**-31], above, "gfx942", "bf16") == above
    assert _sum([-(2.0**-24), 2.0**-31], above, "sm_80", "bf16") == 1.0
    # Products are cut off among themselves, before they meet the addend.
    assert _sum([1.0, tiny], -1.0, "gfx942", "bf16") == 0.0


def test_cdna3_takes_even_and_odd_keys_of_fp8_apart() -> None:
    # -2^-14 * 2^-12 is cut off beside 1; alone among the odd keys it is rounded down to one last bit.
    small = (-(2.0**-14), 2.0**-12)
    e5m2 = "fp8_e5m2fnuz"
    assert _sum([1.0, 0.0, small], -1.0, "gfx942", e5m2) == 0.0
    assert _sum([1.0, small], -1.0, "gfx942", e5m2) == -(2.0**-24)
    # An addend 2^25 times smaller than the largest product is rounded down, 2^26 times left out.
    assert _sum([1.0], -(2.0**-25), "gfx942", e5m2) == 1.0 - 2.0**-24
    assert _sum([1.0], -(2.0**-26), "gfx942", e5m2) == 1.0
    assert _sum([1.0], -(2.0**-26), "gfx942", "bf16") == 1.0 - 2.0**-24


def test_cdna3_makes_inf_of_a_product_beyond_fp32_where_nvidia_goes_on() -> None:
    large, other = (2.0**64, 2.0**64), (-(2.0**64), 2.0**64)
    assert _sum([large], -LARGEST, "gfx942", "bf16") == math.inf
    assert math.isnan(_sum([large, other], 0.0, "gfx942", "bf16"))
    assert _sum([large], -math.inf, "gfx942", "bf16") == -math.inf
    assert _sum([large, other], 1.0, "sm_80", "bf16") == 0.0


@each_core
def test_inf_and_nan_are_passed_on(target: str, operands: str) -> None:
    inf, nan = math.inf, math.nan
    assert _sum([1.0], inf, target, operands) == inf
    assert math.isnan(_sum([1.0], nan, target, operands))
    assert math.isnan(_sum([nan, 1.0], 1.0, target, operands))
    assert _sum([-inf, 1.0], 1.0, target, operands) == -inf  # of a format without Inf no kernel makes one
    assert math.isnan(_sum([inf, -inf], 1.0, target, operands))
    assert math.isnan(_sum([(inf, 0.0)], 1.0, target, operands))
    assert math.isnan(_sum([inf], -inf, target, operands))


@each_core
def test_no_sum_of_zeros_is_negative(target: str, operands: str) -> None:
    for products, addend in (([0.0], -0.0), ([-0.0] * 64, -0.0), ([1.0, -1.0], -0.0)):
        assert math.copysign(1.0, _sum(products, addend, target, operands)) == 1.0


@pytest.mark.parametrize(("target", "sign"), [("sm_80", 1.0), ("sm_90", 1.0), ("gfx942", -1.0)])
def test_what_fp32_has_no_number_for_is_a_zero_whose_sign_is_lost_toward_zero(target: str, sign: float) -> None:
    total = _sum([(-(2.0**-75), 2.0**-75)], 0.0, target, "bf16")  # half of the smallest number
    assert total == 0.0
    assert math.copysign(1.0, total) == sign


@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_tf32_reads_19_bits_of_an_operand(target: str) -> None:
    assert _sum([1.0 + 2.0**-10 + 2.0**-11], 0.0, target, "tf32") == 1.0 + 2.0**-10
    assert _sum([-(1.0 + 2.0**-10 + 2.0**-11)], 0.0, target, "tf32") == -(1.0 + 2.0**-10)


def test_two_formats_of_fp8_count_each_their_own_subnormals() -> None:
    # e4m3's 2^-9 counts as 2^-6, e5m2's 2^-16 as 2^-14: the product keeps 2^-33 of fp8's 13 bits.
    a, b = torch.tensor([[2.0**-9]]), torch.tensor([[2.0**-16]])
    for last, total in ((2.0**-33, 2.0**-25 + 2.0**-33), (2.0**-34, 2.0**-25)):
        for core in (core_of("sm_89", "fp8_e4m3", "fp8_e5m2"), core_of("sm_89", "fp8_e5m2", "fp8_e4m3")):
            pair = (a, b) if core.least_exponents[0] == -6 else (b, a)
            assert tensor_core_matmul(*pair, torch.tensor([[last]]), core).item() == total


def _drawn(*shape: int, seed: int) -> Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32)).bfloat16().float()


@each_core
def test_zeros_beyond_k_change_nothing(target: str, operands: str) -> None:
    core = core_of(target, operands)
    a, b, c = torch.ones(2, 3), torch.full((3, 2), 0.5), torch.full((2, 2), 2.0**-30)
    padded = tensor_core_matmul(torch.nn.functional.pad(a, (0, 61)), torch.nn.functional.pad(b, (0, 0, 0, 61)), c, core)
    assert torch.equal(tensor_core_matmul(a, b, c, core), padded)


@pytest.mark.parametrize("at_once", [1, 40, 1000, 10**6])
def test_what_is_in_memory_at_once_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, c = _drawn(3, 2, 5, 24, seed=1), _drawn(2, 24, 7, seed=2), _drawn(3, 1, 5, 7, seed=3)
    core = core_of("sm_80", "bf16")
    expected = [[tensor_core_matmul(a[i, j], b[j], c[i, 0], core) for j in range(2)] for i in range(3)]
    monkeypatch.setattr(tensor_cores, "_AT_ONCE", at_once)
    assert torch.equal(tensor_core_matmul(a, b, c, core), torch.stack([torch.stack(row) for row in expected]))


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 4, 0)])
def test_nothing_to_add_leaves_the_addend(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    product = tensor_core_matmul(torch.ones(m, k), torch.ones(k, n), torch.ones(m, n), core_of("sm_80", "bf16"))
    assert product.shape == (m, n)
    assert (product == 1.0 + k).all()


def test_operands_and_addend_are_left_as_they_are() -> None:
    a, b, c = torch.ones(2, 4), torch.ones(4, 2), torch.zeros(2, 2)
    tensor_core_matmul(a, b, c, core_of("sm_89", "tf32"))
    assert bool((a == 1).all() and (b == 1).all() and (c == 0).all())


def test_every_target_has_the_cores_that_mma_sim_has() -> None:
    assert set(RULES) == set(TARGETS)
    assert set(FORMATS) == set(OPERANDS)
    for target in TARGETS:
        for operands in OPERANDS:
            if operands in RULES[target]:
                core, rules = core_of(target, operands), RULES[target][operands]
                assert (core.products, core.fraction_bits, core.result.mantissa_bits) == (
                    rules.products, rules.bits, rules.result
                )  # fmt: skip
            else:
                with pytest.raises(
                    ValueError, match=f"{target} doesn't multiply {operands} by {operands}; it does fp16"
                ):
                    core_of(target, operands)


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (("sm_60", "fp16"), "no tensor core is known of 'sm_60': known are sm_70, sm_75, "),
        (("sm_80", "fp32"), "no tensor core is known that multiplies 'fp32': known are fp16, bf16, tf32, "),
        (("sm_80", "fp16", "int8"), "no tensor core is known that multiplies 'int8'"),
        (("sm_80", "fp16", "bf16"), "sm_80 doesn't multiply fp16 by bf16; it does fp16, bf16, tf32$"),
        (("sm_75", "bf16"), "sm_75 doesn't multiply bf16 by bf16; it does fp16$"),
        (("gfx942", "fp8_e4m3"), "gfx942 doesn't multiply fp8_e4m3 by fp8_e4m3; it does .*fp8_e4m3fnuz x fp8_e5m2fnuz"),
    ],
)
def test_what_a_target_does_not_multiply_is_named(operands: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core_of(*operands)
