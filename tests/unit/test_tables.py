"""What the terminal shows of a run."""

import math
from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import record as made_up
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Answer, ExperimentRecord, Explanation, Record, Run, Shown
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as run_tables
from tiebreak.reports.tables.run import summary
from tiebreak.reports.tables.texts import LEGEND, cell_text, shown_text
from tiebreak.reports.terminal import runnable

pytestmark = pytest.mark.quick

SHOWN = Shown("bias", 0.23)
PASSING = {records.FAILED: False, records.CRASHED: False, records.TIMED_OUT: False, records.UNDECIDED: None}


def record(
    kernel: str = "flash@paper", case: str = "random", *, outcome: str = records.PASSED, shown: Shown | None = SHOWN
) -> Record:
    skipped = f"why {case}" if outcome == records.SKIPPED else None
    passed = PASSING.get(outcome, True)
    answers = {} if skipped else {records.CLAIM: Answer(passed, "unbiased", "" if passed else f"why {case}")}
    command = f"pytest --cases {case}"
    made = made_up(kernel, case, outcome=outcome, shown=shown, skipped=skipped, command=command)
    return replace(made, answers=answers)


def a_run(*records: Record, legends: dict[str, str] | None = None) -> Run:
    experiments = {name: ExperimentRecord(name, legend) for name, legend in (legends or {}).items()}
    return Run({}, {}, records, experiments=experiments)


def failures(records: Sequence[Record]) -> str:
    return "\n".join(run_tables.failures(records))


def tables(run: Run, width: int | None = 120) -> str:
    return grids.text(run_tables.tables(run), width=width)


@pytest.mark.parametrize(
    ("outcome", "text"),
    [
        (records.PASSED, "+0.23 ·"),
        (records.MEASURED, "+0.23"),
        (records.FAILED, "!+0.23!"),
        (records.UNDECIDED, "?+0.23?"),
        (records.SKIPPED, "skip"),
        (records.CRASHED, "!crash!"),
        (records.TIMED_OUT, "!time!"),
    ],
)
def test_a_cell_says_its_outcome(outcome: str, text: str) -> None:
    shown = SHOWN if text.strip("!?·( ") == "+0.23" else None
    assert cell_text(record(outcome=outcome, shown=shown)) == text


def test_an_excused_cell_stands_in_parentheses_and_one_that_broke_its_contract_shows_none() -> None:
    excused = replace(record(outcome=records.FAILED, shown=Shown(records.NONFINITE)), excused="known")
    assert cell_text(excused) == "(NaN)"
    assert cell_text(record(outcome=records.FAILED, shown=None)) == "!none!"


@pytest.mark.parametrize(
    ("shown", "text"),
    [
        (replace(SHOWN, verdict=records.BIASED), "+0.23 B"),
        (replace(SHOWN, verdict=records.UNDECIDED), "+0.23 ?"),
        (replace(SHOWN, verdict="unbiased"), "+0.23"),
        (Shown("rise", -0.00129, spec="+.1e"), "-1.3e-03"),
        (Shown("flips", 42.0, "flips", spec=".0f"), "42 flips"),
        (Shown(records.SHRUNK, 0.283), "x0.28"),
        (Shown(records.SHRUNK, 0.001), "x0"),
        (Shown(records.NO_NUMBER), "none"),
        (Shown.of("rise", math.inf), "NaN"),
    ],
)
def test_what_is_shown_is_written_as_it_says(shown: Shown, text: str) -> None:
    assert shown_text(shown) == text


def test_kernels_with_a_name_stand_before_composed_ones_and_cases_in_their_order() -> None:
    run = a_run(record("a@b", "two"), record("b", "two", outcome=records.MEASURED), record("a@b", "one"))
    shown = tables(run)
    lines = [line.split() for line in shown.splitlines() if line]
    assert lines[:3] == [["cpu,", "bf16"], ["case", "b", "a"], ["@b"]]
    assert lines[4:6] == [["two", "+0.23", "+0.23", "·"], ["one", "+0.23", "·"]]
    assert ["one", "not", "run", "+0.23", "·"] in [
        line.split() for line in tables(replace(run, not_run=("cpu-b-one-bf16",))).splitlines()
    ]
    assert shown.endswith(LEGEND)


