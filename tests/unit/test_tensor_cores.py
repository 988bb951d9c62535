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
from tiebreak.studies import mma_sim

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
    k = 2 * RULES[target][operands].products - 1  # the zeros that fill a step up change nothing
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


LARGEST = (2.0 - 2.0**-23) * 2.0**127  # of fp32
NVIDIA = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
HALF = (2.0**63, 2.0**63)  # 2^126
LARGE, OPPOSITE = (2.0**64, 2.0**64), (-(2.0**64), 2.0**64)  # products beyond fp32
TINY, SMALL = -(2.0**-40), (-(2.0**-14), 2.0**-12)
ABOVE = 1.0 + 2.0**-23
FULL = 2.0 - 2.0**-7  # in bf16
E5M2 = "fp8_e5m2fnuz"
# Products, an addend, formats, and the sum on targets.
WORKED = [
    # A sum that overflows is Inf.
    *(([HALF] * 4, 0.0, "bf16", dict.fromkeys((*NVIDIA, "gfx942"), math.inf)),
      ([HALF] * 2, -(2.0**127), "bf16", dict.fromkeys((*NVIDIA, "gfx942"), 0.0)),
      ([(-(2.0**63), 2.0**63)] * 2, -(2.0**127), "bf16", dict.fromkeys((*NVIDIA, "gfx942"), -math.inf))),
    # Half an ulp more than the largest number is the largest, toward zero; to even it would be Inf, as on CDNA3.
    ([(2.0**51, 2.0**52)], LARGEST, "bf16", dict.fromkeys(NVIDIA, LARGEST) | {"gfx942": math.inf}),
    ([(2.0**51, 2.0**52)] * 2, LARGEST, "bf16", dict.fromkeys(NVIDIA, math.inf)),
    # 0 * 2^100 is aligned by -126 + 100: below that less the bits kept, an addend is lost, and so is a product.
    ([(0.0, 2.0**100)], 2.0**-50, "bf16", {"sm_80": 2.0**-50, "sm_90": 2.0**-50, "gfx942": 2.0**-50}),
    ([(0.0, 2.0**100)], 2.0**-51, "bf16", {"sm_80": 0.0, "sm_90": 2.0**-51, "sm_100": 2.0**-51, "gfx942": 0.0}),
    ([(0.0, 2.0**100)], 2.0**-52, "bf16", {"sm_90": 0.0, "sm_100": 0.0}),
    ([(0.0, 1.0)], 2.0**-52, "bf16", {"sm_80": 2.0**-52, "sm_90": 2.0**-52, "gfx942": 2.0**-52}),
    ([(0.0, 2.0**100), (2.0**-40, 2.0**-11)], 0.0, "bf16", {"sm_80": 0.0, "sm_90": 2.0**-51}),
    ([(0.0, 2.0**15)], 2.0**-100, "fp16", {"sm_80": 2.0**-100, "gfx942": 2.0**-100}),  # -126, and not fp16's -14
    # Of a subnormal of fp32, or of fp16, the exponent is that of the smallest normal number.
    ([(2.0**-75, 2.0**-76)] * 2, 2.0**-149, "bf16", {"sm_80": 2.0**-149, "sm_90": 2.0**-149}),
    ([(2.0**-75, 2.0**-76)] * 4, 2.0**-149, "bf16", {"sm_80": 2.0**-149, "sm_90": 2.0**-148}),
    ([2.0**-24], 2.0**-39, "fp16", {"sm_80": 2.0**-24, "sm_90": 2.0**-24 + 2.0**-39}),
    # On CDNA3 -2^-40 is one last bit of the addend, 2^-24, and of products, 2^-31: both are rounded down.
    ([1.0], TINY, "bf16", {"gfx942": 1.0 - 2.0**-24, "sm_80": 1.0}),
    ([1.0], -TINY, "bf16", {"gfx942": 1.0}),
    ([(2.0**-20, -(2.0**-20))], 1.0, "bf16", {"gfx942": 1.0}),  # 1 - 2^-31, to even
    # 1 + 2^-23 - 2^-24 is a tie, which goes to the even 1; less 2^-31 it is none, and goes down too; more, up.
    ([-(2.0**-24)], ABOVE, "bf16", {"gfx942": 1.0}),
    ([-(2.0**-24), 2.0**-31], ABOVE, "bf16", {"gfx942": ABOVE, "sm_80": 1.0}),
    ([-(2.0**-24), 2.0**-32], ABOVE, "bf16", {"gfx942": 1.0}),
    ([1.0, TINY], -1.0, "bf16", {"gfx942": 0.0}),  # products are cut off among themselves
    # Even and odd keys of fp8 apart: cut off beside 1, alone among the odd rounded down to a last bit.
    ([1.0, 0.0, SMALL], -1.0, E5M2, {"gfx942": 0.0}),
    ([1.0, SMALL], -1.0, E5M2, {"gfx942": -(2.0**-24)}),
    # There an addend 2^25 times smaller than the largest product is rounded down, 2^26 times left out.
    ([1.0], -(2.0**-25), E5M2, {"gfx942": 1.0 - 2.0**-24}),
    ([1.0], -(2.0**-26), E5M2, {"gfx942": 1.0}),
    # A product beyond fp32 is Inf on CDNA3; NVIDIA goes on.
    ([LARGE], -LARGEST, "bf16", {"gfx942": math.inf}),
    ([LARGE, OPPOSITE], 1.0, "bf16", {"gfx942": math.nan, "sm_80": 0.0}),
    ([LARGE], -math.inf, "bf16", {"gfx942": -math.inf}),
    # Half of the smallest number is a zero, whose sign is lost toward zero.
    ([(-(2.0**-75), 2.0**-75)], 0.0, "bf16", {"sm_80": 0.0, "sm_90": 0.0, "gfx942": -0.0}),
    # A sum in last bits of the largest term has more than 32 bits with the addend, or in fp8.
    ([(FULL, FULL)] * 16, FULL, "bf16", dict.fromkeys(("sm_90", "sm_100", "sm_120"), 16 * FULL**2 + FULL)),
    ([(448.0, 448.0)] * 32, 1.0, "fp8_e4m3", dict.fromkeys(("sm_100", "sm_120"), 32 * 448.0**2 + 1.0)),
    # tf32 is 19 bits of an operand.
    ([1.0 + 2.0**-10 + 2.0**-11], 0.0, "tf32", {"sm_80": 1.0 + 2.0**-10, "gfx942": 1.0 + 2.0**-10}),
]  # fmt: skip


