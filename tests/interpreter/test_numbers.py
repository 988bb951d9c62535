"""Casts of interpreted kernels, against ml_dtypes and gfloat."""

import gfloat  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import pytest
from gfloat.formats import (  # type: ignore[import-untyped]
    format_info_bfloat16,
    format_info_binary16,
    format_info_ocp_e4m3,
    format_info_ocp_e5m2,
)

from tiebreak.backends.interpreter.numbers import Array, converted

NARROW = {
    "bf16": (np.dtype(ml_dtypes.bfloat16), format_info_bfloat16, False),
    "fp16": (np.dtype(np.float16), format_info_binary16, False),
    "e4m3": (np.dtype(ml_dtypes.float8_e4m3fn), format_info_ocp_e4m3, True),
    "e5m2": (np.dtype(ml_dtypes.float8_e5m2), format_info_ocp_e5m2, True),
}
# numpy's, of NaN and of numbers that are too large: they are among the values.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
FNUZ = (ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2fnuz)


def _sweep(dtype: np.dtype[np.generic]) -> Array:
    """fp32: every number of a format, what lies half-way to the next, both neighbours of that, and any bits."""
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype).astype(np.float32)
    exact = codes[np.isfinite(codes)]
    exact.sort()
    ties = exact[:-1] / 2 + exact[1:] / 2
    beside = [np.nextafter(ties, np.float32(end)) for end in (-np.inf, np.inf)]
    some = np.random.default_rng(5).integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
    return np.concatenate(
        [codes, ties, *beside, some, np.array([np.inf, -np.inf, np.nan, 0.0, -0.0, 3e38], np.float32)]
    )


def _same(actual: Array, expected: Array) -> bool:
    a, b = actual.astype(np.float32), expected.astype(np.float32)
    return bool(((np.isnan(a) & np.isnan(b)) | (a.view(np.uint32) == b.view(np.uint32))).all())


@pytest.mark.parametrize("toward_zero", [False, True], ids=["to even", "toward zero"])
@pytest.mark.parametrize("name", NARROW)
def test_casts_are_gfloats(name: str, toward_zero: bool) -> None:
    dtype, info, saturating = NARROW[name]
    x = _sweep(dtype)
    mode = gfloat.RoundMode.TowardZero if toward_zero else gfloat.RoundMode.TiesToEven
    expected = gfloat.round_ndarray(info, x.astype(np.float64), mode, sat=saturating)
    if saturating:
        # PTX's .satfinite takes Inf to the largest number too; gfloat keeps e5m2's.
        expected = np.where(np.isnan(x), np.nan, np.clip(expected, -info.max, info.max))
    if toward_zero and not saturating:
        # IEEE 754 leaves Inf an Inf in every direction.
        expected = np.where(np.isinf(x), x, expected)
    assert _same(converted(x, dtype, toward_zero=toward_zero), np.asarray(expected))


@pytest.mark.parametrize("dtype", FNUZ, ids=lambda dtype: dtype.__name__)
def test_casts_to_fnuz_are_ml_dtypes_and_saturate(dtype: type) -> None:
    x = _sweep(np.dtype(dtype))
    largest = float(ml_dtypes.finfo(dtype).max)  # type: ignore[no-untyped-call]
    result = converted(x, np.dtype(dtype))
    inside = np.abs(x) <= largest
    assert _same(result[inside], x[inside].astype(dtype))
    beyond = np.abs(x) > largest
    assert _same(result[beyond], np.copysign(np.float32(largest), x[beyond]))
    assert np.isnan(result[np.isnan(x)].astype(np.float32)).all()


def test_fp64_is_rounded_once() -> None:
    """Just above a tie of bf16, by less than fp32 can hold: by way of fp32 to even it would go down."""
    x = np.array([1.0 + 2.0**-8 + 2.0**-40, 1.0 + 2.0**-8, -1.0 - 2.0**-8 - 2.0**-40])
    result = converted(x, np.dtype(ml_dtypes.bfloat16)).astype(np.float64)
    assert result.tolist() == [1.0 + 2.0**-7, 1.0, -1.0 - 2.0**-7]
