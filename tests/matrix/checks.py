"""Checks: each one question asked of a result, all in one table.

Limits are data, described once: a file of records describes a check by the same limits, so whoever reads it can answer
again. Errors of O and of gradients are held to those of the plan that a kernel declares, or that it follows.

Two numbers say whether the errors of an output are no larger than those of a plan on the same inputs, each paired head
by head, since a plan's errors differ more between inputs than between kernels:

- the ratio of the mean squared errors in ulps. Between sound kernels and the plan that they follow it is 1 but for the
  order of summation, tile sizes and the last bit of the exponential: for eight kernels in 44 cases of 32 heads at most
  1.014 in 70,400 cells in bf16, 1.07 in 33,800 in fp16. Where V has both signs, in units of the mean of |V|: at most
  1.0003 and 1.004 in 1,600 cells each. `LIMIT` lies above all.
- the difference of their biases, where every accepted plan is unbiased: in the same cells at most 0.010 ulp.

Most plans do not say where a backward pass rounds. Those that people ship are emulated from the kernel's own O and
log-sum-exp, and the one whose bits dQ, dK and dV have is what they are held to: by the ratio of mean squared errors
again, less the error that O's rounding puts into delta, which would hide a cast of dS or of a sum. If no
two gradients have a pass's bits, the nearest pass counts where dQ and dK show that delta comes from O. Autograd's
gradients depend on how attention is written: others are held to the largest errors of all passes, delta's among them.
For seventeen sound kernels on normal numbers the ratio was at most 1.011 in 1,140 cells in bf16, 1.03 in 228 in fp16,
and the lower end of no interval above 1.004; one more cast to bf16 makes 1.2 and more of it.

A third number asks which way gradients err on normal numbers: their *gain error*, sum(error * reference) /
sum(reference^2), head by head. Rounding to nearest has none: that of no sound kernel differed from 0 by 4 standard
errors and 3e-4, and the error of delta read off dQ was at most 8e-5. `GAIN` is 1e-3 for both, half of what a bf16
number loses on average that is rounded in one direction.

A cast of dP before the large part of it cancels hides gains below some per cent, however many heads are drawn. So the
gain of a kernel that follows a known pass is compared with that pass, head by head; of others it has to lie in `GAIN`
or within what 256 heads of the looser pass leave open (`*_gain_noise`), whichever is wider.

Where some heads alone are wrong, means over heads tell little: their interval is as wide as heads are apart. So no
head of normal numbers may err `WORSE` times as much as the plan errs there; tests/matrix/questions/comparison.py
derives it. In a gradient the errors of one pass in one head are a single draw: with a gradient through the maximum one
number of a row decides, and may be near 0. There the known pass that errs most in that head counts, and dQ and dK of a
kernel that follows none may err `WAYS` times as much, as one sound pass may as another. Compared with one pass,
autograd's gradients of tiled loops, sound ones, came to 16 and more in 4,200 cells of 200 seeds, compared with all of
them to 3.5 in 600 of these (tests/defects/loops.py), where `WORSE` times `WAYS` is 16: none was blamed.

A cell fails where the whole interval lies beyond the limit, and passes where it lies within. Else more heads are drawn;
if they are too few at the cap the answer is undecided, and the run fails. The interval's confidence leaves one false
alarm in 10,000 runs of 300 such questions, at four looks each, if the means over heads are normal. In the cells above
the mean of (square - LIMIT times the plan's square) was at most 1.5 times its standard error, where 5.2 makes a cell
fall. Squares are in ulps of the mean of |V|: in ulps of an O that cancels, their mean has no finite variance.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from tiebreak.cases.verdicts import GAIN, LIMIT, MARGIN_ULPS, WORSE, Interval
from tiebreak.matrix.result import Result
from tiebreak.matrix.sample import Sample
from tiebreak.plugins import Door
from tiebreak.reports.records.record import (
    CLAIM,
    IN_TIME,
    PREDICTION,
    RUNS,
    Answer,
    CheckRecord,
    LimitRecord,
    kept,
)

ACCURACY, BOUND, CONTRACT, FINITE, GRADIENTS = "accuracy", "bound", "contract", "finite", "gradients"
INVARIANCE, RANGE, REPEATABLE, USAGE = "invariance", "range", "repeatable", "usage"
CONTRACT_ASKED = "shape, format and device of O; inputs and process left as they were"


@dataclass(frozen=True, kw_only=True)
class Look:
    """Evidence that is collected from every call; it is no question about a result."""

    looks: Callable[[Sample], Mapping[str, Any]] = lambda sample: {}  # what to keep as evidence


@dataclass(frozen=True)
class Check(Look):
    """A question asked of a result."""

    name: str
    ask: Callable[[Result], Answer | None]  # None: it has nothing to ask of this result
    described: CheckRecord


def _check(name: str, about: str, ask: Callable[[Result], Answer | None], **described: Any) -> Check:
    return Check(name, ask, CheckRecord(about, **described))


#: A limit, and what is said of what does not keep to it: {0} is the number, {1} half the width of its interval, {plan}
#: whose bounds errors are shares of, {held_to} the plan, or for a gradient the backward pass, that they are compared
#: with; measures are there by their names.
_Limited = tuple[LimitRecord, str]


def _if_measured(measure: str, most: float, wording: str, *, where: Sequence[str] = (), **more: Any) -> _Limited:
    """Return a limit on a measure that not every cell has."""
    return LimitRecord(measure, most, where=(*where, measure), **more), wording


def _answer(result: Result, requirement: str, limited: Sequence[_Limited], held_to: str | None) -> Answer:
    """Answer failed where a needed number is missing, NaN, or beyond its limit."""
    passed, why = kept([limit for limit, _ in limited], result.recorded), []
    numbers = {n: math.nan if (x := result.number(n)) is None else x for n in result.measures if not passed}
    for limit, wording in limited:
        if limit.kept(result.recorded) is not passed or passed is True:
            continue
        value, number = result.measures.get(limit.measure), numbers.get(limit.measure, math.nan)
        width = value.half_width if isinstance(value, Interval) else 0.0
        text = wording.format(number, width, plan=result.bound_of, held_to=held_to, **numbers)
        if math.isnan(number):
            text = f"there is no number for {limit.measure}"
        elif passed is None and isinstance(limit.most, float):
            text = f"too few heads to tell, {result.remedy(limit.measure, limit.most)}: {text}"
        why.append(text)
    return Answer(passed, requirement.format(plan=result.bound_of), "; ".join(why))


def _limit(name: str, about: str, requirement: str, *limited: _Limited, always_of_users: bool = False) -> Check:
    """Return a check of measures' numbers, not asked without the first; a claim waives it unless `always_of_users`."""
    first, limits = limited[0][0].measure, tuple(limit for limit, _ in limited)

    def ask(result: Result) -> Answer | None:
        waived = result.is_waived(name) and not (always_of_users and result.external)
        return None if waived or first not in result.measures else _answer(result, requirement, limited, None)

    return _check(name, about, ask, wrong=True, limits=limits)


