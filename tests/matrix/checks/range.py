"""Whether O lies within the range of V, as a weighted mean does."""

from tiebreak.matrix.checks import Check, at_most
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _ask(result: Result) -> Answer | None:
    if result.waived(CHECK.name):
        return None
    why = "O is a weighted mean of V, but lies outside its range by {} times what rounding allows"
    return at_most(result, "outside_values", 1.0, "O within the range of V", why)


CHECK = Check("range", "O, a weighted mean, lies within the range of the V that its row sees", _ask, wrong=True)
