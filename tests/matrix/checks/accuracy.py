"""Whether the errors of O are no larger than those of the plan that the kernel declares, or that it follows."""

from tiebreak.cases.measures.accuracy import LIMIT
from tiebreak.cases.verdicts import MARGIN_ULPS, Interval
from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _ask(result: Result) -> Answer | None:
    ratio, apart = (result.measures.get(name) for name in ("square_ratio", "bias_apart"))
    if not isinstance(ratio, Interval) or result.waived(CHECK.name):
        return None
    plan = result.held_to or "the plan that it is held to"
    why = []
    if not ratio.low <= LIMIT:
        why.append(f"mean square {ratio.mean:.3g} times what {plan} has (at least {ratio.low:.3g}, {LIMIT} is allowed)")
    if isinstance(apart, Interval) and apart.beyond(MARGIN_ULPS):
        why.append(f"bias {apart.mean:+.2f} ulp from what {plan} has on normal numbers")
    return Answer(not why, f"errors no larger than those of {plan}", "; ".join(why))


CHECK = Check(
    "accuracy",
    "the errors of O are no larger than those of the plan that it declares, or follows",
    _ask,
    judges=True,
    wrong=True,
)