@pytest.mark.parametrize(("products", "addend", "operands", "sums"), WORKED)
def test_sums_by_hand_where_a_rule_decides(
    products: Sequence[float | tuple[float, float]], addend: float, operands: str, sums: dict[str, float]
) -> None:
    found = {target: str(_sum(products, addend, target, operands)) for target in sums}
    assert found == {target: str(total) for target, total in sums.items()}


@each_core
def test_inf_and_nan_are_passed_on_and_no_sum_of_zeros_is_negative(target: str, operands: str) -> None:
    inf, nan = math.inf, math.nan
    sums: list[tuple[Sequence[float | tuple[float, float]], float, float]] = [
        ([1.0], inf, inf), ([1.0], nan, nan), ([nan, 1.0], 1.0, nan), ([inf, -inf], 1.0, nan), ([(inf, 0.0)], 1.0, nan),
        ([inf], -inf, nan), ([-inf, 1.0], 1.0, -inf),  # of a format without Inf no kernel makes one
        ([0.0], -0.0, 0.0), ([-0.0] * 64, -0.0, 0.0), ([1.0, -1.0], -0.0, 0.0),
    ]  # fmt: skip
    for products, addend, total in sums:
        assert str(_sum(products, addend, target, operands)) == str(total), (products, addend)


@pytest.mark.parametrize(("a", "b"), [("fp8_e4m3", "fp8_e5m2"), ("fp8_e5m2", "fp8_e4m3")])
def test_two_formats_of_fp8_count_each_their_own_subnormals(a: str, b: str) -> None:
    # e4m3's 2^-9 counts as 2^-6, e5m2's 2^-16 as 2^-14: the product keeps 2^-33 of fp8's 13 bits.
    small = {"fp8_e4m3": 2.0**-9, "fp8_e5m2": 2.0**-16}
    for last, total in ((2.0**-33, 2.0**-25 + 2.0**-33), (2.0**-34, 2.0**-25)):
        operands = torch.tensor([[small[a]]]), torch.tensor([[small[b]]])
        assert tensor_core_matmul(*operands, torch.tensor([[last]]), core_of("sm_89", a, b)).item() == total


@pytest.mark.parametrize("at_once", [1, 40, 1000])
def test_what_is_in_memory_at_once_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    a, b, c = (
        torch.randn(shape, generator=generator).bfloat16().float()
        for shape in ((3, 2, 5, 24), (2, 24, 7), (3, 1, 5, 7))
    )
    core = core_of("sm_80", "bf16")
    expected = [[tensor_core_matmul(a[i, j], b[j], c[i, 0], core) for j in range(2)] for i in range(3)]
    monkeypatch.setattr(tensor_cores, "_AT_ONCE", at_once)
    assert torch.equal(tensor_core_matmul(a, b, c, core), torch.stack([torch.stack(row) for row in expected]))


def test_every_core_is_held_to_its_rules() -> None:
    assert {(target, a) for target, a, _ in tensor_cores._CORES} == {
        (t, a) for t, rules in RULES.items() for a in rules
    }
    assert (set(RULES), set(FORMATS)) == (set(TARGETS), set(OPERANDS))


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        (("sm_60", "fp16"), "sm_60 doesn't multiply fp16 by fp16; it does nothing known"),
        (("sm_80", "fp16", "bf16"), "sm_80 doesn't multiply fp16 by bf16; it does fp16, bf16, tf32$"),
        (("gfx942", "fp8_e4m3"), "gfx942 doesn't multiply fp8_e4m3 by fp8_e4m3; it does .*fp8_e4m3fnuz x fp8_e5m2fnuz"),
    ],
)
def test_what_a_target_does_not_multiply_is_named(operands: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        core_of(*operands)


def test_the_study_counts_every_sum_that_mma_sim_has_otherwise() -> None:
    """With an instruction of its kind in the place of MMA-Sim's, and every core that is known but a twin's."""
    instruction = mma_sim.INSTRUCTIONS[0]
    core = core_of(instruction.target, instruction.a, instruction.b)

    @dataclass
    class Built:
        off: float
        k: int = 2 * core.products

        def __call__(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
            d = tensor_core_matmul(a.float(), b.float(), c, core)
            d[3, 4] += self.off
            return d

    assert [mma_sim.compare(instruction, Built(0.0), kind, seed=1) for kind in mma_sim.KINDS] == [0] * 13
    assert mma_sim.compare(instruction, Built(1.0), "normal", seed=1) == 1
    nan = torch.tensor([float("nan"), 0.0])
    assert mma_sim.differing(nan, -nan) == 1
    compared = {(instruction.target, instruction.a, instruction.b) for instruction in mma_sim.INSTRUCTIONS}
    assert compared == {core for core in tensor_cores._CORES if core[0] != "sm_86"}
