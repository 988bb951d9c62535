"""Whether a kernel's own gradients are finite, and within a rounding-error bound."""

from tiebreak.matrix.checks import Check, numbers, without_number
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

_NEEDED = ("gradients_nonfinite", "gradient_error_over_bound")
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
    faults = []
    if lost:
        faults.append(f"{lost:.0f} elements of dQ, dK and dV are NaN or Inf, the reference's are not")
    if share > 1.0:
        faults.append(f"the largest error of dQ, dK and dV is {share:.3g} times its bound")
    return Answer(not faults, _ASKED, "; ".join(faults))


CHECK = Check(
    "gradients",
    "a kernel's own dQ, dK and dV are finite and within a rounding-error bound",
    _ask,
    term="backward error check",
)
