"""The audit held against the committed expectation: every kernel for one GPU, in turn.

All kernels for all GPUs, which takes minutes: tiebreak audit --expect reports/baselines/audit.json
After a change that was meant, the same with --update.
"""

from pathlib import Path

import pytest

from tiebreak.kernels.triton.loading import installed
from tiebreak.laboratory.audit import compiling
from tiebreak.laboratory.audit.command import audited
from tiebreak.laboratory.audit.compiling import TARGETS, sources
from tiebreak.laboratory.audit.records import Audits, differences
from tiebreak.reports.records import store

if (reason := compiling.unavailable()) is not None:
    pytest.skip(reason, allow_module_level=True)

EXPECTED = Path(__file__).parents[2] / "reports" / "baselines" / "audit.json"
# A kernel that rounds otherwise shows it on any GPU, a compiler that does on any kernel. AMD's GPUs, whose compiler is
# slow, have the turns of the smaller kernels.
TURNS = ("sm_90", "gfx950", "sm_89", "sm_100", "gfx942", "sm_120", "sm_80")
IN_TURN = {name: [compilation.name for compilation in sources()[turn :: len(TURNS)]] for turn, name in enumerate(TURNS)}


@pytest.mark.parametrize("target", IN_TURN)
def test_what_rounds_is_as_expected(target: str) -> None:
    expected = store.load(EXPECTED, Audits)
    if expected.triton != installed():
        pytest.skip(f"expected of triton {expected.triton}; this is {installed()}, which may compile otherwise")
    audits = list(
        audited([TARGETS[target]], [compilation for compilation in sources() if compilation.name in IN_TURN[target]])
    )
    assert any(audit.skipped is None for audit in audits)
    of_them = [audit for audit in expected.audits if audit.target == target and audit.kernel in IN_TURN[target]]
    assert differences(of_them, audits) == []


def test_the_expectation_knows_the_same_targets_and_kernels_of_which_each_has_its_turn() -> None:
    expected = store.load(EXPECTED, Audits)
    assert {(audit.target, audit.kernel) for audit in expected.audits} == {
        (target, compilation.name) for target in TARGETS for compilation in sources()
    }
    assert expected.cards == {name: target.cards for name, target in TARGETS.items()}
    assert set(IN_TURN) == set(TARGETS)
    assert all(IN_TURN.values())
