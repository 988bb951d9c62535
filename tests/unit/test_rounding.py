"""Rounding against ml_dtypes and gfloat, bit for bit, and what neither of them says."""

import functools
import itertools
import math
from typing import Any

import gfloat  # type: ignore[import-untyped]
import gfloat.formats  # type: ignore[import-untyped]
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import torch

from tiebreak.backends.emulation import rounding
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels import counter
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format, Rounding, parse_format
from tiebreak.kernels.sdpa import Operators

pytestmark = pytest.mark.quick

E4M3 = parse_format("E4M3")
E3M4 = parse_format("E3M4")

IN_ML_DTYPES: dict[Format, type] = {
    BF16: ml_dtypes.bfloat16,
    FP16: np.float16,
    FP8_E4M3: ml_dtypes.float8_e4m3fn,
    FP8_E5M2: ml_dtypes.float8_e5m2,
    E4M3: ml_dtypes.float8_e4m3,
    E3M4: ml_dtypes.float8_e3m4,
}
# The formats without an ml_dtypes type are there for their corners: no fraction bits, no bits to discard, fp32's
# precision in a smaller range.
FORMATS = [*IN_ML_DTYPES, TF32, FP32, *map(parse_format, ["E2M0", "E2M1", "E8M0", "E5M23", "E6M9"])]
DETERMINISTIC = {
    Rounding.RNE: gfloat.RoundMode.TiesToEven,
    Rounding.RTNA: gfloat.RoundMode.TiesToAway,
    Rounding.RTZ: gfloat.RoundMode.TowardZero,
    Rounding.UP: gfloat.RoundMode.TowardPositive,
    Rounding.DOWN: gfloat.RoundMode.TowardNegative,
}

Array = npt.NDArray[Any]

each_format = pytest.mark.parametrize("fmt", FORMATS, ids=lambda fmt: fmt.name)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
each_mode = pytest.mark.parametrize("mode", DETERMINISTIC, ids=lambda mode: mode.value)


def _in_gfloat(fmt: Format) -> gfloat.FormatInfo:
    named = {
        BF16: gfloat.formats.format_info_bfloat16,
        FP16: gfloat.formats.format_info_binary16,
        FP32: gfloat.formats.format_info_binary32,
        FP8_E4M3: gfloat.formats.format_info_ocp_e4m3,
        FP8_E5M2: gfloat.formats.format_info_ocp_e5m2,
    }
    return named.get(fmt) or gfloat.FormatInfo(
        fmt.name,
        k=1 + fmt.exponent_bits + fmt.mantissa_bits,
        precision=fmt.mantissa_bits + 1,
        bias=1 - fmt.min_exponent,
        is_signed=True,
        domain=gfloat.Domain.Extended,
        has_nz=True,
        num_high_nans=2**fmt.mantissa_bits - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )


def _gfloat(x: torch.Tensor, fmt: Format, mode: gfloat.RoundMode, **stochastic: Any) -> Array:
    # In float64, where every step of gfloat's is exact.
    array = x.to(torch.float64).numpy()
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(gfloat.round_ndarray(_in_gfloat(fmt), array, mode, False, **stochastic))


def _assert_same_bits(x: torch.Tensor, rounded: torch.Tensor, expected: Array) -> None:
    """NaN where NaN is expected, everywhere else the very bits, the sign of zero with them."""
    assert rounded.shape == expected.shape
    # Both types are exact in float64.
    actual = rounded.to(torch.float64).numpy()
    both_nan = np.isnan(actual) & np.isnan(expected)
    wrong = np.flatnonzero((actual.view(np.int64) != expected.view(np.int64)) & ~both_nan)
    first = [(x[i].item(), actual[i], expected[i]) for i in wrong[:5]]
    assert wrong.size == 0, f"{wrong.size} of {actual.size} differ; (input, got, expected): {first}"


