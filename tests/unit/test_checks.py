"""Every check: what it is asked of, when it passed, and what an outcome follows from."""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest

from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.verdicts import Interval
from tiebreak.matrix.checks import ask_all, checks, judging
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.result import Claimed, Result
from tiebreak.reports.records.record import (
    CRASHED,
    FAILED,
    IN_TIME,
    MEASURED,
    PASSED,
    RUNS,
    TIMED_OUT,
    UNDECIDED,
    Answer,
    Shown,
    outcome_of,
)

pytestmark = pytest.mark.quick

FINITE = {"nonfinite": 0.0, "missed": 0.0, "elements": 64.0}
STEPS = {"finite_steps": 4.0, "steps": 4.0}
ABOVE_1 = math.nextafter(1.0, 2.0)
NO_NUMBERS = (None, math.nan, Interval(math.nan, math.inf))


def claimed(passed: bool | None, asked: str = "unbiased", *waives: str) -> Claimed:
    return Claimed(asked, f"who says {asked}", passed, f"bias of {asked}", frozenset(waives))


def measured(**measures: Any) -> dict[str, Any]:
    return {"measures": measures}


BOUND, RANGE = "error_over_bound", "outside_values"
LOST, LOST_LOSS = measured(**FINITE | {"nonfinite": 1.0}), measured(**STEPS | {"finite_steps": 2.0})
WRONG_GRADIENTS = measured(gradients_nonfinite=3.0, gradient_error_over_bound=1.5)
of_one_head = partial(measured, gradients_nonfinite=0.0, gradient_error_over_bound=1.0)


def gained(mean: float, width: float, noise: float = 0.0) -> dict[str, Any]:
    sound = Interval(0.0, 1e-4)
    gains = {"dq_gain_error": sound, "dv_gain_error": sound, "dk_gain_error": Interval(mean, width)}
    return of_one_head(**gains, dk_gain_noise=noise)


def predicted(passed: bool | None) -> dict[str, Any]:
    return {"prediction": Claimed("what plan predicts", "", passed, "found")}


