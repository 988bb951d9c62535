"""The audit of every kernel for every GPU, held against the committed expectation.

After a change that was meant: tiebreak audit --expect reports/baselines/audit.json --update
"""

from pathlib import Path

import pytest

from tiebreak.programs.audit import compiling
from tiebreak.programs.audit.command import audited
from tiebreak.programs.audit.compiling import compiler
from tiebreak.programs.audit.sources import sources
from tiebreak.programs.audit.targets import TARGETS
from tiebreak.reports.audit import differences, read

if (reason := compiling.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

EXPECTED = Path(__file__).parents[2] / "reports" / "baselines" / "audit.json"
SLOWEST_FIRST = sorted(TARGETS, key=lambda name: TARGETS[name].backend != "hip")


@pytest.mark.parametrize("target", SLOWEST_FIRST)
def test_what_rounds_is_as_expected(target: str) -> None:
    expected = read(EXPECTED)
    found = list(audited([TARGETS[target]], list(sources())))
    assert any(audit.skipped is None for audit in found)
    lines = differences([audit for audit in expected.audits if audit.target == target], found)
    assert lines == [], f"expected of triton {expected.triton}, this is {compiler()}"


def test_the_expectation_knows_the_same_targets() -> None:
    expected = read(EXPECTED)
    assert {audit.target for audit in expected.audits} == set(TARGETS)
    assert expected.cards == {name: target.cards for name, target in TARGETS.items()}
