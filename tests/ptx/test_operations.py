"""What instructions compute, on random bits: against integers of any size, exact fractions, and PyTorch's casts."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tiebreak.backends.ptx.operations import OPERATIONS, TYPES

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numbers beyond a range, which are meant
PATTERNS = 20_000
SOME = 2_000  # for what is computed number by number
SPECIAL = [0, 1, 2**31, 2**31 - 1, 2**32 - 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000, 0x00800000, 0x80000001]


def patterns(kind: str, seed: int, count: int = SOME) -> NDArray[np.generic]:
    """Random bits, and corners, as numbers of a type."""
    dtype = TYPES[kind.removesuffix("x2")]
    random = np.random.default_rng(seed)
    words = random.integers(0, 2**64, count, dtype=np.uint64) >> random.integers(0, 64, count, dtype=np.uint64)
    words[: len(SPECIAL) ** 2] = np.repeat(SPECIAL, len(SPECIAL)) if seed % 2 else SPECIAL * len(SPECIAL)
    return words.astype(f"u{dtype.itemsize}").view(dtype)


def fp32(*numbers: float) -> NDArray[np.float32]:
    return np.array(numbers, np.float32)


def wrapped(value: int, kind: str) -> int:
    bits = 8 * TYPES[kind].itemsize
    value %= 2**bits
    return value - 2**bits if kind[0] == "s" and value >= 2 ** (bits - 1) else value


def toward_zero(x: int, y: int) -> int:
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1) if y else 0


def field(x: int, start: int, length: int, kind: str) -> int:
    """The bits one by one, as the manual has it."""
    width, start, length = 8 * TYPES[kind].itemsize, start & 255, length & 255
    bits = [x >> at & 1 for at in range(width)]
    last = bits[min(start + length - 1, width - 1)] if kind[0] == "s" and length else 0
    found = [bits[start + at] if at < length and start + at < width else last for at in range(width)]
    return wrapped(sum(bit << at for at, bit in enumerate(found)), kind)


INTEGERS: dict[str, Callable[..., int | None]] = {
    "add": lambda x, y: x + y,
    "sub": lambda x, y: x - y,
    "mul.lo": lambda x, y: x * y,
    "mad.lo": lambda x, y, z: x * y + z,
    "min": min,
    "max": max,
    "div": lambda x, y: toward_zero(x, y) if y else None,
    "rem": lambda x, y: x - toward_zero(x, y) * y if y else None,
    "shr": lambda x, by: x >> (by & 0xFFFFFFFF),
    "and": lambda x, y: x & y,
    "or": lambda x, y: x | y,
    "xor": lambda x, y: x ^ y,
    "not": lambda x: ~x,
    "neg": lambda x: -x,
    "abs": abs,
    "shl": lambda x, by: x << by if by < 64 else 0,
}
CALLS = [
    (f"{name}.{kind}", kind, function)
    for name, function in INTEGERS.items()
    for kind in ("s16", "u16", "s32", "u32", "s64", "u64", "b16", "b32", "b64")
    if f"{name}.{kind}" in OPERATIONS
]


@pytest.mark.parametrize(("opcode", "kind", "function"), CALLS, ids=lambda value: value if "." in str(value) else "")
def test_integers_wrap_as_integers_of_any_size_taken_modulo_their_width(
    opcode: str, kind: str, function: Callable[..., int | None]
) -> None:
    operation = OPERATIONS[opcode]
    count = function.__code__.co_argcount if hasattr(function, "__code__") else 1 if function is abs else 2
    kinds = [*operation.sources, *[operation.sources[-1]] * count][:count]
    operands = [patterns(each, seed) for seed, each in enumerate(kinds, 1)]
    found = operation.compute(*operands)
    for result, *numbers in zip(found.tolist(), *(operand.tolist() for operand in operands), strict=True):
        expected = function(*numbers)
        assert expected is None or result == wrapped(expected, kind), numbers


@pytest.mark.parametrize(("name", "z"), [("mul.hi.u64", None), ("mad.wide.u16", "u32")])
def test_both_halves_of_a_product(name: str, z: str | None) -> None:
    kind = name.rpartition(".")[2]
    operands = [patterns(each, seed) for seed, each in enumerate(filter(None, [kind, kind, z]), 1)]
    found = OPERATIONS[name].compute(*operands)
    for result, a, b, *addend in zip(found.tolist(), *(each.tolist() for each in operands), strict=True):
        assert result == (wrapped(a * b + addend[0], z) if z else a * b >> 64)


@pytest.mark.parametrize("kind", ["s32", "u32"])
def test_whole_products_and_fields(kind: str) -> None:
    x, y = patterns(kind, 1), patterns(kind, 2)
    wide = kind[0] + "64"
    z = patterns(wide, 3)
    start, length = (patterns("u32", seed) % 40 for seed in (4, 5))
    made = [OPERATIONS[f"{name}.{kind}"].compute(x, y) for name in ("mul.wide", "mul.hi")]
    made += [OPERATIONS[f"mad.wide.{kind}"].compute(x, y, z), OPERATIONS[f"bfe.{kind}"].compute(x, start, length)]
    for a, b, c, first, count, *results in zip(
        *(array.tolist() for array in (x, y, z, start, length, *made)), strict=True
    ):
        expected = [a * b, a * b >> 32, wrapped(a * b + c, wide), field(a, first, count, kind)]
        assert results == expected, (a, b, c, first, count)


def test_bytes_are_permuted_one_by_one() -> None:
    x, y, selector = (patterns("u32", seed) for seed in (1, 2, 3))
    found = OPERATIONS["prmt.b32"].compute(x, y, selector).astype("<u4").view(np.uint8).reshape(-1, 4)
    both = np.stack([x, y], -1).astype("<u4").view(np.uint8)
    for bytes_of_both, chosen, result in zip(both.tolist(), selector.tolist(), found.tolist(), strict=True):
        for at, byte in enumerate(result):
            nibble = chosen >> 4 * at & 15
            taken = bytes_of_both[nibble & 7]
            assert byte == ((255 if taken > 127 else 0) if nibble & 8 else taken)


def rounded(exact: Fraction) -> float:
    """To fp32, ties to even, of a number that is not beyond its range."""
    if not exact:
        return 0.0
    exponent = max(math.floor(math.log2(abs(exact))) if abs(exact) > Fraction(1, 2**1000) else -1000, -126)
    while abs(exact) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(exact) < Fraction(2) ** exponent and exponent > -126:
        exponent -= 1
    spacing = Fraction(2) ** (exponent - 23)
    return float(round(exact / spacing) * spacing)  # Python rounds a tie of fractions to even


def test_a_fused_multiply_add_is_rounded_once() -> None:
    """Also where the sum is next to a tie, and where it is subnormal."""
    random = np.random.default_rng(0)
    x, y, z = (
        (random.integers(-(2**24), 2**24, SOME) * 2.0 ** random.integers(low, high, SOME)).astype(np.float32)
        for low, high in ((-40, 10), (-40, 10), (-60, 20))
    )
    tie = (random.integers(2**23, 2**24, SOME) * 2.0**30).astype(np.float32)
    half = np.where(random.integers(0, 2, SOME) == 1, np.float32(2.0**15), np.float32(2.0**15 - 2.0**-9))
    tiny = (random.integers(1, 2**24, SOME) * 2.0**-100).astype(np.float32)
    for a, b, c in (
        (x, y, z),
        (half, np.full(SOME, np.float32(2.0**14)), tie),
        (tiny, tiny * 2.0**40, tiny * 2.0**-49),
    ):
        found = OPERATIONS["fma.rn.f32"].compute(a, b.astype(np.float32), c.astype(np.float32))
        for result, *numbers in zip(found.tolist(), a.tolist(), b.tolist(), c.tolist(), strict=True):
            first, second, third = map(Fraction, numbers)
            assert result == rounded(first * second + third), numbers


def test_a_sum_is_rounded_downward() -> None:
    x, y = (patterns("b32", seed).view(np.float32) for seed in (1, 2))
    near = np.concatenate([x, x]), np.concatenate([y, x * np.float32(2**-13)])
    found = OPERATIONS["add.rm.f32x2"].compute(*near)
    finite = np.isfinite(near[0]) & np.isfinite(near[1])
    assert finite.sum() > 1000
    for a, b, sum_ in zip(*(each[finite].tolist() for each in near), found[finite], strict=True):
        exact = Fraction(a) + Fraction(b)
        assert np.isneginf(sum_) or Fraction(float(sum_)) <= exact
        above = np.nextafter(sum_, np.float32(np.inf))
        assert np.isposinf(above) or Fraction(float(above)) > exact
    zeros = np.array([0, -0.0, 1], np.float32), np.array([0, 0, -1], np.float32)
    assert np.signbit(OPERATIONS["add.rm.f32"].compute(*zeros)).tolist() == [False, True, True]
    infinite = np.array([np.inf, -np.inf, np.inf], np.float32), np.array([1, 1, -np.inf], np.float32)
    assert str(OPERATIONS["add.rm.f32"].compute(*infinite).tolist()) == "[inf, -inf, nan]"


@pytest.mark.parametrize("kind", ["s8", "s16", "s32"])
def test_numbers_are_cut_off_to_integers_within_their_range(kind: str) -> None:
    x = np.concatenate(
        [patterns("b32", 1).view(np.float32), np.array([2.9, -2.9, np.inf, -np.inf, np.nan], np.float32)]
    )
    size = 8 * TYPES[kind].itemsize - 1
    cut = [math.trunc(each) if math.isfinite(each) else each for each in x.tolist()]
    expected = [0 if math.isnan(each) else max(-(2.0**size), min(2.0**size - 1, each)) for each in cut]
    assert OPERATIONS[f"cvt.rzi.{kind}.f32"].compute(x).tolist() == expected


def test_a_narrow_number_less_a_wide_one_is_rounded_once() -> None:
    x, y = np.array([1.5, -3], TYPES["bf16"]), np.array([2**-24, 1], np.float32)
    assert OPERATIONS["sub.rn.f32.bf16"].compute(x, y).tolist() == [np.float32(1.5 - 2**-24), -4]
    assert OPERATIONS["add.rn.f32.bf16"].compute(x, y).tolist() == [1.5, -2]


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_narrow_numbers_are_multiplied_and_added_to_a_wide_one_rounded_once(kind: str) -> None:
    x, y, z = (np.random.default_rng(seed).uniform(1, 2, SOME) for seed in (1, 2, 3))
    operands = x.astype(TYPES[kind]), y.astype(TYPES[kind]), (z * 2.0**-12).astype(np.float32)
    found = OPERATIONS[f"fma.rn.f32.{kind}"].compute(*operands).tolist()
    numbers = zip(*(operand.astype(np.float64).tolist() for operand in operands), strict=True)
    assert found == [rounded(Fraction(a) * Fraction(b) + Fraction(c)) for a, b, c in numbers]


def test_divisions_are_correctly_rounded_or_within_two_ulp() -> None:
    x, y = (np.random.default_rng(seed).uniform(1, 2, SOME).astype(np.float32) for seed in (1, 2))
    scale = np.float32(2.0) ** np.random.default_rng(3).integers(-125, 125, SOME).astype(np.float32)
    exact = [Fraction(a) / Fraction(b) for a, b in zip(x.tolist(), (y * scale).tolist(), strict=True)]
    right = OPERATIONS["div.rn.f32"].compute(x, y * scale).tolist()
    full = OPERATIONS["div.full.f32"].compute(x, y * scale).tolist()
    for each, rn, near in zip(exact, right, full, strict=True):
        assert rn == rounded(each)
        assert abs(Fraction(near) - each) <= 2 * Fraction(2) ** (max(math.floor(math.log2(each)), -126) - 23)
    assert right != full


def test_subnormal_numbers_are_zero_where_the_name_says_so() -> None:
    small, least = np.array([2.0**-127, -(2.0**-130)], np.float32), np.array([2.0**-126], np.float32)
    for name, result in (("", [2.0**-126, 2.0**-126 * 0.75]), ("ftz.", [0.0, 2.0**-126])):
        half = OPERATIONS[f"mul.rn.{name}f32"].compute(least, np.array([0.5], np.float32))
        assert half.tolist() == [0.0 if name else 2.0**-127]
        sums = OPERATIONS[f"fma.rn.{name}f32"].compute(fp32(1.0), np.abs(small[:1]), small[:1])
        assert sums.tolist() == result[:1]
    assert OPERATIONS["ex2.approx.ftz.f32"].compute(fp32(-127.0)).tolist() == [0.0]
    assert OPERATIONS["ex2.approx.f32"].compute(fp32(-127.0)).tolist() == [2.0**-127]


def test_extremes_drop_nan_and_know_the_sign_of_zero() -> None:
    x = fp32(np.nan, 1, -0.0, 0.0, -0.0)
    y = fp32(2, np.nan, 0.0, -0.0, -0.0)
    largest, smallest = OPERATIONS["max.f32"].compute(x, y), OPERATIONS["min.f32"].compute(x, y)
    assert [math.copysign(1, value) * (abs(value) or 9) for value in largest] == [2, 1, 9, 9, -9]
    assert [math.copysign(1, value) * (abs(value) or 9) for value in smallest] == [2, 1, -9, -9, -9]


CASTS = {"bf16": torch.bfloat16, "f16": torch.float16, "e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


@pytest.mark.parametrize("kind", CASTS)
def test_casts_of_fp32_are_pytorchs(kind: str) -> None:
    """Those to 8 bits saturate, which PyTorch's of a clamped number does. A second one lies in the upper half."""
    dtype = CASTS[kind]
    x = patterns("f32", 7, PATTERNS)
    given = torch.from_numpy(np.array(x))
    if dtype.itemsize == 1:
        given = given.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    expected = given.to(dtype)
    bits = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    name = f"cvt.rn.{kind}x2.f32" if dtype.itemsize == 2 else f"cvt.rn.satfinite.{kind}x2.f32"
    pair = OPERATIONS[name].compute(x, x[::-1].copy())
    for half, wanted in ((pair[..., 0], given.flip(0).to(dtype)), (pair[..., 1], expected)):
        number = ~wanted.float().isnan()
        made = torch.from_numpy(np.ascontiguousarray(half).view(f"i{dtype.itemsize}")).view(bits)
        assert torch.equal(made[number], wanted.view(bits)[number])
        assert np.isnan(half[~number.numpy()].astype(np.float32)).all()
    if dtype.itemsize == 2:
        assert np.array_equal(OPERATIONS[f"cvt.rn.{kind}.f32"].compute(x), pair[..., 1], equal_nan=True)
        back = OPERATIONS[f"cvt.f32.{kind}"].compute(pair[..., 1])
        assert np.array_equal(back, expected.float().numpy(), equal_nan=True)


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_two_numbers_of_8_bits_become_two_of_16(kind: str) -> None:
    every = np.arange(256, dtype=np.uint8).view(TYPES[kind])
    found = OPERATIONS[f"cvt.rn.f16x2.{kind}x2"].compute(np.stack([every, every[::-1]], -1))
    expected = torch.from_numpy(np.arange(256, dtype=np.uint8)).view(CASTS[kind]).half().numpy()
    assert found.dtype == expected.dtype
    assert np.array_equal(found, np.stack([expected, expected[::-1]], -1), equal_nan=True)


def test_integers_are_converted_by_value() -> None:
    for to in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"):
        for of in ("s8", "u16", "s32", "u64"):
            integers = patterns(of, 2)
            found = OPERATIONS[f"cvt.{to}.{of}"].compute(integers)
            assert found.tolist() == [wrapped(number, to) for number in integers.tolist()]
    wide = patterns("s64", 3)
    for number, result in zip(wide.tolist(), OPERATIONS["cvt.rn.f32.s64"].compute(wide).tolist(), strict=True):
        assert result == rounded(Fraction(number))
