"""What the terminal shows of a run."""

from dataclasses import replace

import pytest

from tiebreak.reports.records import (
    BIASED,
    CRASHED,
    FELL,
    HELD,
    INCONCLUSIVE,
    SKIPPED,
    TIMED_OUT,
    UNDECIDED,
    Estimate,
    MeasuresRecord,
    Record,
    Run,
)
from tiebreak.reports.tables import LEGEND, cell_text, fallen, summary, tables

MEASURES = MeasuresRecord(Estimate(0.2312, 0.01), 0.4, 1.0, 0.5, 1.0, Estimate(0.0, 0.1), 0, 0, 64)


def record(
    kernel: str = "flash@paper",
    case: str = "random",
    *,
    outcome: str = HELD,
    measures: MeasuresRecord | None = MEASURES,
) -> Record:
    name = f"cpu-{kernel}-{case}-bf16"
    reasons = () if outcome == HELD else (f"why {case}",)
    plain = Record(name, "cpu", kernel, case, 1, "bf16", 1, 256, HELD, reasons, f"pytest --cases {case}")
    return replace(plain, outcome=outcome, measures=measures)


@pytest.mark.parametrize(
    ("changes", "verdict", "text"),
    [
        ({}, BIASED, "+0.23 B"),
        ({}, UNDECIDED, "+0.23 ?"),
        ({}, "unbiased", "+0.23"),
        ({"bias": Estimate(-0.004, 0.1)}, "unbiased", "-0.00"),
        ({"bias": Estimate(None, None)}, None, "none"),
        ({"nonfinite": 3, "gain": 0.1}, "nonfinite", "NaN"),
        ({"gain": 0.281}, BIASED, "x0.28"),
        ({"gain": 0.002}, BIASED, "x0"),
        ({"gain": 0.89}, BIASED, "x0.89"),
        ({"gain": 0.91}, BIASED, "+0.23 B"),
    ],
)
def test_a_cell_says_its_bias_and_verdict(changes: dict[str, object], verdict: str | None, text: str) -> None:
    measures = replace(MEASURES, **changes)  # type: ignore[arg-type]
    assert cell_text(replace(record(measures=measures), verdict=verdict)) == text


@pytest.mark.parametrize(
    ("outcome", "text"), [(HELD, "+0.23"), (FELL, "!+0.23!"), (INCONCLUSIVE, "?+0.23?"), (SKIPPED, "skip")]
)
def test_a_cell_says_its_outcome(outcome: str, text: str) -> None:
    assert cell_text(record(outcome=outcome)) == text


@pytest.mark.parametrize(("outcome", "text"), [(CRASHED, "!crash!"), (TIMED_OUT, "!time!"), (SKIPPED, "skip")])
def test_a_cell_without_numbers(outcome: str, text: str) -> None:
    assert cell_text(record(outcome=outcome, measures=None)) == text


def test_kernels_stand_across_and_cases_down_in_their_order() -> None:
    shown = tables([record("b", "two"), record("a", "two"), record("b", "one")])
    lines = [line.split() for line in shown.splitlines() if line]
    assert lines[:2] == [["cpu,", "bf16"], ["case", "b", "a"]]
    assert lines[3:5] == [["two", "+0.23", "+0.23"], ["one", "+0.23", "missing"]]
    assert shown.endswith(LEGEND)


def test_a_wide_table_is_split() -> None:
    records = [record(f"kernel{number}") for number in range(10)]
    shown = tables(records, width=40)
    assert max(map(len, shown.removesuffix(LEGEND).splitlines())) <= 40
    assert all(f"kernel{number}" in shown for number in range(10))
    assert shown.count("case ") > 1


def test_no_records_no_table() -> None:
    assert tables([]) == ""


def test_every_cell_that_did_not_hold_is_listed_with_its_reason_and_its_command() -> None:
    bad = (FELL, CRASHED, INCONCLUSIVE, TIMED_OUT)
    shown = fallen([record(case=outcome, outcome=outcome) for outcome in (HELD, SKIPPED, *bad)])
    assert [line.strip() for line in shown.splitlines() if "why" in line] == [f"why {outcome}" for outcome in bad]
    assert shown.count("rerun: pytest --cases ") == len(bad)


def test_the_summary_counts_and_tells_why() -> None:
    run = Run(
        {},
        {},
        (
            record(),
            record(case="b", outcome=FELL),
            record(case="c", outcome=SKIPPED),
            record(case="c", outcome=SKIPPED),
        ),
        unavailable={"abacus": "its beads are stuck"},
        explanations={"cpu-mine": "follows paper"},
        complete=False,
    )
    assert summary(run).splitlines() == [
        "4 cells: 1 held, 1 fell, 2 skipped",
        "skipped (2) cpu-flash@paper: why c",
        "backend abacus did not run: its beads are stuck",
        "cpu-mine: follows paper",
        "INCOMPLETE: the run was interrupted; these are the cells that were done",
    ]
