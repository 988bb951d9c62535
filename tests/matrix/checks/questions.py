"""Whether the calls of a question agree: to the size of their errors, or without a bias."""

from collections.abc import Callable

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _answered(check: str) -> Callable[[Result], Answer | None]:
    """Return what gives the answer that the question's own comparison has."""
    return lambda result: result.agreement.get(check)


USAGE = Check(
    "usage",
    "the same numbers have the same answer in other strides, after other calls and beside what is not to be read",
    _answered("usage"),
    wrong=True,
    term="metamorphic relation",
)
INVARIANCE = Check(
    "invariance",
    "a call that is changed in what should not matter has the same bits, or others without a bias",
    _answered("invariance"),
    judges=True,
    term="batch invariance",
)
