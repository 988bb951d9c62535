"""docs/words.md names every plan, shift rule, measure and outcome that there is, and no other."""

import re
from collections.abc import Iterable
from pathlib import Path

import pytest

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import PLANS
from tiebreak.kernels.roster import DEFAULT_ROSTER, composed_kernel
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.triton.roster import DECLARATIONS
from tiebreak.matrix.experiments import kinds
from tiebreak.reports.records.record import OUTCOMES, VERDICTS

WORDS = (Path(__file__).parents[2] / "docs" / "words.md").read_text(encoding="utf-8")
NAME = re.compile(r'<a id="(plan|rule|measure|check|outcome)-([^"]+)"></a>`([^`]+)`')  # a row may have several
ROUNDED = "_l_rounded"  # a training plan's suffix, told in the text below the table


def rows(kind: str) -> list[str]:
    """The names that have a row of one kind."""
    return [name for each, _, name in NAME.findall(WORDS) if each == kind]


def section(heading: str) -> str:
    return WORDS.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def listed(error: pytest.ExceptionInfo[ValueError], after: str) -> set[str]:
    """The names that a message lists behind some words."""
    return set(str(error.value).split(after)[1].split(", "))


def declared(kernels: Iterable[Kernel]) -> set[str]:
    return {kernel.declaration.plan.name for kernel in kernels if kernel.declaration is not None}


def trained() -> set[str]:
    """The plans of the training variants."""
    parts = (part for each in VARIANTS.values() for part in (each.scripted, each.before, each.head))
    return {part.plan.name for part in parts if isinstance(part, Declaration)}


def known_plans() -> set[str]:
    with pytest.raises(ValueError, match="unknown kernel") as composed:
        composed_kernel("?")
    return {
        *listed(composed, "and plans "),
        *PLANS,
        *declared(map(composed_kernel, DEFAULT_ROSTER)),
        *declared((*EMULATION.kernels(), *CPU.kernels())),
        *(declaration.plan.name for declaration in DECLARATIONS.values()),
    }


def test_every_plan_has_a_row() -> None:
    assert known_plans() - set(rows("plan")) == set()


def test_every_plan_of_a_training_run_has_a_row() -> None:
    assert {name.removesuffix(ROUNDED) for name in trained()} - set(rows("plan")) == set()
    assert f"`{ROUNDED}`" in section("Rounding plans")


def test_no_row_names_a_plan_that_does_not_exist() -> None:
    # Which plan PyTorch's CPU flash kernel follows is its build's choice.
    assert set(rows("plan")) - known_plans() - trained() <= {"fused_fast_exp"}


def test_rows_of_shift_rules_are_the_shift_rules() -> None:
    assert set(rows("rule")) == set(SHIFT_RULES)


def test_every_rule_of_the_default_roster_has_a_row() -> None:
    kernels = [composed_kernel(name) for name in DEFAULT_ROSTER]
    rules = {kernel.declaration.shift_rule.name for kernel in kernels if kernel.declaration is not None}
    assert rules <= set(rows("rule"))


def test_every_measure_of_a_training_claim_is_one_of_them() -> None:
    snippets = SNIPPETS.values()
    named = {claim.measure for each in snippets for claim in each.claims} | {each.headline for each in snippets}
    assert named <= set(kinds()["training"].measures())


def test_every_outcome_and_verdict_has_a_row() -> None:
    assert sorted(OUTCOMES) == sorted(rows("outcome"))
    for verdict in VERDICTS:
        assert f"\n| `{verdict}` | " in section("Verdicts")


def test_a_row_has_its_own_anchors_and_all_of_its_cells() -> None:
    named = NAME.findall(WORDS)
    assert all(anchor == name for _, anchor, name in named)
    assert len({(kind, name) for kind, _, name in named}) == len(named) == WORDS.count('<a id="')
    for line in WORDS.splitlines():
        if line.startswith('| <a id="'):
            _, names, sentence, _, rest = re.split(r"(?<!\\)\|", line)
            assert len(NAME.findall(names)) == names.count("<a id="), names
            assert sentence.rstrip().endswith("."), names
            assert not rest
