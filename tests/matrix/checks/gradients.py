"""Whether a kernel's own gradients are finite, within a bound, and on normal numbers of the right size on the whole."""

from collections.abc import Iterator

from tiebreak.cases.measures.accuracy import GAIN, LIMIT
from tiebreak.cases.verdicts import Interval
from tiebreak.matrix.checks import Check, numbers, without_number
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

_NEEDED = ("gradients_nonfinite", "gradient_error_over_bound")
_GAINS = {
    "dq_gain_error": "dQ",
    "dk_gain_error": "dK",
    "dv_gain_error": "dV",
    "delta_bias_in_dq": "delta, read off dQ,",
}
_ASKED = "dQ, dK and dV finite where the reference's are, and within their rounding-error bounds"


def _ask(result: Result) -> Answer | None:
    if result.backward_error is not None:
        why = f"its backward pass {result.backward_error}; declare backward=none if it has none"
        return Answer(False, _ASKED, why)
    if all(result.measures.get(name) is None for name in _NEEDED) or result.waived(CHECK.name):
        return None
    counted = numbers(result, *_NEEDED)
    if counted is None:
        return without_number(_ASKED, *_NEEDED)
    lost, share = counted
    faults = [*_leaning(result)]
    if lost:
        faults.append(f"{lost:.0f} elements of dQ, dK and dV are NaN or Inf, the reference's are not")
    if share > 1.0:
        faults.append(f"the largest error of dQ, dK and dV is {share:.3g} times its bound")
    faults += _larger(result)
    return Answer(not faults, _ASKED, "; ".join(faults))


def _larger(result: Result) -> Iterator[str]:
    """Which gradients have larger errors than a backward pass that rounds as this one does, where that is measured."""
    ratios = {name: result.measures.get(f"{name.lower()}_square_ratio") for name in ("dQ", "dK", "dV")}
    larger = [
        f"of {name} {ratio.mean:.3g} times (at least {ratio.low:.3g})"
        for name, ratio in ratios.items()
        if isinstance(ratio, Interval) and not ratio.low <= LIMIT
    ]
    if larger:
        yield f"mean square {', '.join(larger)} what {result.backward_held_to} has, {LIMIT} is allowed"


def _leaning(result: Result) -> Iterator[str]:
    """Which gradients are too large or too small on the whole, where that is measured."""
    errors = {name: result.measures.get(name) for name in _GAINS}
    if isinstance(errors["dq_gain_error"], Interval):
        for name, error in errors.items():
            if isinstance(error, Interval) and error.beyond(GAIN):
                yield f"{_GAINS[name]} is off by {error.mean:+.2%} on the whole, on normal numbers"


CHECK = Check(
    "gradients",
    "a kernel's own dQ, dK and dV are finite, within a rounding-error bound, of the right size on the whole, and err no"
    " more than those of a backward pass that people ship",
    _ask,
    wrong=True,
)
