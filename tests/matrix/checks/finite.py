"""Whether O is finite where the reference is, and lost where the reference is."""

from tiebreak.matrix.checks import Check, numbers, without_number
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

_NEEDED = ("nonfinite", "missed", "elements")
_ASKED = "finite where the reference is, and nowhere else"


def _ask(result: Result) -> Answer | None:
    if "nonfinite" not in result.measures or (result.waived(CHECK.name) and not result.contract):
        return None
    counted = numbers(result, *_NEEDED)
    if counted is None:
        return without_number(_ASKED, *_NEEDED)
    lost, missed, elements = map(int, counted)
    faults = []
    if lost:
        faults.append(f"{lost} of {elements} elements are NaN or Inf, the reference is not")
    if missed:
        faults.append(f"{missed} elements are finite where the reference is NaN or Inf")
    return Answer(not faults, _ASKED, "; ".join(faults))


CHECK = Check("finite", "O is finite where the reference is, and nowhere else", _ask, wrong=True)
