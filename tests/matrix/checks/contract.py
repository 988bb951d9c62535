"""Whether a user's kernel keeps its contract: what it returns, its inputs, and the process that it runs in."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

ASKED = "shape, format and device of O; inputs and process left as they were"


def _ask(result: Result) -> Answer | None:
    """A kernel that breaks its contract gives no result: `broken` answers for it."""
    if not result.contract:
        return None
    return Answer(True, ASKED) if result.leaks is None else Answer(False, ASKED, f"leaks: {result.leaks}")


def broken(why: str) -> Answer:
    """The answer of a kernel that broke its contract."""
    return Answer(False, ASKED, why)


CHECK = Check(
    "contract", "a user's kernel returns what it must and leaves inputs and process as they were", _ask, wrong=True
)