def _from_experiment(name: str, about: str, **described: Any) -> Check:
    """Return a check whose answer the experiment gives."""
    return _check(name, about, lambda result: result.answers.get(name), **described)


_TIMES_WHAT = f"{{0:.3g}} times what {{held_to}} has (+- {{1:.2g}}, {LIMIT} is allowed)"
_OF_O = (
    (LimitRecord("square_ratio", LIMIT), f"mean square {_TIMES_WHAT}"),
    _if_measured(
        "worst_head", WORSE, f"mean square of one head {{0:.3g}} times what {{held_to}} has there, {WORSE:g} is allowed"
    ),
    _if_measured("bias_apart", MARGIN_ULPS, "bias {0:+.2f} ulp (+- {1:.2g}) from what {held_to} has", size=True),
)


def _accuracy(result: Result) -> Answer | None:
    if not isinstance(result.measures.get("square_ratio"), Interval) or result.is_waived(ACCURACY):
        return None
    held_to = result.held_to
    plan = held_to.plan if held_to else "the plan that it is held to"
    answer = _answer(result, f"errors no larger than those of {plan}", _OF_O, plan)
    if answer.passed is True or not held_to or not held_to.refused:
        return answer
    times = math.sqrt(max(result.number("square_ratio") or 0.0, 0.0))
    less = f", {times:.3g} times the error of {plan}, the nearest plan that ships" if times > LIMIT else ""
    why = f"it follows {held_to.refused}, which is accepted only where it is declared{less}; {answer.why}"
    return Answer(answer.passed, answer.asked, why)


