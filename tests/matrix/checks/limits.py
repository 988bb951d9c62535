"""Limits on measures: of O and of gradients their largest errors, their NaN and their size, of a training run its loss.

Errors of O and of gradients are also held to those of the plan that the kernel declares, or that it follows. Which
number has which limit stands here once, beside what is said of one that is beyond it. A file of records describes a
check by the same limits: whoever reads it can answer again.
"""

import math
from collections.abc import Sequence
from typing import Any

from tiebreak.cases.measures.accuracy import GAIN, LIMIT, WORSE
from tiebreak.cases.verdicts import MARGIN_ULPS, Interval
from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer, LimitRecord, kept

#: A limit, and what is said of what does not keep to it: {0} is the number, {1} half the width of its interval, {plan}
#: whose bounds errors are shares of, {held_to} the plan, or for a gradient the backward pass, that they are compared
#: with; measures are there by their names.
_Limited = tuple[LimitRecord, str]


def _where_there(measure: str, most: float, said: str, *, where: Sequence[str] = (), **more: Any) -> _Limited:
    """Make a limit on a measure that not every cell has."""
    return LimitRecord(measure, most, where=(*where, measure), **more), said


def _answer(result: Result, asked: str, limited: Sequence[_Limited], held_to: str | None) -> Answer:
    """Not met where a number that is needed is missing or NaN, which no check takes for a pass, or beyond its limit."""
    numbers = {name: math.nan if (number := result.number(name)) is None else number for name in result.measures}
    met, why = kept([limit for limit, _ in limited], result.recorded), []
    for limit, said in limited:
        if limit.kept(result.recorded) is not met or met is True:
            continue
        value, number = result.measures.get(limit.measure), numbers.get(limit.measure, math.nan)
        width = value.half_width if isinstance(value, Interval) else 0.0
        text = said.format(number, width, plan=result.bound_of, held_to=held_to, **numbers)
        if math.isnan(number):
            text = f"there is no number for {limit.measure}"
        elif met is None and isinstance(limit.most, float):
            text = f"too few heads to tell, {result.remedy(limit.measure, limit.most)}: {text}"
        why.append(text)
    return Answer(met, asked.format(plan=result.bound_of), "; ".join(why))


def _limit(name: str, about: str, asked: str, *limited: _Limited, always_of_users: bool = False) -> Check:
    """A check of the numbers of some measures; a result that does not know the first is asked nothing.

    A user's kernel must `always` meet it though a claim waives it.
    """
    first, limits = limited[0][0].measure, tuple(limit for limit, _ in limited)

    def ask(result: Result) -> Answer | None:
        waived = result.waived(name) and not (always_of_users and result.contract)
        return None if waived or first not in result.measures else _answer(result, asked, limited, None)

    return Check(name, about, ask, wrong=True, limits=limits)


_TIMES_WHAT = f"{{0:.3g}} times what {{held_to}} has (+- {{1:.2g}}, {LIMIT} is allowed)"
_OF_O = (
    (LimitRecord("square_ratio", LIMIT), f"mean square {_TIMES_WHAT}"),
    _where_there(
        "worst_head", WORSE, f"mean square of one head {{0:.3g}} times what {{held_to}} has there, {WORSE:g} is allowed"
    ),
    _where_there("bias_apart", MARGIN_ULPS, "bias {0:+.2f} ulp (+- {1:.2g}) from what {held_to} has", size=True),
)


def _accuracy(result: Result) -> Answer | None:
    if not isinstance(result.measures.get("square_ratio"), Interval) or result.waived(ACCURACY.name):
        return None
    plan = result.held_to or "the plan that it is held to"
    answer = _answer(result, f"errors no larger than those of {plan}", _OF_O, plan)
    if answer.met is True or not result.refused:
        return answer
    why = f"it follows {result.refused}, which is accepted only where it is declared; {answer.why}"
    return Answer(answer.met, answer.asked, why)