def test_kinds_of_experiments_have_tables_and_legends_of_their_own() -> None:
    other = replace(record(shown=Shown("flips", 42.0, "flips", spec=".0f")), experiment="flips")
    shown = tables(a_run(record(), other, legends={"call": "a bias.", "flips": "what flipped."}))
    places = [shown.index(text) for text in ("+0.23 ·", "a bias.", "42 flips ·", "what flipped.", LEGEND)]
    assert places == sorted(places)
    assert shown.count("cpu, bf16") == 2


def test_every_cell_that_did_not_hold_is_listed_with_its_reason_and_its_command_and_what_is_excused_last() -> None:
    bad = (records.FAILED, records.CRASHED, records.UNDECIDED, records.TIMED_OUT)
    excused = replace(record(outcome=records.FAILED), excused="known: https://x")
    *shown, last = failures([excused, *(record(case=name, outcome=name) for name in records.OUTCOMES)]).splitlines()
    assert sorted(line.strip() for line in shown if "why" in line) == sorted(f"why {outcome}" for outcome in bad)
    assert sum(f"rerun: {runnable('pytest')} --cases " in line for line in shown) == len(bad)
    assert last == "excused cpu-flash@paper-random-bf16: known: https://x (why random)"


def crashed(case: str, why: str, kernel: str = "mine") -> Record:
    return replace(
        record(kernel, case, outcome=records.CRASHED, shown=None), answers={records.RUNS: Answer(False, "an end", why)}
    )


def test_cells_that_crashed_alike_are_one_entry_with_one_command() -> None:
    sizes = [crashed(f"case{at}", f"RuntimeError: {at} is no 64 (mine.py, line 5)") for at in range(5)]
    same = [crashed(f"same{at}", "ValueError: no") for at in range(2)]
    other = crashed("case0", "ValueError: no", "other")
    assert failures([*sizes, *same, other]).splitlines() == [
        "crashed cpu-mine-case0-bf16, cpu-mine-case1-bf16, cpu-mine-case2-bf16, and 2 more",
        "    RuntimeError: 0 is no 64 (mine.py, line 5)",
        "    so all 5, with other numbers",
        f"    rerun the first: {runnable('pytest')} --cases case0 -n 0",
        "crashed cpu-mine-same0-bf16, cpu-mine-same1-bf16",
        "    ValueError: no",
        f"    rerun the first: {runnable('pytest')} --cases same0 -n 0",
        "crashed cpu-other-case0-bf16",
        "    ValueError: no",
        f"    rerun: {runnable('pytest')} --cases case0 -n 0",
    ]


def test_in_brief_a_cell_that_failed_is_a_line_and_only_the_first_have_one() -> None:
    off = replace(record(case="off", outcome=records.FAILED), evidence={"off": {"dQ is off by 700 % of its size": 7.0}})
    alike, many = [crashed(f"case{at}", "ValueError: no") for at in range(2)], "abcdefgh"
    lines = run_tables.brief([record(), off, *alike, *(record(case=name, outcome=records.FAILED) for name in many)])
    assert lines[:3] == [
        "failed cpu-flash@paper-off-bf16: dQ is off by 700 % of its size",
        "crashed cpu-mine-case0-bf16, cpu-mine-case1-bf16: ValueError: no",
        "failed cpu-flash@paper-a-bf16: why a",
    ]
    assert lines[8:] == ["and 2 more"]


def test_the_summary_counts_and_tells_why() -> None:
    run = Run(
        {},
        {},
        (record(), *(record(case=name, outcome=name) for name in (records.FAILED, records.SKIPPED, records.TIMED_OUT))),
        not_run=("x", "y"),
        unavailable={"abacus": "its beads are stuck"},
        explanations={"cpu-mine": Explanation(records.FOLLOWS, ("paper",), 2, 0.9999)},
        complete=False,
    )
    assert summary(run).splitlines() == [
        "4 cells: 1 passed, 1 failed, 1 timed out, 1 skipped",
        "skipped (1) cpu-flash@paper: why skipped",
        "backend abacus did not run: its beads are stuck",
        "cpu-mine: follows paper (99.99 % of bits in 2 cells)",
        "INCOMPLETE: the run was interrupted; these are the cells that were done",
        "not run: 2 cells that never started",
    ]
