"""Shift rules: how a row's shift m in exp(S - m) is chosen. All that separates flash attention's variants."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.formats import hashed_once

EPSILON = 1e-3  # two scores this close count as repeated maxima (the authors' published code)
BETA = 2.0  # v2's and the authors' scale of a repeated positive maximum
BETA_V1 = 7.0  # v1's
GAMMA = 0.9999  # "close to 1" (v1, appendix C: P-bar may then round to exactly 1)
OFFSET = 1.0  # the "fixed offset" of appendix C: P-bar at the maximum is e^-1 in every row
LAG = 8.0 * math.log(2.0)  # FlashAttention-4 rescales from here on: 8 in base two, so P-bar stays below 256
AUTHORS_ROW_SUM_FLOOR = 1e-10  # the published code clamps each block's row sum here


@hashed_once
@dataclass(frozen=True)
class ShiftRule:
    """A rule that proposes one block's shift; the running shift of a row is the maximum over its blocks, or near it.

    A row's maximum is scaled, then moved: m = factor * r_m + offset + u ln 2. Both implementations of the algorithm
    read these numbers.
    """

    name: str  # how tables and --kernels call it
    source: str  # where the rule is printed
    detects: bool = False  # whether only rows with repeated maxima are scaled
    epsilon: float = 0.0  # how close a score is to the maximum that repeats it
    above: float = 1.0  # factor of a positive maximum
    below: float = 1.0  # factor of a negative maximum
    offset: float = 0.0  # added in every row
    dithered: bool = False  # whether the row's random number u enters
    row_sum_floor: float = 0.0  # smallest row sum of a block, as the authors' code clamps it
    lag: float = 0.0  # how far the running shift may stay below the maximum over the blocks before it follows
    accepted: bool = True  # whether kernels that people ship, or fixes, follow it; else it is known alone

    @property
    def scales(self) -> bool:
        """True if any maximum is scaled."""
        return self.above != 1.0 or self.below != 1.0

    @property
    def is_plain(self) -> bool:
        """True if it takes a row's maximum as it is, also where that repeats: no fix for ties."""
        return not (self.scales or self.offset or self.dithered)

    def propose(self, scores: Tensor, row_max: Tensor, dither: Tensor, unit: float = 1.0) -> Tensor:
        """Return the shift (..., rows, 1) that one block of scores asks for.

        Args:
            scores: (..., rows, keys).
            row_max: (..., rows, 1), their maximum.
            dither: (..., rows, 1), the rows' random numbers u in [0, 1).
            unit: what a difference of 1 between two logits is in these scores, 1/alpha where they are not scaled.
        """
        shift = row_max
        if self.scales:
            where = repeated(scores, row_max, self.epsilon * unit) if self.detects else torch.ones_like(row_max).bool()
            # Not 0 * r_m: that of -Inf is NaN.
            lowered = self.below * row_max if self.below else torch.zeros_like(row_max)
            shift = torch.where(where & (row_max > 0), self.above * row_max, row_max)
            shift = torch.where(where & (row_max < 0), lowered, shift)
        if self.offset:
            shift = shift + self.offset * unit
        return shift + dither * (math.log(2.0) * unit) if self.dithered else shift


NUMBERS = {"shift": "offset", "lag": "lag"}  #: That a text may give a rule, and their fields.
_LARGEST = 64.0  # of those: P-bar's exponent stays within fp32's


def with_number(rule: ShiftRule, key: str, value: str) -> ShiftRule:
    """Return a rule with one of its numbers given: `-1`, or `ln1.5`, a logarithm; ValueError where it is none."""
    try:
        number = math.log(float(value[2:])) if value.startswith("ln") else float(value)
    except ValueError:
        number = math.nan
    if not (0.0 if key == "lag" else -_LARGEST) <= number <= _LARGEST:
        raise ValueError(f"{key}={value}: expected a number such as 2 or ln1.5, of at most {_LARGEST:g}")
    named = replace(rule, name=f"{rule.name},{key}={value}", accepted=rule.accepted and key == "lag")
    return replace(named, **{NUMBERS[key]: number})  # type: ignore[arg-type]


def repeated(scores: Tensor, row_max: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Return which rows of scores (..., rows, keys) have several within `epsilon` of their maximum (..., rows, 1).

    An epsilon of 0 is exact equality (v1); the default is the published code's tolerance.
    """
    return ((row_max - scores) <= epsilon).sum(-1, keepdim=True) > 1


_PAPER = "arXiv 2510.04212"
_REPEATED: Mapping[str, Any] = {"detects": True, "epsilon": EPSILON, "above": BETA}
_RULES = (
    ShiftRule("safe", "flash attention 2"),
    ShiftRule("stabilized", f"{_PAPER} v2, algorithm 1 as meant", **_REPEATED, below=0.0),
    ShiftRule("stabilized_v1", f"{_PAPER} v1, algorithm 1 as meant", detects=True, above=BETA_V1, below=0.0),
    ShiftRule(
        "stabilized_authors", f"{_PAPER}, published code", **_REPEATED, below=0.0, row_sum_floor=AUTHORS_ROW_SUM_FLOOR
    ),
    # Line 10 of v1 takes max(m_prev, r_m): the lines before it have no effect.
    ShiftRule("as_printed_v1", f"{_PAPER} v1, algorithm 1 to the letter", accepted=False),
    # Line 10 of v2 takes m', before the negative branch: that branch has no effect.
    ShiftRule("as_printed_v2", f"{_PAPER} v2, algorithm 1 to the letter", **_REPEATED, accepted=False),
    ShiftRule("fixed_offset", f"{_PAPER} v1, appendix C", offset=OFFSET, accepted=False),
    ShiftRule("always_scaled", f"{_PAPER} v1, appendix C", above=BETA, below=0.0, accepted=False),
    ShiftRule("gamma", f"{_PAPER} v1, appendix C", **_REPEATED, below=GAMMA, accepted=False),
    ShiftRule("dithered", "this suite", dithered=True),
    ShiftRule("lazy", "FlashAttention-4, Blackwell forward pass", lag=LAG),
    ShiftRule("lazy_4", "FlashAttention-4, Blackwell forward pass in fp8", lag=LAG / 2),
)
SHIFT_RULES: Mapping[str, ShiftRule] = {rule.name: rule for rule in _RULES}
