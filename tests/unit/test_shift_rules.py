"""Every shift rule on rows whose shift is worked out by hand."""

import math

import pytest
import torch
from torch import Tensor

from tiebreak.kernels.shift_rules import SHIFT_RULES

pytestmark = pytest.mark.quick

INF = math.inf
U = 0.75  # the dither of the hand-written rows

ROWS = {
    "positive": [2.0, 1.0, -3.0],
    "negative": [-2.0, -3.0, -4.0],
    "repeated_positive": [1.0, 2.0, 2.0],
    "repeated_negative": [-2.0, -5.0, -2.0],
    "repeated_zero": [0.0, 0.0, -1.0],
    "near_positive": [2.0, 2.0 - 2.0**-11, 1.0],  # 4.9e-4 apart: within eps
    "near_negative": [-2.0, -2.0 - 2.0**-11, -5.0],
    "apart": [2.0, 2.0 - 2.0**-9, 1.0],  # 2.0e-3 apart: beyond eps
    "repeated_beside_masked": [2.0, 2.0, -INF],
    "single_beside_masked": [-2.0, -INF, -INF],
    "masked": [-INF, -INF, -INF],
}
_SAFE = [2.0, -2.0, 2.0, -2.0, 0.0, 2.0, -2.0, 2.0, 2.0, -2.0, -INF]
# Beta is 2, in v1 7; gamma is 0.9999. In the order of ROWS.
SHIFTS = {
    "safe": _SAFE,
    "stabilized": [2.0, -2.0, 4.0, 0.0, 0.0, 4.0, 0.0, 2.0, 4.0, -2.0, -INF],
    "stabilized_v1": [2.0, -2.0, 14.0, 0.0, 0.0, 2.0, -2.0, 2.0, 14.0, -2.0, -INF],
    "stabilized_authors": [2.0, -2.0, 4.0, 0.0, 0.0, 4.0, 0.0, 2.0, 4.0, -2.0, -INF],
    "as_printed_v1": _SAFE,
    "as_printed_v2": [2.0, -2.0, 4.0, -2.0, 0.0, 4.0, -2.0, 2.0, 4.0, -2.0, -INF],
    "fixed_offset": [3.0, -1.0, 3.0, -1.0, 1.0, 3.0, -1.0, 3.0, 3.0, -1.0, -INF],
    # A masked tile's 0 never gets through: flash attention asks no rule about it.
    "always_scaled": [4.0, 0.0, 4.0, 0.0, 0.0, 4.0, 0.0, 4.0, 4.0, 0.0, 0.0],
    "gamma": [2.0, -2.0, 4.0, -1.9998, 0.0, 4.0, -1.9998, 2.0, 4.0, -2.0, -INF],
    "dithered": [shift + 0.75 * 0.6931471805599453 for shift in _SAFE],
    "lazy": _SAFE,
    "lazy_4": _SAFE,
}


def _shift(rule: str, scores: Tensor, dither: float = U) -> Tensor:
    row_max = scores.amax(-1, keepdim=True)
    return SHIFT_RULES[rule].propose(scores, row_max, torch.full_like(row_max, dither))


@pytest.mark.parametrize("rule", SHIFT_RULES)
def test_the_shift_of_a_row_is_as_worked_out_by_hand_and_the_same_among_others(rule: str) -> None:
    rows = torch.tensor(list(ROWS.values()))
    shifts = _shift(rule, rows.expand(2, 3, *rows.shape))
    assert shifts.shape == (2, 3, len(ROWS), 1)
    # Two fp32 roundings at most: of the constant and of the result.
    for shift in shifts.flatten(0, 1)[..., 0].tolist():
        assert shift == pytest.approx(SHIFTS[rule], rel=2 * 2.0**-24)


def test_only_the_authors_code_clamps_the_row_sum_and_only_lazy_rescaling_lags_by_powers_of_two() -> None:
    floors = {rule.name: rule.row_sum_floor for rule in SHIFT_RULES.values() if rule.row_sum_floor}
    assert floors == {"stabilized_authors": 1e-10}
    lags = {rule.name: math.exp(rule.lag) for rule in SHIFT_RULES.values() if rule.lag}
    assert lags == pytest.approx({"lazy": 256.0, "lazy_4": 16.0})
