"""Names the output that a wrong kernel gets most wrong, and by what share of the reference's norm."""

import math
from collections.abc import Mapping

from torch import Tensor

from tiebreak.cases.verdicts import GAIN, LIMIT, Interval, Value
from tiebreak.matrix.checks import ACCURACY, BOUND, FINITE, GRADIENTS, RANGE
from tiebreak.matrix.result import Off, Result
from tiebreak.matrix.sample import Sample
from tiebreak.reports.records.record import Answer

_OF_O = (FINITE, BOUND, RANGE, ACCURACY)
_SEEN = 0.1  # share of an output's size by which it is seen to be off; a smaller one may be a sound kernel's


def farthest_off(result: Result, answers: Mapping[str, Answer]) -> dict[str, dict[str, float | None]]:
    """Return as evidence the wrong tensor, O before a gradient, with the reason where the error is small."""
    not_passed = [name for name in (*_OF_O, GRADIENTS) if name in answers and answers[name].passed is False]
    off = result.off(not_passed[0] not in _OF_O) if not_passed and result.off else None
    if off is None:
        return {}
    text, share = off
    small = share is not None and share < _SEEN
    return {"off": {f"{text}: {answers[not_passed[0]].why.partition('; ')[0]}" if small else text: share}}


def o_off(sample: Sample) -> Off:
    """Return the error of O, if it is wrong."""
    errors, exact = sample.errors, sample.first.ref.o
    for lost, what in ((errors.nonfinite, "NaN or Inf"), (errors.missed, "a number, and should be none,")):
        if lost:
            return f"O is {what} in {lost:,} of {errors.elements:,} elements", None
    error, size = (_finite(x).norm().item() for x in (sample.outputs[0].o - exact, exact))
    return _as_off("O", error / size if size else math.inf)


def gradient_off(sample: Sample, measures: Mapping[str, Value]) -> Off | None:
    """Return the error of the gradient that is farthest beyond its limit; None: there are none."""
    errors, failure = sample.gradient_errors, sample.outputs[0].backward_error
    if errors is None:
        return None if failure is None else (f"its backward pass {failure}", None)
    faults = dict(zip(("dQ", "dK", "dV"), (each.faults for each in errors.each), strict=True))
    for name, each in faults.items():
        if each.nonfinite:
            return f"{name} is NaN or Inf in {each.nonfinite:,} elements", None

    def share(name: str) -> float:
        value = measures[f"{name.lower()}_relative_error"]
        return value if isinstance(value, float) else math.nan

    def gain(name: str) -> float:
        value = measures[f"{name.lower()}_gain_error"]
        return value.mean if isinstance(value, Interval) else 0.0

    def beyond(name: str) -> float:
        ratio = measures[f"{name.lower()}_square_ratio"]
        larger = ratio.low / LIMIT if isinstance(ratio, Interval) else 0.0
        return max(faults[name].over_bound, larger, abs(gain(name)) / GAIN)

    worst = max(faults, key=beyond)
    if errors.faults.over_bound > max(1.0, *map(beyond, faults)):
        return _as_off("dSink", share("dSink"))
    along = abs(gain(worst)) >= max(_SEEN, (1.0 - _SEEN) * share(worst))  # the error is one factor, by and large
    return _as_off(worst, share(worst), f", {1 + gain(worst):.3g} times the reference" if along else "")


def _as_off(output: str, share: float, more: str = "") -> Off:
    if not math.isfinite(share):  # of a reference that is 0
        return f"{output} is not what it should be, 0", None
    return f"{output} is off by {100 * share:{',.0f' if share >= _SEEN else '.2g'}} % of its size{more}", share


def _finite(x: Tensor) -> Tensor:
    return x.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
