"""Floating-point formats, rounding modes, and the unit in the last place."""

import enum
import re
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch

_T = TypeVar("_T")


def hashed_once(data_class: type[_T]) -> type[_T]:
    """Return a frozen data class whose objects keep their hash: declarations and their parts are often used as keys."""
    generated: Any = data_class.__hash__

    def hashed(self: Any) -> int:
        kept = self.__dict__
        if "_hash" not in kept:
            kept["_hash"] = generated(self)
        return int(kept["_hash"])

    def fields_alone(self: Any) -> dict[str, Any]:
        # Another process hashes names otherwise.
        return {field.name: getattr(self, field.name) for field in fields(self)}

    data_class.__hash__ = hashed  # type: ignore[method-assign]
    data_class.__getstate__ = fields_alone  # type: ignore[method-assign]
    return data_class


class Rounding(enum.Enum):
    """The direction in which a value between two neighbours of a format is rounded."""

    RNE = "rne"  #: To the nearer neighbour; a tie to the one whose last bit is 0
    RTNA = "rtna"  #: To the nearer neighbour; a tie to the one of larger magnitude
    RTZ = "rtz"  #: To the neighbour of smaller magnitude (truncation)
    UP = "up"  #: To the neighbour nearer +Inf
    DOWN = "down"  #: To the neighbour nearer -Inf
    STOCHASTIC = "stochastic"  #: To the one of larger magnitude with probability equal to the discarded fraction


@hashed_once
@dataclass(frozen=True)
class Format:
    """A signed binary floating-point format with subnormals, all of whose values are float32 values.

    ValueError: a value beyond float32, or no number in the top exponent of a format without Inf.
    """

    name: str  # in tables and on the command line
    exponent_bits: int  # of the exponent field, 2 to 8
    mantissa_bits: int  # stored fraction bits, 0 to 23: the leading bit is not stored
    has_infinity: bool = True  # False: as OCP's e4m3fn, whose top exponent holds numbers, all ones being NaN

    def __post_init__(self) -> None:
        if not (2 <= self.exponent_bits <= 8 and 0 <= self.mantissa_bits <= 23):
            raise ValueError(f"{self.name}: a format has 2 to 8 exponent bits and 0 to 23 mantissa bits")
        if not self.has_infinity and (self.exponent_bits == 8 or self.mantissa_bits == 0):
            raise ValueError(f"{self.name}: a format without Inf has 2 to 7 exponent bits and at least 1 mantissa bit")

    @property
    def min_exponent(self) -> int:
        """Exponent (unbiased) of the smallest normal value."""
        return 2 - (1 << (self.exponent_bits - 1))

    @property
    def max_exponent(self) -> int:
        """Exponent (unbiased) of the largest finite value."""
        return (1 << (self.exponent_bits - 1)) - self.has_infinity

    @property
    def largest(self) -> float:
        """Largest finite value."""
        # Without Inf the all-ones significand of the top exponent is NaN, so the largest value is one ulp lower.
        ulps_below_next_binade = 1 if self.has_infinity else 2
        return 2.0**self.max_exponent * (2.0 - ulps_below_next_binade * 2.0**-self.mantissa_bits)

    @property
    def smallest_normal(self) -> float:
        """Smallest positive normal value."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """Smallest positive value; the spacing of the format around 0."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest in the normal range: half an ulp of 1."""
        return 2.0 ** -(self.mantissa_bits + 1)


FP32 = Format("fp32", exponent_bits=8, mantissa_bits=23)
BF16 = Format("bf16", exponent_bits=8, mantissa_bits=7)
FP16 = Format("fp16", exponent_bits=5, mantissa_bits=10)
TF32 = Format("tf32", exponent_bits=8, mantissa_bits=10)
FP8_E4M3 = Format("fp8_e4m3", exponent_bits=4, mantissa_bits=3, has_infinity=False)
FP8_E5M2 = Format("fp8_e5m2", exponent_bits=5, mantissa_bits=2)
# The integers from -127 to 127 in units of 1/64: the subnormals of this format and its first binade, evenly spaced.
INT8 = Format("int8", exponent_bits=2, mantissa_bits=6)


@dataclass(frozen=True)
class Formats:
    """The formats of one call of attention."""

    inputs: Format  # of q, k and dO
    v: Format  # of V: narrower than q's where it fits one that some products take; kernels without such a V widen it
    operands: Format  # of what a plan rounds on the way and follows the call: P-bar, P, dS; if narrow S, l and O-bar
    output: Format  # of O and of the gradients

    @classmethod
    def of(cls, fmt: Format, **others: Format) -> "Formats":
        """Return one format for all, except for fields named with another; TypeError where no field is called so."""
        return cls(**dict.fromkeys(("inputs", "v", "operands", "output"), fmt) | others)


_KNOWN = {fmt.name: fmt for fmt in (FP32, BF16, FP16, TF32, FP8_E4M3, FP8_E5M2)}
_EXMY = re.compile(r"E([2-8])M([0-9]|1[0-9]|2[0-3])")


def parse_format(name: str) -> Format:
    """Return the format of this name: one of this module's, or ``E<x>M<y>``, IEEE-like, with Inf; ValueError: none is.

    So ``E4M3`` (largest 240) is not ``fp8_e4m3`` (largest 448).
    """
    if name in _KNOWN:
        return _KNOWN[name]
    match = _EXMY.fullmatch(name)
    if match is None:
        names = ", ".join(_KNOWN)
        raise ValueError(f"unknown format {name!r}: known are {names} and E<x>M<y> with 2 <= x <= 8, 0 <= y <= 23")
    return Format(name, exponent_bits=int(match[1]), mantissa_bits=int(match[2]))


def ulp(x: torch.Tensor, fmt: Format) -> torch.Tensor:
    """Return the spacing of a format's values at |x|, exact, in float64; NaN where x is NaN or Inf.

    That is ``2 ** (max(floor(log2 |x|), fmt.min_exponent) - fmt.mantissa_bits)``; around 0, and below the smallest
    normal value, the spacing of the subnormals. Beyond the largest value the format is taken to go on. TypeError: x is
    not float64.
    """
    if x.dtype != torch.float64:
        raise TypeError(f"ulp takes a float64 tensor, not {x.dtype}")
    # The exponent field gives floor(log2) exactly, where log2 can err next to a power of two and torch.ldexp goes
    # through a float32 power. float64's own subnormals have field 0, far below any format's min_exponent.
    field = (x.view(torch.int64) >> 52) & 0x7FF
    exponent = (field - 1023).clamp_min(fmt.min_exponent) - fmt.mantissa_bits
    spacing = ((exponent + 1023) << 52).view(torch.float64)
    return torch.where(field == 0x7FF, torch.nan, spacing)
