"""Shift rules: how a row's shift m in exp(S - m) is chosen. All that separates flash attention's variants."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

EPSILON = 1e-3  # two scores this close count as repeated maxima (the authors' published code)
BETA = 2.0  # v2's and the authors' scale of a repeated positive maximum
BETA_V1 = 7.0  # v1's
GAMMA = 0.9999  # "close to 1" (v1, appendix C: P-bar may then round to exactly 1)
OFFSET = 1.0  # the "fixed offset" of appendix C: P-bar at the maximum is e^-1 in every row
LAG = 8.0 * math.log(2.0)  # FlashAttention-4 rescales from here on: 8 in base two, so P-bar stays below 256
AUTHORS_ROW_SUM_FLOOR = 1e-10  # the published code clamps each block's row sum here

# (scores (..., rows, keys), their row maximum (..., rows, 1), dither in [0, 1) (..., rows, 1)) -> shift (..., rows, 1)
Propose = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class ShiftRule:
    """A rule that proposes one block's shift; the running shift of a row is the maximum over its blocks, or near it."""

    name: str  # how tables and --kernels call it
    propose: Propose  # the shift that one block of scores asks for
    source: str  # where the rule is printed
    dithered: bool = False  # whether it uses the row's random number
    row_sum_floor: float = 0.0  # smallest row sum of a block, as the authors' code clamps it
    lag: float = 0.0  # how far the running shift may stay below that maximum before it follows


def repeated(scores: Tensor, row_max: Tensor, epsilon: float = EPSILON) -> Tensor:
    """Which rows hold more than one score within `epsilon` of their maximum.

    Args:
        scores: (..., rows, keys).
        row_max: (..., rows, 1).
        epsilon: 0 asks for exact equality (v1), the default for the published code's tolerance.

    Returns:
        Bool (..., rows, 1).
    """
    return ((row_max - scores) <= epsilon).sum(-1, keepdim=True) > 1


def _scaled(row_max: Tensor, where: Tensor, beta: float) -> Tensor:
    return torch.where(where & (row_max > 0), beta * row_max, row_max)


def _zeroed(shift: Tensor, row_max: Tensor, where: Tensor) -> Tensor:
    return torch.where(where & (row_max < 0), torch.zeros_like(shift), shift)


def _safe(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del scores, dither
    return row_max


def _stabilized(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del dither
    tied = repeated(scores, row_max)
    return _zeroed(_scaled(row_max, tied, BETA), row_max, tied)


def _stabilized_v1(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del dither
    tied = repeated(scores, row_max, epsilon=0.0)
    return _zeroed(_scaled(row_max, tied, BETA_V1), row_max, tied)


def _as_printed_v2(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del dither
    return _scaled(row_max, repeated(scores, row_max), BETA)


def _fixed_offset(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del scores, dither
    return row_max + OFFSET


def _always_scaled(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del scores, dither
    everywhere = torch.ones_like(row_max, dtype=torch.bool)
    return _zeroed(_scaled(row_max, everywhere, BETA), row_max, everywhere)


def _gamma(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del dither
    tied = repeated(scores, row_max)
    return torch.where(tied & (row_max < 0), GAMMA * row_max, _scaled(row_max, tied, BETA))


def _dithered(scores: Tensor, row_max: Tensor, dither: Tensor) -> Tensor:
    del scores
    return row_max + dither * math.log(2.0)


_PAPER = "arXiv 2510.04212"

SHIFT_RULES: Mapping[str, ShiftRule] = MappingProxyType(
    {
        rule.name: rule
        for rule in (
            ShiftRule("safe", _safe, "flash attention 2"),
            ShiftRule("stabilized", _stabilized, f"{_PAPER} v2, algorithm 1 as meant"),
            ShiftRule("stabilized_v1", _stabilized_v1, f"{_PAPER} v1, algorithm 1 as meant"),
            ShiftRule(
                "stabilized_authors",
                _stabilized,
                f"{_PAPER}, published code",
                row_sum_floor=AUTHORS_ROW_SUM_FLOOR,
            ),
            # Line 10 of v1 takes max(m_prev, r_m): the lines before it have no effect.
            ShiftRule("as_printed_v1", _safe, f"{_PAPER} v1, algorithm 1 to the letter"),
            # Line 10 of v2 takes m', before the negative branch: that branch has no effect.
            ShiftRule("as_printed_v2", _as_printed_v2, f"{_PAPER} v2, algorithm 1 to the letter"),
            ShiftRule("fixed_offset", _fixed_offset, f"{_PAPER} v1, appendix C"),
            ShiftRule("always_scaled", _always_scaled, f"{_PAPER} v1, appendix C"),
            ShiftRule("gamma", _gamma, f"{_PAPER} v1, appendix C"),
            ShiftRule("dithered", _dithered, "this suite", dithered=True),
            ShiftRule("lazy", _safe, "FlashAttention-4, Blackwell forward pass", lag=LAG),
        )
    }
)