SMALL = (claimed(True), claimed(None, "small"))
OPEN = {"heads": 8, "obstacle": "more"}
NOT_SMALL = {"claims": (claimed(None), claimed(False, "small"))}
#: A check, the fields that differ from a result of nothing, the answer, and a pattern of why.
ANSWERS: Sequence[tuple[str, dict[str, Any], bool | None, str]] = (
    *((name, measured(**{of: passed}), True, "^$") for name, of in (("bound", BOUND), ("range", RANGE))
      for passed in (0.0, 1.0, Interval(1.0, 0.0))),
    *((name, measured(**{of: math.nan}), False, f"^there is no number for {of}$")
      for name, of in (("bound", BOUND), ("range", RANGE))),
    ("bound", measured(error_over_bound=ABOVE_1), False, "^largest error is 1 times the bound of plan p$"),
    ("bound", measured(error_over_bound=math.inf), False, "^largest error is inf times the bound of plan p$"),
    ("range", measured(outside_values=ABOVE_1), False, "lies outside its range by 1 times what rounding allows$"),
    ("finite", measured(**FINITE), True, "^$"),
    ("finite", LOST, False, "^1 of 64 elements are NaN or Inf, the reference is not$"),
    ("finite", measured(**FINITE | {"nonfinite": 1.0, "missed": 2.0}), False, "^1 of 64 .*; 2 elements are finite wh"),
    ("loss", measured(**STEPS), True, "^$"),
    ("loss", LOST_LOSS, False, "^the loss is not a number after step 2 of 4$"),
    ("log_probabilities", measured(nats_rms=1e-3), True, "^$"),
    ("log_probabilities", measured(nats_rms=math.nan), False, "^there is no number for nats_rms$"),
    ("claim", {"claims": (claimed(True), claimed(True, "small"))}, True, "^$"),
    ("claim", NOT_SMALL, False, r"^claim failed: small \(who says small\); bias of small$"),
    ("claim", {"claims": SMALL} | OPEN, None,
     r"^8 heads do not settle the claim: small \(who says small\); bias of small; more$"),
    ("prediction", predicted(True), True, "^$"),
    ("prediction", predicted(False), False, "^not what plan predicts: found$"),
    ("prediction", predicted(None) | OPEN, None,
     "^8 heads do not settle whether it is what plan predicts: found; more$"),
    ("gradients", measured(gradients_nonfinite=0.0, gradient_error_over_bound=1.0), True, "^$"),
    ("gradients", WRONG_GRADIENTS, False, "^3 elements of dQ, .* Inf, the reference's are not; the largest error of .*"
                                          r" is 1\.5 times its bound$"),
    ("gradients", measured(gradients_nonfinite=0.0, gradient_error_over_bound=math.nan), False, "^there is no number"),
    ("gradients", of_one_head(worst_gradient=4.0), True, "^$"),
    ("gradients", of_one_head(worst_gradient=5.0), False, "^mean square of one head 5 times that of .*, 4 is allowed$"),
    ("accuracy", measured(square_ratio=Interval(1.0, 0.1), worst_head=4.0), True, "^$"),
    ("accuracy", measured(square_ratio=Interval(1.0, 0.1), worst_head=5.0), False, "^mean square of one head 5 times"),
    ("accuracy", measured(square_ratio=Interval(54.0, 59.0)) | OPEN, None, "^too few heads to tell, more: .* 54 "),
    ("accuracy", measured(square_ratio=Interval(54.0, 59.0)) | {"heads": 256}, None, "--heads 64 would do"),
    ("accuracy", measured(square_ratio=Interval(1.3, 0.1)), False, r"^mean square 1\.3 times"),
    ("accuracy", measured(square_ratio=Interval(1.0, math.nan)), None, "^too few heads"),
    *(("gradients", gained(**numbers) | OPEN, passed, why) for numbers, passed, why in (
        ({"mean": 2e-3, "width": 5e-4}, False, r"^dK is off by \+0\.20%"),
        ({"mean": 0.0, "width": 2e-3}, None, "^too few heads to tell, more: dK"),
        ({"mean": 0.0, "width": 2e-3, "noise": 3e-3}, True, "^$"),
        ({"mean": 0.0, "width": 4e-3, "noise": 3e-3}, None, "^too few heads to tell, more: dK"),
        ({"mean": 2e-3, "width": 5e-4, "noise": 3e-3}, False, "^dK"),  # seen, though others' noise would hide it
    )),
    *(("accuracy", measured(square_ratio=Interval(1.0, 0.1), bias_apart=Interval(sign * bias, 0.01)), passed, why)
      for sign in (1, -1) for bias, passed, why in ((0.02, True, "^$"), (0.2, False, r"^bias [+-]0\.20 ulp "))),
    *(("gradients", of_one_head(dq_gain_error=Interval(sign * 0.02, 0.001)), False, "^dQ is off by [+-]2.00% ")
      for sign in (1, -1)),
    # Delta is read off dQ of any numbers, and has a limit on normal ones alone.
    ("gradients", of_one_head(delta_bias_in_dq=Interval(0.1, 0.001)), True, "^$"),
    ("gradients", of_one_head(delta_bias_in_dq=Interval(0.1, 0.001), dq_gain_error=Interval(0.0, 0.001)), False,
     r"^delta, read off dQ, is off by \+10\.00%"),
    ("gradients", of_one_head(dk_square_ratio=Interval(1.5, 0.1)), False, r"^mean square of dK 1\.5 times what"),
    ("contract", {"external": True}, True, "^$"),  # one that breaks it gives no result: `run_cell` answers
)  # fmt: skip
# What a claim may take a check's place in, and a result that the check would fail.
WAIVED = {
    "bound": measured(error_over_bound=2.0),
    "range": measured(outside_values=2.0),
    "finite": LOST,
    "gradients": WRONG_GRADIENTS,
    "loss": LOST_LOSS,
}


def result(**fields: Any) -> Result:
    base: dict[str, Any] = {"measures": {}, "shown": Shown("bias"), "bound_of": "p"}
    return Result(**base | fields)


