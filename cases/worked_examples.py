"""The papers' additions, as data: what is added, what comes out, and who printed it."""

from dataclasses import dataclass
from itertools import combinations_with_replacement


@dataclass(frozen=True)
class Addition:
    """Two fp32 numbers whose fp32 sum is then rounded to bf16, ties to even."""

    name: str
    first: float
    second: float
    exact: float  # their sum, which fp32 holds exactly
    rounded: float  # that sum in bf16
    error: float  # rounded less exact
    printed: float  # what the source prints as the rounded sum
    source: str

    @property
    def erratum(self) -> bool:
        """Whether the source prints another result than ties to even gives."""
        return self.printed != self.rounded


ADDITIONS = (
    Addition(
        "v2",
        first=-2.4071154594421387,
        second=-2.296875,
        exact=-4.703990459442139,
        rounded=-4.71875,
        error=-0.014759540557861328,
        printed=-4.71875,
        source="arXiv 2510.04212 v2, section 3.3.2: -2.40625 with a remainder of 0.00087 below it",
    ),
    Addition(
        "v1",
        first=-2.40625,
        second=-2.296875,
        exact=-4.703125,
        rounded=-4.6875,
        error=0.015625,
        printed=-4.71875,
        source="arXiv 2510.04212 v1, section 3.3.2: an exact tie between -4.6875 (even) and -4.71875 (odd)",
    ),
)


@dataclass(frozen=True)
class TwoBitAddition:
    """Two significands of one binade, told by their last two bits; their sum is one bit too long for the format."""

    a: int  # last two bits of the first, 0 .. 3
    b: int  # last two bits of the second, 0 .. 3

    @property
    def rounding_bit(self) -> int:
        """The bit that is shifted out."""
        return (self.a + self.b) & 1

    def operands(self) -> tuple[float, float]:
        """Two negative bf16 numbers in [-4, -2) that end in these bits."""
        return -(2.0 + self.a * 2.0**-6), -(2.0 + self.b * 2.0**-6)


# The paper's table of all additions of two 2-bit endings (section 3.3.2): ten, order aside.
TWO_BIT_ADDITIONS = tuple(TwoBitAddition(a, b) for a, b in combinations_with_replacement(range(4), 2))