_ON_THE_WHOLE = f"is off by {{0:+.2%}} (+- {{1:.2%}}, {GAIN:.1%} is allowed) on the whole, on normal numbers"
_OF_GRADIENTS = (
    *(_if_measured(f"d{letter.lower()}_gain_error", GAIN, f"d{letter} {_ON_THE_WHOLE}", size=True,
                   or_within=f"d{letter.lower()}_gain_noise") for letter in "QKV"),
    _if_measured("delta_bias_in_dq", GAIN, f"delta, read off dQ, {_ON_THE_WHOLE}", size=True, where=("dq_gain_error",)),
    (LimitRecord("gradients_nonfinite", 0.0), "{0:.0f} elements of dQ, dK, dV are NaN or Inf, the reference's are not"),
    (LimitRecord("gradient_error_over_bound", 1.0), "the largest error of dQ, dK and dV is {0:.3g} times its bound"),
    *(_if_measured(f"d{letter.lower()}_square_ratio", LIMIT, f"mean square of d{letter} {_TIMES_WHAT}")
      for letter in "QKV"),
    _if_measured(
        "worst_gradient", WORSE, f"mean square of one head {{0:.3g}} times that of {{held_to}}, {WORSE:g} is allowed"
    ),
)  # fmt: skip
_GRADIENTS = "dQ, dK and dV finite where the reference's are, and within their rounding-error bounds"


def _gradients(result: Result) -> Answer | None:
    if result.backward_error is not None:
        why = f"its backward pass {result.backward_error}; declare backward=none if it has none"
        return Answer(False, _GRADIENTS, why)
    needed = ("gradients_nonfinite", "gradient_error_over_bound")
    if all(result.measures.get(name) is None for name in needed) or result.is_waived(GRADIENTS):
        return None
    return _answer(result, _GRADIENTS, _OF_GRADIENTS, result.backward_held_to)


def _claim(result: Result) -> Answer | None:
    claims = result.claims
    if not claims:
        return None
    wording = {claim: f"{claim.asked} ({claim.source}); {claim.measured}" for claim in claims}
    failed = [f"claim failed: {wording[claim]}" for claim in claims if claim.passed is False]
    undecided = [
        f"{result.heads} heads do not settle the claim: {wording[claim]}; {result.remedy()}"
        for claim in claims
        if claim.passed is None
    ]
    terms, source = ", ".join(claim.asked for claim in claims), "; ".join(dict.fromkeys(each.source for each in claims))
    return Answer(False if failed else None if undecided else True, terms, "; ".join(failed or undecided), source)


def _prediction(result: Result) -> Answer | None:
    prediction = result.prediction
    if prediction is None:
        return None
    terms = prediction.asked
    if prediction.passed is None:
        why = f"{result.heads} heads do not settle whether it is {terms}: {prediction.measured}; {result.remedy()}"
    else:
        why = "" if prediction.passed else f"not {terms}: {prediction.measured}"
    return Answer(prediction.passed, terms, why)


def contract_broken(why: str) -> Answer:
    """Return the answer for a kernel that breaks its contract, and so gives no result."""
    return Answer(False, CONTRACT_ASKED, why)