@functools.cache
def _values(fmt: Format) -> Array:
    """All finite values of a format of at most 16 bits, ascending, from ml_dtypes' reading of its codes."""
    dtype = np.dtype(IN_ML_DTYPES[fmt])
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}").view(dtype)
    with np.errstate(invalid="ignore"):
        return np.unique(codes[np.isfinite(codes)].astype(np.float64))


@functools.cache
def _ties(fmt: Format) -> Array:
    """All midpoints of neighbouring values, and those between the largest value and the one that is not there."""
    values = _values(fmt)
    beyond = values[-1] + (values[-1] - values[-2]) / 2
    return np.concatenate([[-beyond], (values[1:] + values[:-1]) / 2, [beyond]])


@functools.cache
def _inputs(dtype: torch.dtype) -> torch.Tensor:
    """Random bit patterns, ties of the formats and what lies beside them; in fp64 also by less than fp32 holds."""
    rng = np.random.default_rng(20251004)
    if dtype is torch.float32:
        random = rng.integers(0, 2**32, 20_000, dtype=np.uint32).view(np.float32)
        codes = np.arange(2**16, dtype=np.uint16)
        with np.errstate(invalid="ignore"):
            every = [codes.view(ml_dtypes.bfloat16).astype(np.float32), codes.view(np.float16).astype(np.float32)]
        ties = np.concatenate([_ties(fmt) for fmt in IN_ML_DTYPES]).astype(np.float32)
        up, down = (np.nextafter(ties[::3], np.float32(end)) for end in (np.inf, -np.inf))
        return torch.from_numpy(np.concatenate([random, *every, ties, up, down, _special(np.float32)]))
    random = rng.integers(0, 2**64, 20_000, dtype=np.uint64).view(np.float64)
    inside = rng.standard_normal(40_000) * 2.0 ** rng.integers(-155, 130, 40_000)
    # The 16-bit formats have most of the ties: every seventh keeps the test short and misses no exponent.
    ties = np.concatenate([_ties(fmt)[:: 7 if fmt in (BF16, FP16) else 1] for fmt in IN_ML_DTYPES])
    hazards = [ties * (1 + 2.0**-40), ties * (1 - 2.0**-40), np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf)]
    return torch.from_numpy(np.concatenate([random, inside, ties, *hazards, _special(np.float64)]))


@functools.cache
def _random_bits(n: int) -> torch.Tensor:
    return counter.random_bits(1, torch.arange(n))


def _special(dtype: type) -> Array:
    """Zeros, infinities, NaN of either sign with all payload bits or only the last set, and the ends of the type."""
    bits, unit, sign, infinity = (
        (np.uint32, 1, 2**31, 0x7F800000) if dtype is np.float32 else (np.uint64, 1, 2**63, 0x7FF << 52)
    )
    magnitudes = [0, unit, infinity - 1, infinity, infinity + 1, sign - 1]
    return np.array([s + m for s, m in itertools.product([0, sign], magnitudes)], dtype=bits).view(dtype)


@each_dtype
@each_mode
@each_format
def test_agrees_with_gfloat(fmt: Format, mode: Rounding, dtype: torch.dtype) -> None:
    x = _inputs(dtype)
    _assert_same_bits(x, round_to(x, fmt, mode), _gfloat(x, fmt, DETERMINISTIC[mode]))


@each_mode
@pytest.mark.parametrize("fmt", [FP16, FP8_E4M3, E3M4], ids=lambda fmt: fmt.name)
def test_an_element_does_not_need_its_neighbours(fmt: Format, mode: Rounding) -> None:
    """The paths for subnormals and overflow are taken for the sake of one element, at the very edge of each."""
    least, normal, spacing = fmt.smallest_subnormal, fmt.smallest_normal, fmt.largest - _values(fmt)[-2]
    edges = [least / 2, least * 0.75, least * 1.5, normal - least / 2, normal + least / 2]
    edges += [fmt.largest + part * spacing for part in (0.25, 0.5, 0.75, 1.0, 1.25)]
    for value in [*edges, *(-edge for edge in edges)]:
        x = torch.tensor(value)
        _assert_same_bits(x[None], round_to(x, fmt, mode)[None], _gfloat(x[None], fmt, DETERMINISTIC[mode]))


