"""Whether there were heads enough to tell if a user's kernel is biased, on an input on which rounding can fail."""

from tiebreak.cases.verdicts import Verdict
from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

_ASKED = "heads enough to tell whether it is biased"


def _ask(result: Result) -> Answer | None:
    if not (result.contract and result.failure) or result.verdict is None:
        return None
    if result.verdict != Verdict.INCONCLUSIVE.value:
        return Answer(True, _ASKED)
    return Answer(None, _ASKED, f"{result.heads} heads do not tell whether it is biased; {result.remedy}")


CHECK = Check("decided", "there were heads enough to tell whether a user's kernel is biased", _ask)