def ask(name: str, fields: Mapping[str, Any]) -> Answer | None:
    return checks()[name].ask(result(**fields))


def test_no_check_is_met_by_measures_that_are_no_numbers() -> None:
    names = [name for kind in kinds().values() for name in kind.measured]
    for value in NO_NUMBERS:
        answers = ask_all(result(measures=dict.fromkeys(names, value)))
        assert {"bound", "finite", "loss"} <= answers.keys()
        assert not any(answer.passed for answer in answers.values()), answers


def test_those_that_are_looked_at_here_are_checks() -> None:
    elsewhere = {RUNS, IN_TIME, "repeatable", "usage", "invariance"}
    assert set(checks()) == {name for name, *_ in ANSWERS} | elsewhere
    assert ask_all(result()) == {}
    assert ask("gradients", measured(gradients_nonfinite=None, gradient_error_over_bound=None)) is None


@pytest.mark.parametrize(("name", "fields", "passed", "why"), ANSWERS)
def test_a_check_alone_answers_and_says_why(name: str, fields: dict[str, Any], passed: bool | None, why: str) -> None:
    ((asked, answer),) = ask_all(result(**fields)).items()
    assert (asked, answer.passed) == (name, passed)
    assert re.search(why, answer.why), answer.why
    assert answer.asked


@pytest.mark.parametrize("name", WAIVED)
def test_a_claim_that_waives_a_check_takes_its_place_whether_it_is_met_or_not(name: str) -> None:
    for passed in (True, False, None):
        assert ask(name, WAIVED[name] | {"claims": (claimed(passed, "harm", name),)}) is None
        other = ask(name, WAIVED[name] | {"claims": (claimed(passed, "harm", "another"),)})
        assert other is not None
        assert other.passed is False


def test_claims_of_cases_waive_these_and_no_other() -> None:
    expectations = {claim.expectation for case in EVERY for claim in case.claims}
    claims = [claim for snippet in SNIPPETS.values() for claim in snippet.claims]
    waived = [*(expectation.waives for expectation in expectations), *(claim.waives for claim in claims)]
    assert frozenset[str]().union(*waived) == set(WAIVED)


def test_whether_a_bias_lies_beyond_the_margin_is_no_check() -> None:
    """Neither answer would fail a kernel of which nothing is claimed."""
    undecided = result(external=True, verdict="undecided", measures={"bias": Interval(0.05, 0.004)})
    assert all(answer.passed for answer in ask_all(undecided).values())


def test_a_claim_is_told_with_its_sources() -> None:
    answer = ask("claim", {"claims": (claimed(True), claimed(True, "small"), claimed(True))})
    assert answer is not None
    assert (answer.asked, answer.source) == ("unbiased, small, unbiased", "who says unbiased; who says small")


def test_accuracy_claim_prediction_and_invariance_are_about_the_rounding() -> None:
    assert judging() == {"accuracy", "claim", "prediction", "invariance"}


@pytest.mark.parametrize(
    ("answers", "outcome"),
    [
        ({}, MEASURED),
        ({"bound": True, "finite": True, "contract": True}, MEASURED),
        ({"prediction": True, "bound": True}, PASSED),
        ({"claim": False, "prediction": True}, FAILED),
        ({"claim": True, "bound": False}, FAILED),
        ({"claim": None, "bound": False}, FAILED),
        ({"claim": None, "prediction": True, "bound": True}, UNDECIDED),
        ({"bound": None, "claim": True}, UNDECIDED),
        ({RUNS: False, "claim": False}, CRASHED),
        ({IN_TIME: False, "claim": True}, TIMED_OUT),
        ({RUNS: True, IN_TIME: True, "claim": True}, PASSED),
    ],
    ids=str,
)
def test_an_outcome_follows_from_the_answers(answers: Mapping[str, bool | None], outcome: str) -> None:
    given = {name: Answer(passed, "asked", "" if passed else "why") for name, passed in answers.items()}
    assert outcome_of(given, judging()) == outcome
