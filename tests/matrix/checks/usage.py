"""Whether a kernel gives the same answer however it is called."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _ask(result: Result) -> Answer | None:
    if not result.relations:
        return None
    why = [relation.why for relation in result.relations if relation.why]
    more = f"; and {len(why) - 1} more" if len(why) > 1 else ""
    return Answer(not why, "; ".join(relation.asked for relation in result.relations), f"{why[0]}{more}" if why else "")


CHECK = Check(
    "usage",
    "the same numbers have the same answer in other strides, after other calls and beside what is not to be read",
    _ask,
    wrong=True,
    term="metamorphic relation",
)
