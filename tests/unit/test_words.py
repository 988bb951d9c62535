"""docs/words.md names every outcome and verdict; each plan, shift rule, measure and check that it names exists."""

import re
from pathlib import Path

import pytest

from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.kernels.plans import PLANS
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiments import kinds
from tiebreak.reports.records.record import OUTCOMES, VERDICTS

pytestmark = pytest.mark.quick

WORDS = (Path(__file__).parents[2] / "docs" / "words.md").read_text(encoding="utf-8")


def section(heading: str) -> str:
    return WORDS.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def named(heading: str) -> set[str]:
    """The names in the first column of a section's first table."""
    table = section(heading).partition("\n| ")[2].partition("\n\n")[0]
    return {name for row in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", row.split(" | ")[0])}


@pytest.mark.parametrize(
    ("heading", "known"),
    [
        ("Rounding plans", set(PLANS)),
        ("Measures", {name for kind in kinds().values() for name in kind.measured}),
        ("Checks", set(checks())),
    ],
)
def test_names_are_some_that_there_are(heading: str, known: set[str]) -> None:
    assert named(heading) <= known
    assert set(re.findall(r"`(\w+)` \(", section("Shift rules"))) <= set(SHIFT_RULES)


def test_every_measure_of_a_training_claim_is_one_of_them() -> None:
    snippets = SNIPPETS.values()
    named = {claim.measure for each in snippets for claim in each.claims} | {each.headline for each in snippets}
    assert named <= kinds()["training"].measured.keys()


def test_every_outcome_and_verdict_has_a_row() -> None:
    assert named("Outcomes") == set(OUTCOMES)
    assert named("Verdicts") == set(VERDICTS)
