"""Whether calls agree: two on the same input, or those of a question, to the size of their errors or without a bias."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.questions import comparison
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _repeatable(result: Result) -> Answer | None:
    if result.repeatable is None:
        return None
    why = "" if result.repeatable else "not repeatable: two runs on the same input differ in bits"
    return Answer(result.repeatable, "the same bits twice", why)


REPEATABLE = Check("repeatable", "two runs on the same input give the same bits", _repeatable)
USAGE = Check(
    comparison.USAGE,
    "the same numbers have the same answer in other strides, after other calls and beside what is not to be read",
    lambda result: result.agreement.get(comparison.USAGE),
    wrong=True,
)
INVARIANCE = Check(
    comparison.INVARIANCE,
    "a call that is changed in what should not matter has the same bits, or others without a bias",
    lambda result: result.agreement.get(comparison.INVARIANCE),
    judges=True,
)
