"""Whether two runs on the same input give the same bits."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _ask(result: Result) -> Answer | None:
    if result.repeatable is None:
        return None
    why = "" if result.repeatable else "not repeatable: two runs on the same input differ in bits"
    return Answer(result.repeatable, "the same bits twice", why)


CHECK = Check("repeatable", "two runs on the same input give the same bits", _ask)