_CHECKS = (
    # A kernel that did not run to its end has no result to ask.
    _from_experiment(RUNS, "the kernel ran to its end", wrong=True),
    _from_experiment(IN_TIME, "the kernel ran in the time that a cell has", wrong=True),
    _check(
        ACCURACY,
        "the errors of O are no larger than those of the plan that it declares, or follows",
        _accuracy,
        judges=True,
        wrong=True,
        limits=tuple(limit for limit, _ in _OF_O),
    ),
    _limit(
        BOUND,
        "the largest error of O is within its plan's rounding-error bound",
        "largest error within the bound of plan {plan}",
        (LimitRecord("error_over_bound", 1.0), "largest error is {0:.3g} times the bound of plan {plan}"),
    ),
    _check(CLAIM, "what the case claims about such a kernel", _claim, judges=True),
    _check(
        CONTRACT,
        "a user's kernel returns what it must and leaves inputs and process as they were",
        # One that breaks it in a call gives no result: `contract_broken` answers for it.
        lambda result: result.answers.get(CONTRACT, Answer(True, CONTRACT_ASKED) if result.external else None),
        wrong=True,
    ),
    _limit(
        FINITE,
        "O is finite where the reference is, and nowhere else",
        "finite where the reference is, and nowhere else",
        (LimitRecord("nonfinite", 0.0), "{0:.0f} of {elements:.0f} elements are NaN or Inf, the reference is not"),
        (LimitRecord("missed", 0.0), "{0:.0f} elements are finite where the reference is NaN or Inf"),
        (LimitRecord("elements"), ""),
        always_of_users=True,
    ),
    _check(
        GRADIENTS,
        "a kernel's own dQ, dK and dV are finite, within a rounding-error bound, of the right size on the whole, and"
        " err no more than those of a backward pass that people ship",
        _gradients,
        wrong=True,
        limits=tuple(limit for limit, _ in _OF_GRADIENTS),
    ),
    _from_experiment(
        INVARIANCE,
        "a call that is changed in what should not matter is bitwise equal, or differs without a bias",
        judges=True,
        limits=(LimitRecord("differing_bits", 0.0),),
        more=True,
    ),
    _limit(
        "log_probabilities",
        "a language model's log-probabilities are numbers with the kernel as its attention",
        "log-probabilities that are numbers",
        (LimitRecord("nats_rms"), "log-probabilities are infinite"),
    ),
    _limit(
        "loss",
        "the loss of a training run stays a number",
        "a loss that is a number, to the last step",
        (LimitRecord("steps", "finite_steps"), "the loss is not a number after step {finite_steps:.0f} of {0:.0f}"),
    ),
    _check(
        PREDICTION,
        "what its declared plan predicts on the same inputs, emulated",
        _prediction,
        judges=True,
        limits=(LimitRecord("prediction_difference", MARGIN_ULPS, size=True),),
        more=True,  # NaN and Inf are counted on both sides, and no record has those of the emulation
    ),
    _limit(
        RANGE,
        "O, a weighted mean, lies within the range of the V that its row sees",
        "O within the range of V",
        (
            LimitRecord("outside_values", 1.0),
            "O is a weighted mean of V, but lies outside its range by {0:.3g} times what rounding allows",
        ),
    ),
    _from_experiment(REPEATABLE, "runs on the same input give bitwise equal O, and gradients that are as large"),
    _from_experiment(
        USAGE,
        "the same numbers have the same answer in other strides, after other calls and next to what is not to be read",
        wrong=True,
        limits=(
            LimitRecord("error_ratio", WORSE, where=("error_ratio",)),
            LimitRecord("lse_error_over_bound", 1.0, where=("lse_error_over_bound",)),
        ),
        more=True,
    ),
)


@cache
def looks() -> Mapping[str, Look]:
    """Return every look at calls, checks among them, by name."""
    return Door[Look]("tiebreak.checks", Look, {check.name: check for check in _CHECKS}).usable()


@cache
def checks() -> Mapping[str, Check]:
    """Return every check, by name."""
    return {name: check for name, check in looks().items() if isinstance(check, Check)}


def judging() -> frozenset[str]:
    """Return the checks that can decide a cell's outcome."""
    return frozenset(name for name, check in checks().items() if check.described.judges)


def ask_all(result: Result) -> dict[str, Answer]:
    """Return the answers of all checks to a result, by name."""
    answers = {name: check.ask(result) for name, check in checks().items()}
    return {name: answer for name, answer in answers.items() if answer is not None}
