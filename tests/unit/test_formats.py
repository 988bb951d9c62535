"""Formats, their names, and the unit in the last place."""

import math
from itertools import product
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from tiebreak.kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format, parse_format, ulp

pytestmark = pytest.mark.quick

FORMATS = [FP32, BF16, FP16, TF32, FP8_E4M3, FP8_E5M2]

SAME_IN_ML_DTYPES = {
    FP32: np.float32,
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    FP8_E4M3: ml_dtypes.float8_e4m3fn,
    FP8_E5M2: ml_dtypes.float8_e5m2,
    parse_format("E4M3"): ml_dtypes.float8_e4m3,
    parse_format("E3M4"): ml_dtypes.float8_e3m4,
}


@pytest.mark.parametrize("fmt", SAME_IN_ML_DTYPES, ids=lambda fmt: fmt.name)
def test_properties_agree_with_ml_dtypes(fmt: Format) -> None:
    finfo = ml_dtypes.finfo(SAME_IN_ML_DTYPES[fmt])  # type: ignore[no-untyped-call]
    assert fmt.largest == float(finfo.max)
    assert fmt.smallest_normal == float(finfo.smallest_normal)
    assert fmt.smallest_subnormal == float(finfo.smallest_subnormal)
    assert fmt.unit_roundoff == float(finfo.eps) / 2
    assert fmt.min_exponent == finfo.minexp
    assert fmt.max_exponent == math.frexp(float(finfo.max))[1] - 1


def test_tf32_has_the_range_of_fp32_and_the_precision_of_fp16() -> None:
    assert (TF32.min_exponent, TF32.max_exponent) == (FP32.min_exponent, FP32.max_exponent)
    assert TF32.unit_roundoff == FP16.unit_roundoff
    assert TF32.largest == 2.0**128 - 2.0**117


def test_parse_format_returns_the_named_formats_and_any_exmy() -> None:
    assert all(parse_format(fmt.name) is fmt for fmt in FORMATS)
    for exponent_bits, mantissa_bits in product(range(2, 9), (0, 1, 9, 10, 19, 20, 23)):
        name = f"E{exponent_bits}M{mantissa_bits}"
        assert parse_format(name) == Format(name, exponent_bits, mantissa_bits, has_infinity=True)


@pytest.mark.parametrize(
    "name", ["", "fp15", "BF16", "E1M3", "E9M3", "E4M24", "E4M", "E04M3", "E4M03", "E4M3 ", "xE4M3", "E4M3\n", "E4M-1"]
)
def test_parse_format_lists_what_it_knows(name: str) -> None:
    with pytest.raises(ValueError, match="unknown format") as error:
        parse_format(name)
    message = str(error.value)
    assert repr(name) in message
    assert all(fmt.name in message for fmt in FORMATS)
    assert "E<x>M<y>" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("exponent_bits", "mantissa_bits", "has_infinity"),
    [(1, 3, True), (9, 3, True), (4, -1, True), (4, 24, True), (8, 3, False), (4, 0, False)],
)
def test_impossible_formats_are_refused(exponent_bits: int, mantissa_bits: int, has_infinity: bool) -> None:
    with pytest.raises(ValueError, match=r"^odd: a format .* mantissa bits?$"):
        Format("odd", exponent_bits, mantissa_bits, has_infinity)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_ulp_is_the_distance_to_the_next_value_up(dtype: type) -> None:
    fmt = FP16 if dtype is np.float16 else BF16
    codes: npt.NDArray[Any] = np.arange(2**15, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        values = codes[np.isfinite(codes)].astype(np.float64)
    expected = np.append(np.diff(values), values[-1] - values[-2])
    for sign in (1.0, -1.0):
        assert torch.equal(ulp(torch.from_numpy(sign * values), fmt), torch.from_numpy(expected))


def test_ulp_between_the_values_of_the_format_and_at_its_ends() -> None:
    below_two = math.nextafter(2.0, 0.0)
    x = torch.tensor([1.0, below_two, 2.0, -below_two, 0.0, -0.0, 5e-324, 2.0**-1022], dtype=torch.float64)
    tiny = 2.0**-133
    expected = torch.tensor([2**-7, 2**-7, 2**-6, 2**-7, tiny, tiny, tiny, tiny], dtype=torch.float64)
    assert torch.equal(ulp(x, BF16), expected)
    for fmt in FORMATS:
        x = torch.tensor([fmt.smallest_normal, fmt.largest, 2.0**1000], dtype=torch.float64)
        exponents = [fmt.min_exponent, fmt.max_exponent, 1000]
        expected = torch.tensor([2.0 ** (e - fmt.mantissa_bits) for e in exponents], dtype=torch.float64)
        assert torch.equal(ulp(x, fmt), expected)


def test_ulp_of_nan_and_infinity_is_nan_and_other_types_are_refused() -> None:
    x = torch.tensor([[math.nan], [math.inf], [-math.inf]], dtype=torch.float64)
    assert ulp(x, FP16).isnan().all()
    assert ulp(x, FP16).shape == x.shape
    with pytest.raises(TypeError, match=r"torch\.float32"):
        ulp(torch.ones(1), BF16)