_ON_THE_WHOLE = f"is off by {{0:+.2%}} (+- {{1:.2%}}, {GAIN:.1%} is allowed) on the whole, on normal numbers"
_OF_GRADIENTS = (
    *(_where_there(f"d{letter.lower()}_gain_error", GAIN, f"d{letter} {_ON_THE_WHOLE}", size=True,
                   or_within=f"d{letter.lower()}_gain_noise") for letter in "QKV"),
    _where_there("delta_bias_in_dq", GAIN, f"delta, read off dQ, {_ON_THE_WHOLE}", size=True, where=("dq_gain_error",)),
    (LimitRecord("gradients_nonfinite", 0.0), "{0:.0f} elements of dQ, dK, dV are NaN or Inf, the reference's are not"),
    (LimitRecord("gradient_error_over_bound", 1.0), "the largest error of dQ, dK and dV is {0:.3g} times its bound"),
    *(_where_there(f"d{letter.lower()}_square_ratio", LIMIT, f"mean square of d{letter} {_TIMES_WHAT}")
      for letter in "QKV"),
    _where_there(
        "worst_gradient", WORSE, f"mean square of one head {{0:.3g}} times that of {{held_to}}, {WORSE:g} is allowed"
    ),
)  # fmt: skip
_GRADIENTS = "dQ, dK and dV finite where the reference's are, and within their rounding-error bounds"


def _gradients(result: Result) -> Answer | None:
    if result.backward_error is not None:
        why = f"its backward pass {result.backward_error}; declare backward=none if it has none"
        return Answer(False, _GRADIENTS, why)
    needed = ("gradients_nonfinite", "gradient_error_over_bound")
    if all(result.measures.get(name) is None for name in needed) or result.waived(GRADIENTS.name):
        return None
    return _answer(result, _GRADIENTS, _OF_GRADIENTS, result.backward_held_to)


BOUND = _limit(
    "bound",
    "the largest error of O is within its plan's rounding-error bound",
    "largest error within the bound of plan {plan}",
    (LimitRecord("error_over_bound", 1.0), "largest error is {0:.3g} times the bound of plan {plan}"),
)
RANGE = _limit(
    "range",
    "O, a weighted mean, lies within the range of the V that its row sees",
    "O within the range of V",
    (
        LimitRecord("outside_values", 1.0),
        "O is a weighted mean of V, but lies outside its range by {0:.3g} times what rounding allows",
    ),
)
FINITE = _limit(
    "finite",
    "O is finite where the reference is, and nowhere else",
    "finite where the reference is, and nowhere else",
    (LimitRecord("nonfinite", 0.0), "{0:.0f} of {elements:.0f} elements are NaN or Inf, the reference is not"),
    (LimitRecord("missed", 0.0), "{0:.0f} elements are finite where the reference is NaN or Inf"),
    (LimitRecord("elements"), ""),
    always_of_users=True,
)
LOSS = _limit(
    "loss",
    "the loss of a training run stays a number",
    "a loss that is a number, to the last step",
    (LimitRecord("steps", "finite_steps"), "the loss is not a number after step {finite_steps:.0f} of {0:.0f}"),
)
LOG_PROBABILITIES = _limit(
    "log_probabilities",
    "a language model's log-probabilities are numbers with the kernel in the place of its attention",
    "log-probabilities that are numbers",
    (LimitRecord("nats_rms"), "log-probabilities are infinite"),
)
ACCURACY = Check(
    "accuracy",
    "the errors of O are no larger than those of the plan that it declares, or follows",
    _accuracy,
    judges=True,
    wrong=True,
    limits=tuple(limit for limit, _ in _OF_O),
)
GRADIENTS = Check(
    "gradients",
    "a kernel's own dQ, dK and dV are finite, within a rounding-error bound, of the right size on the whole, and err no"
    " more than those of a backward pass that people ship",
    _gradients,
    wrong=True,
    limits=tuple(limit for limit, _ in _OF_GRADIENTS),
)
