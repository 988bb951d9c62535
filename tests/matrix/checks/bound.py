"""Whether the largest error keeps within the rounding-error bound of the plan."""

from tiebreak.matrix.checks import Check, at_most
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _ask(result: Result) -> Answer | None:
    if result.waived(CHECK.name):
        return None
    asked = f"largest error within the bound of plan {result.bound_of}"
    return at_most(
        result, "error_over_bound", 1.0, asked, f"largest error is {{}} times the bound of plan {result.bound_of}"
    )


CHECK = Check("bound", "the largest error of O is within its plan's rounding-error bound", _ask, wrong=True)
