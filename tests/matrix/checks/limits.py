"""Limits on measures: of O its largest error, its range and its NaN, of a training run its loss."""

from collections.abc import Callable, Iterator, Sequence

from tiebreak.matrix.checks import Check, numbers, without_number
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer


def _check(
    name: str,
    about: str,
    asked: str,
    needed: Sequence[str],
    faults: Callable[..., Iterator[str]],
    *,
    always_of_users: bool = False,
) -> Check:
    """Return a check of a kernel's numbers, one that is missing or NaN included.

    Args:
        name: of the check.
        about: what it asks, in one line.
        asked: what has to hold; {plan} is the one whose bounds errors are shares of, as in faults.
        needed: the measures that it looks at; a result that does not know the first is asked nothing.
        faults: given their numbers, what is wrong.
        always_of_users: whether a user's kernel must meet it though a claim waives it.
    """

    def ask(result: Result) -> Answer | None:
        waived = result.waived(name) and not (always_of_users and result.contract)
        if needed[0] not in result.measures or waived:
            return None
        holds, known = asked.format(plan=result.bound_of), numbers(result, *needed)
        if known is None:
            return without_number(holds, *needed)
        why = [fault.format(plan=result.bound_of) for fault in faults(*known)]
        return Answer(not why, holds, "; ".join(why))

    return Check(name, about, ask, wrong=True)


def _beyond_bound(share: float) -> Iterator[str]:
    if share > 1.0:
        yield f"largest error is {share:.3g} times the bound of plan {{plan}}"


def _out_of_range(share: float) -> Iterator[str]:
    if share > 1.0:
        yield f"O is a weighted mean of V, but lies outside its range by {share:.3g} times what rounding allows"


def _not_finite(lost: float, missed: float, elements: float) -> Iterator[str]:
    if lost:
        yield f"{lost:.0f} of {elements:.0f} elements are NaN or Inf, the reference is not"
    if missed:
        yield f"{missed:.0f} elements are finite where the reference is NaN or Inf"


def _lost_loss(finite: float, steps: float) -> Iterator[str]:
    if finite != steps:
        yield f"the loss is not a number at step {finite + 1:.0f} of {steps:.0f}"


BOUND = _check(
    "bound",
    "the largest error of O is within its plan's rounding-error bound",
    "largest error within the bound of plan {plan}",
    ["error_over_bound"],
    _beyond_bound,
)
RANGE = _check(
    "range",
    "O, a weighted mean, lies within the range of the V that its row sees",
    "O within the range of V",
    ["outside_values"],
    _out_of_range,
)
FINITE = _check(
    "finite",
    "O is finite where the reference is, and nowhere else",
    "finite where the reference is, and nowhere else",
    ["nonfinite", "missed", "elements"],
    _not_finite,
    always_of_users=True,
)
LOSS = _check(
    "loss",
    "the loss of a training run stays a number",
    "a loss that is a number, to the last step",
    ["finite_steps", "steps"],
    _lost_loss,
)
