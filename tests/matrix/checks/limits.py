"""Limits on measures: of O and of gradients their largest errors, their NaN and their size, of a training run its loss.

Errors of O and of gradients are also held to those of the plan that the kernel declares, or that it follows.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from tiebreak.cases.measures.accuracy import LIMITS_OF_GRADIENTS, LIMITS_OF_O, WORSE, Limit
from tiebreak.cases.verdicts import Interval
from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

_GRADIENTS = "dQ, dK and dV finite where the reference's are, and within their rounding-error bounds"
_Faults = Callable[..., Mapping[str, bool]]  # of the numbers of some measures: what may be wrong, and whether it is


def _answer(result: Result, asked: str, needed: Sequence[str], faults: Callable[..., Iterator[str]]) -> Answer:
    """Not met where a number that is needed is missing or NaN, which no check takes for a pass, or shows a fault."""
    known = [number for name in needed if (number := result.number(name)) is not None and not math.isnan(number)]
    if len(known) < len(needed):
        return Answer(False, asked, f"there is no number for {' or '.join(needed)}")
    why = list(faults(*known))
    return Answer(not why, asked, "; ".join(why))


def _limit(
    name: str, about: str, asked: str, needed: Sequence[str], faults: _Faults, *, always_of_users: bool = False
) -> Check:
    """A check of the numbers of some measures; a result that does not know the first is asked nothing.

    {plan} in what it says is the one whose bounds errors are shares of. A user's kernel must `always` meet it though a
    claim waives it.
    """

    def ask(result: Result) -> Answer | None:
        waived = result.waived(name) and not (always_of_users and result.contract)
        if needed[0] not in result.measures or waived:
            return None

        def found(*numbers: float) -> Iterator[str]:
            return (text.format(plan=result.bound_of) for text, so in faults(*numbers).items() if so)

        return _answer(result, asked.format(plan=result.bound_of), needed, found)

    return Check(name, about, ask, wrong=True)


def _beyond(result: Result, limits: Mapping[str, Limit], about: Callable[[str], str]) -> tuple[list[str], list[str]]:
    """Return the measures whose interval lies beyond its limit, and those whose interval tells nothing, in words."""
    fell, untold = list[str](), list[str]()
    for name, limit in limits.items():
        met, value = limit.met(name, result.measures), result.measures.get(name)
        if met is True or not isinstance(value, Interval):
            continue
        width, allowed = (limit.shown.format(x).lstrip("+") for x in (value.half_width, limit.at))
        found = f"{about(name).format(limit.shown.format(value.mean))} (+- {width}, {allowed} is allowed)"
        if met is False:
            fell.append(found)
        else:
            untold.append(f"too few heads to tell: {found}; {result.remedy(name, limit.at)}")
    return fell, untold


def _accuracy(result: Result) -> Answer | None:
    if not isinstance(result.measures.get("square_ratio"), Interval) or result.waived(ACCURACY.name):
        return None
    plan = result.held_to or "the plan that it is held to"
    words = {"square_ratio": "mean square {} times what", "bias_apart": "bias {} on normal numbers from what"}
    why, untold = _beyond(result, LIMITS_OF_O, lambda name: f"{words[name]} {plan} has")
    if (worst := result.number("worst_head")) is not None and not worst <= WORSE:
        why.append(f"mean square of one head {worst:.3g} times what {plan} has there, {WORSE:g} is allowed")
    if why and result.refused:
        why.insert(0, f"it follows {result.refused}, which is accepted only where it is declared")
    return Answer(_told(why, untold), f"errors no larger than those of {plan}", "; ".join(why or untold))


def _told(faults: Sequence[str], untold: Sequence[str]) -> bool | None:
    return False if faults else None if untold else True


def _gradients(result: Result) -> Answer | None:
    if result.backward_error is not None:
        why = f"its backward pass {result.backward_error}; declare backward=none if it has none"
        return Answer(False, _GRADIENTS, why)
    needed = ("gradients_nonfinite", "gradient_error_over_bound")
    if all(result.measures.get(name) is None for name in needed) or result.waived(GRADIENTS.name):
        return None
    limits = LIMITS_OF_GRADIENTS if isinstance(result.measures.get("dq_gain_error"), Interval) else {}
    beyond, untold = _beyond(result, limits, partial(_of_gradient, result.backward_held_to))
    largest = _answer(result, _GRADIENTS, needed, lambda lost, share: _gradient_faults(result, lost, share))
    faults = [*beyond, *filter(None, [largest.why])]
    return Answer(_told(faults, untold), _GRADIENTS, "; ".join(faults or untold))


def _of_gradient(held_to: str | None, measure: str) -> str:
    if measure == "delta_bias_in_dq":
        return "delta, read off dQ, is off by {} on the whole, on normal numbers"
    gradient = f"d{measure[1].upper()}"
    if measure.endswith("_gain_error"):
        return f"{gradient} is off by {{}} on the whole, on normal numbers"
    return f"mean square of {gradient} {{}} times what {held_to} has"


def _gradient_faults(result: Result, lost: float, share: float) -> Iterator[str]:
    if lost:
        yield f"{lost:.0f} elements of dQ, dK and dV are NaN or Inf, the reference's are not"
    if share > 1.0:
        yield f"the largest error of dQ, dK and dV is {share:.3g} times its bound"
    if (worst := result.number("worst_gradient")) is not None and not worst <= WORSE:
        yield f"mean square of one head {worst:.3g} times that of {result.backward_held_to}, {WORSE:g} is allowed"


BOUND = _limit(
    "bound",
    "the largest error of O is within its plan's rounding-error bound",
    "largest error within the bound of plan {plan}",
    ["error_over_bound"],
    lambda share: {f"largest error is {share:.3g} times the bound of plan {{plan}}": share > 1.0},
)
RANGE = _limit(
    "range",
    "O, a weighted mean, lies within the range of the V that its row sees",
    "O within the range of V",
    ["outside_values"],
    lambda share: {
        f"O is a weighted mean of V, but lies outside its range by {share:.3g} times what rounding allows": share > 1.0
    },
)
FINITE = _limit(
    "finite",
    "O is finite where the reference is, and nowhere else",
    "finite where the reference is, and nowhere else",
    ["nonfinite", "missed", "elements"],
    lambda lost, missed, elements: {
        f"{lost:.0f} of {elements:.0f} elements are NaN or Inf, the reference is not": lost > 0,
        f"{missed:.0f} elements are finite where the reference is NaN or Inf": missed > 0,
    },
    always_of_users=True,
)
LOSS = _limit(
    "loss",
    "the loss of a training run stays a number",
    "a loss that is a number, to the last step",
    ["finite_steps", "steps"],
    lambda finite, steps: {f"the loss is not a number at step {finite + 1:.0f} of {steps:.0f}": finite != steps},
)
LOG_PROBABILITIES = _limit(
    "log_probabilities",
    "a language model's log-probabilities are numbers with the kernel in the place of its attention",
    "log-probabilities that are numbers",
    ["nats_rms"],
    lambda rms: {"log-probabilities are infinite": math.isinf(rms)},
)
ACCURACY = Check(
    "accuracy",
    "the errors of O are no larger than those of the plan that it declares, or follows",
    _accuracy,
    judges=True,
    wrong=True,
)
GRADIENTS = Check(
    "gradients",
    "a kernel's own dQ, dK and dV are finite, within a rounding-error bound, of the right size on the whole, and err no"
    " more than those of a backward pass that people ship",
    _gradients,
    wrong=True,
)