@each_dtype
@each_format
def test_stochastic_agrees_with_gfloat(fmt: Format, dtype: torch.dtype) -> None:
    x = _inputs(dtype)
    random_bits = _random_bits(len(x))
    expected = _gfloat(x, fmt, gfloat.RoundMode.StochasticFast, srbits=random_bits.numpy(), srnumbits=32)
    _assert_same_bits(x, round_to(x, fmt, Rounding.STOCHASTIC, random_bits=random_bits), expected)


def test_random_bits_broadcast() -> None:
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(5)) * 2.0**-14
    column = counter.random_bits(0, torch.arange(8))[:, None]
    expected = round_to(x, FP16, Rounding.STOCHASTIC, random_bits=column.expand(8, 16).clone())
    assert torch.equal(round_to(x, FP16, Rounding.STOCHASTIC, random_bits=column), expected)
    with pytest.raises(RuntimeError):
        round_to(x[0], FP16, Rounding.STOCHASTIC, random_bits=column)


@each_mode
@pytest.mark.parametrize("fmt", [FP32, BF16, FP16], ids=lambda fmt: fmt.name)
def test_any_shape_and_layout(fmt: Format, mode: Rounding) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(6)) * 2.0**-14
    whole = round_to(x, fmt, mode)
    before = x.clone()
    assert torch.equal(round_to(x.T, fmt, mode), whole.T)
    assert torch.equal(round_to(x[::2, 1:3], fmt, mode), whole[::2, 1:3])
    assert torch.equal(round_to(x[:1].expand(3, 4), fmt, mode), whole[:1].expand(3, 4))
    assert torch.equal(round_to(x[2, 3], fmt, mode), whole[2, 3])
    assert round_to(x[:0], fmt, mode).shape == (0, 4)
    assert not round_to(x.requires_grad_(), fmt, mode).requires_grad
    # The result never shares memory with the input, even where nothing is rounded.
    whole.zero_()
    assert torch.equal(x.detach(), before)


class _NoDoubles(Operators):  # type: ignore[no-untyped-call]
    """A device without float64."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = func(*args, **(kwargs or {}))
        assert getattr(returned, "dtype", None) is not torch.float64, func
        return returned


@pytest.mark.parametrize("mode", Rounding, ids=lambda mode: mode.value)
def test_float32_is_rounded_without_float64_which_some_devices_lack(mode: Rounding) -> None:
    x = torch.tensor([1.0, 2.0**-15, 1e30, math.inf, math.nan]) * (1 + 2.0**-20)
    random_bits = _random_bits(5) if mode is Rounding.STOCHASTIC else None
    with _NoDoubles():
        for fmt in FORMATS:
            round_to(x, fmt, mode, random_bits=random_bits)


def test_errors() -> None:
    for dtype in (torch.bfloat16, torch.int32):
        with pytest.raises(TypeError, match=str(dtype)):
            round_to(torch.ones(1, dtype=dtype), BF16)
    with pytest.raises(TypeError, match=r"torch\.int32"):
        round_to(torch.ones(1), BF16, Rounding.STOCHASTIC, random_bits=torch.zeros(1, dtype=torch.int32))
    for mode, bits in ((Rounding.STOCHASTIC, None), (Rounding.UP, torch.zeros(1, dtype=torch.int64))):
        with pytest.raises(ValueError, match="STOCHASTIC"):
            round_to(torch.ones(1), BF16, mode, random_bits=bits)


def test_a_cast_of_the_processor_that_loses_subnormals_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    x, own = torch.tensor([2.0**-130, 1.0]).repeat(16), torch.Tensor.bfloat16
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: own(x.masked_fill(x.abs() < BF16.smallest_normal, 0.0)))
    monkeypatch.setattr(rounding, "_rounds_to_even", functools.cache(rounding._rounds_to_even.__wrapped__))
    assert torch.equal(round_to(x, BF16), x)
