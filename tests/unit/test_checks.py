"""Every check: what it is asked of, when it is met, and what an outcome follows from."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import Interval
from tiebreak.matrix.checks import ask_all, checks, judging
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.result import Claimed, Predicted, Result
from tiebreak.reports.records.record import (
    CRASHED,
    FELL,
    HELD,
    IN_TIME,
    INCONCLUSIVE,
    MEASURED,
    RUNS,
    TIMED_OUT,
    Answer,
    Shown,
    outcome_of,
)

FINITE = {"nonfinite": 0.0, "missed": 0.0, "elements": 64.0}
STEPS = {"finite_steps": 4.0, "steps": 4.0}
NO_NUMBERS = (None, math.nan, Interval(math.nan, math.inf))


def claimed(met: bool | None, asked: str = "unbiased", *waives: str) -> Claimed:
    return Claimed(asked, f"who says {asked}", met, f"bias of {asked}", frozenset(waives))


def measured(**measures: Any) -> dict[str, Any]:
    return {"measures": measures}


@dataclass(frozen=True)
class Question:
    """What a check is to answer: results as the fields that differ from a result of nothing."""

    met: list[dict[str, Any]]
    fell: list[tuple[dict[str, Any], str]]  # with a pattern of why
    untold: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    not_asked: list[dict[str, Any]] = field(default_factory=list)  # beside a result of nothing


def at_most_one(measure: str, words: str) -> Question:
    """A check that a measure is at most 1."""
    return Question(
        met=[measured(**{measure: value}) for value in (0.0, 1.0, Interval(1.0, 9.0))],
        fell=[
            (measured(**{measure: math.nextafter(1.0, 2.0)}), words.format("1")),
            (measured(**{measure: math.inf}), words.format("inf")),
            (measured(**{measure: math.nan}), f"^there is no number for {measure}$"),
        ],
    )


CHECKS: Mapping[str, Question] = {
    "bound": at_most_one("error_over_bound", "^largest error is {} times the bound of plan p$"),
    "range": at_most_one("outside_values", "lies outside its range by {} times what rounding allows$"),
    "finite": Question(
        met=[measured(**FINITE)],
        fell=[
            (measured(**FINITE | {"nonfinite": 1.0}), "^1 of 64 elements are NaN or Inf, the reference is not$"),
            (measured(**FINITE | {"nonfinite": 1.0, "missed": 2.0}), "^1 of 64 .*; 2 elements are finite where .*"),
        ],
    ),
    "loss": Question(
        met=[measured(**STEPS)],
        fell=[
            (measured(**STEPS | {"finite_steps": 2.0}), "^the loss is not a number at step 3 of 4$"),
        ],
    ),
    "claim": Question(
        met=[{"claims": (claimed(True),)}, {"claims": (claimed(True), claimed(True, "small"))}],
        fell=[
            (
                {"claims": (claimed(None), claimed(False, "small"))},
                r"^claim fell: small \(who says small\); bias of small$",
            ),
        ],
        untold=[
            (
                {"claims": (claimed(True), claimed(None, "small")), "heads": 8, "remedy": "more"},
                r"^8 heads do not settle the claim: small \(who says small\); bias of small; more$",
            )
        ],
    ),
    "prediction": Question(
        met=[{"prediction": Predicted("flash@fused", True, "found")}],
        fell=[({"prediction": Predicted("flash@fused", False, "found")}, "^not what flash@fused predicts: found$")],
        untold=[
            (
                {"prediction": Predicted("flash@fused", None, "found"), "heads": 8, "remedy": "more"},
                "^8 heads do not settle whether it is what flash@fused predicts: found; more$",
            )
        ],
    ),
    "gradients": Question(
        met=[measured(gradients_nonfinite=0.0, gradient_error_over_bound=share) for share in (0.0, 1.0)],
        fell=[
            (
                measured(gradients_nonfinite=3.0, gradient_error_over_bound=0.5),
                "^3 elements of dQ, dK and dV are NaN or Inf, the reference's are not$",
            ),
            (
                measured(gradients_nonfinite=0.0, gradient_error_over_bound=1.5),
                r"^the largest error of dQ, dK and dV is 1\.5 times its bound$",
            ),
            (measured(gradients_nonfinite=0.0, gradient_error_over_bound=math.nan), "^there is no number for "),
        ],
        not_asked=[measured(gradients_nonfinite=None, gradient_error_over_bound=None)],
    ),
    "repeatable": Question(
        met=[{"repeatable": True}],
        fell=[({"repeatable": False}, "^not repeatable: two runs on the same input differ in bits$")],
    ),
    # One that breaks it gives no result to ask: `run_cell` answers, see below.
    "contract": Question(met=[{"contract": True}], fell=[]),
}
# What a claim may take a check's place in, and a result that the check would not be met by.
WAIVED = {
    "bound": measured(error_over_bound=2.0),
    "range": measured(outside_values=2.0),
    "finite": measured(**FINITE | {"nonfinite": 1.0}),
    "gradients": measured(gradients_nonfinite=3.0, gradient_error_over_bound=2.0),
    "loss": measured(**STEPS | {"finite_steps": 2.0}),
}


def result(**fields: Any) -> Result:
    base: dict[str, Any] = {"measures": {}, "shown": Shown("bias"), "bound_of": "p"}
    return Result(**base | fields)


def ask(name: str, fields: Mapping[str, Any]) -> Answer | None:
    return checks()[name].ask(result(**fields))


def test_no_check_is_met_by_measures_that_are_no_numbers() -> None:
    names = [name for kind in kinds().values() for name in kind.measures()]
    for value in NO_NUMBERS:
        answers = ask_all(result(measures=dict.fromkeys(names, value)))
        assert {"bound", "finite", "loss"} <= answers.keys()
        assert not any(answer.met for answer in answers.values()), answers


def test_those_that_are_looked_at_below_are_checks() -> None:
    elsewhere = {RUNS, IN_TIME, "accuracy", "decided", "usage", "invariance"}
    assert set(checks()) == CHECKS.keys() | elsewhere
    assert ask_all(result()) == {}


@pytest.mark.parametrize("name", CHECKS)
def test_it_is_met_falls_or_does_not_tell_and_says_why(name: str) -> None:
    question = CHECKS[name]
    met = [(fields, "^$") for fields in question.met]
    for expected, asked in ((True, met), (False, question.fell), (None, question.untold)):
        for fields, why in asked:
            answer = ask(name, fields)
            assert answer is not None, fields
            assert answer.met is expected, fields
            assert re.search(why, answer.why), answer.why
            assert answer.asked
    for fields in question.not_asked:
        assert ask(name, fields) is None, fields


@pytest.mark.parametrize("name", CHECKS)
def test_it_is_alone_in_asking_for_what_it_asks(name: str) -> None:
    for fields in CHECKS[name].met:
        assert set(ask_all(result(**fields))) == {name}


@pytest.mark.parametrize("name", WAIVED)
def test_a_claim_that_waives_a_check_takes_its_place_whether_it_is_met_or_not(name: str) -> None:
    for met in (True, False, None):
        assert ask(name, WAIVED[name] | {"claims": (claimed(met, "harm", name),)}) is None
        other = ask(name, WAIVED[name] | {"claims": (claimed(met, "harm", "another"),)})
        assert other is not None
        assert other.met is False


def test_claims_of_cases_waive_these_and_no_other() -> None:
    expectations = {claim.expectation for case in SCRIPTED for claim in case.claims}
    claims = [claim for snippet in SNIPPETS.values() for claim in snippet.claims]
    waived = [*(expectation.waives for expectation in expectations), *(claim.waives for claim in claims)]
    assert frozenset[str]().union(*waived) == set(WAIVED)


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
        ({"prediction": True, "bound": True}, HELD),
        ({"claim": False, "prediction": True}, FELL),
        ({"claim": True, "bound": False}, FELL),
        ({"claim": None, "bound": False}, FELL),
        ({"claim": None, "prediction": True, "bound": True}, INCONCLUSIVE),
        ({"bound": None, "claim": True}, INCONCLUSIVE),
        ({RUNS: False, "claim": False}, CRASHED),
        ({IN_TIME: False, "claim": True}, TIMED_OUT),
        ({RUNS: True, IN_TIME: True, "claim": True}, HELD),
    ],
    ids=str,
)
def test_an_outcome_follows_from_the_answers(answers: Mapping[str, bool | None], outcome: str) -> None:
    given = {name: Answer(met, "asked", "" if met else "why") for name, met in answers.items()}
    assert outcome_of(given, judging()) == outcome
