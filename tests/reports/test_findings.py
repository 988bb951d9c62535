"""The findings of a page: each sentence is a verdict's, or what records of several platforms come to side by side."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import failing, record, run, skip
from tiebreak.reports.page.findings import findings
from tiebreak.reports.records.record import CaseRecord, Estimate, Record, Run
from tiebreak.reports.verdict import verdicts

pytestmark = pytest.mark.quick

TIES = ("tie[k=2]", "tie[k=3]", "tie[k=4]", "tie[k=8]")
CASES = {name: CaseRecord("ties", failure=True, group="ties") for name in TIES} | {
    "random": CaseRecord("numbers", group="controls")
}


def told(*runs: Run) -> tuple[str, ...]:
    return tuple(findings(runs, [f"platform {number}" for number in range(1, len(runs) + 1)]))


def biased(kernel: str, cases: Sequence[str], bias: float = 0.2, **fields: Any) -> list[Record]:
    measures = {"bias": Estimate(bias, 0.01)}
    return [record(kernel, case, verdict="biased", measures=measures, plan=None, **fields) for case in cases]


@pytest.fixture
def fair() -> list[Record]:
    return [record("fair", case) for case in TIES]


def test_a_kernel_of_ones_own_has_all_that_its_verdict_says() -> None:
    cells = [*biased("mine", TIES[:2]), record("mine", TIES[2], plan=None)]
    own = run(*cells, cases=CASES, options={"kernel": "a.py:mine"})
    (verdict,) = verdicts(own)
    expected = [f"{finding.name}: {finding.text}" for finding in verdict.findings]
    assert list(told(own)) == expected
    assert "biased: tie[k=2] +0.20, tie[k=3] +0.20" in expected
    other = replace(own, records=tuple(replace(cell, kernel="yours") for cell in cells), run="b" * 32)
    assert "`yours` on cpu, biased: tie[k=2] +0.20, tie[k=3] +0.20 (platform 2)" in told(own, other)


def test_kernels_stand_by_severity_each_with_its_verdict(fair: list[Record]) -> None:
    nan = record("lost", TIES[0], verdict="nonfinite", measures={"bias": Estimate(None, None), "nonfinite": 7})
    odd = record("odd", "random")
    cells = run(*fair, odd, *biased("a", TIES[:2]), nan, failing("b", TIES[0], plan=None), cases=CASES)
    lines = told(cells)
    assert lines[0] == "`b` on cpu: FAIL: by claim on 1 input, unbiased on 1 of 1 failure input."
    assert lines[1] == "`a` on cpu: PASS: biased on 2 of 2 failure inputs."
    assert lines[2].startswith("`lost` on cpu: PASS: NaN or Inf on 1 of 1 failure input; declares flash@paper")
    assert lines[3] == "Fair, unbiased on every failure input: `fair` on cpu."
    assert lines[4] == "No failure input was run, and nothing is known of the bias, of `odd`."


def test_most_biased_come_first_then_those_named_for_a_plan_and_the_rest_share_a_sentence() -> None:
    names = {"mild": 1, "worst": 4, "flash@paper": 4, "worse": 3, "flash@fused": 2}
    lines = told(run(*(cell for name, count in names.items() for cell in biased(name, TIES[:count])), cases=CASES))
    assert [line.split("`")[1] for line in lines] == ["worst", "worse", "mild", "flash@paper"]
    assert lines[3] == "Biased, too: `flash@paper`, `flash@fused`."
    assert told(run(*biased("a`b`", TIES[:1]), cases=CASES))[0].startswith("`a'b'` on cpu: "), "no name ends its marks"


def test_platforms_that_differ_are_both_said(fair: list[Record]) -> None:
    first = run(*biased("a", TIES), *biased("a", TIES[:2], backend="emulation"), cases=CASES)
    second = run(*biased("a", TIES[:3]), record("a", TIES[3], plan=None), cases=CASES)
    assert told(first, second)[:3] == (
        "`a` on cpu: PASS: biased on 4 of 4 failure inputs (platform 1).",
        "`a` on cpu: PASS: biased on 3 of 4 failure inputs (platform 2).",
        "`a` on emulation: PASS: biased on 2 of 2 failure inputs (platform 1).",
    )
    one, other = run(*fair, cases=CASES), run(*fair[1:], *biased("fair", TIES[:1]), cases=CASES)
    assert any(line.startswith("Fair, ") for line in told(one))
    for order in ((one, other), (other, one)):
        assert not any(line.startswith("Fair, ") for line in told(*order)), "it is biased on one of them"


def test_what_did_not_run_is_said_and_an_interrupted_run_before_all_else() -> None:
    assert told(run(skip("a"), skip("b"))) == ("No cell ran: all were skipped.",)
    lines = told(run(record(), complete=False, not_run=("x", "y"), running=("z",)))
    assert lines[0] == "The run on `platform 1` was interrupted: 3 cells did not finish."


def test_platforms_are_compared_by_verdict_and_by_bits(fair: list[Record]) -> None:
    first = run(*fair, record("a", "random"), cases=CASES)
    other = replace(first, run="b", records=(*fair[:3], replace(fair[3], digest="f" * 16), record(
        "a", "random", verdict="biased", digest="e" * 16, measures={"bias": Estimate(0.2, 0.01)})))  # fmt: skip
    assert told(first, other)[-2:] == (
        "5 cells on 2 platforms: 3 agree to the bit, 1 agree in verdict, not in bits, "
        "1 disagree in verdict or outcome.",
        "Different in verdict or outcome: `a` on cpu (`random`).",
    )
    assert not any("agree" in line for line in told(first))


def test_what_was_assumed_and_what_did_not_run_come_last() -> None:
    assumed = {"interpreter": "as sm_90 (assumed; nothing ran on a GPU)"}
    lines = told(run(record(), platform={"assumed": assumed}, unavailable={"cuda": "no device"}))
    assert lines[-2:] == (
        "The backend `interpreter` computed as sm_90 (assumed; nothing ran on a GPU).",
        "The backend `cuda` did not run: no device.",
    )
