"""Excused failures: the file, what it excuses, and what pytest makes of that."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import failing, record, run, skip
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.expected import Excuses, Expected, check_used, of_baseline, read
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Answer, Record
from tiebreak.reports.tables.texts import plain_text

CHECKS = ("runs", "in_time", "claim", "repeatable")
ENTRY = '[[expected]]\ncells = "cpu-x-*"\ncheck = "claim"\nreason = "known"\n'


def entry(cells: str, check: str = "claim", reason: str = "known") -> Expected:
    return Expected(cells, check, reason, where="e.toml: expected[0]")


def test_entries_come_from_the_file_that_the_flag_names_or_from_the_nearest_pyproject(tmp_path: Path) -> None:
    path, project, deeper = tmp_path / "e.toml", tmp_path / "pyproject.toml", tmp_path / "a" / "b"
    path.write_text(ENTRY.replace("known", "  two\\nlines ") * 2, encoding="utf-8")
    entries = read(str(path), tmp_path, CHECKS)
    assert entries[0] == Expected("cpu-x-*", "claim", "two lines", where=f"{path}: expected[0]")
    assert entries[1].where == f"{path}: expected[1]"
    project.write_text(ENTRY.replace("[[expected]]", "[[tool.tiebreak.expected]]"))
    path.write_text("")
    assert read(str(path), tmp_path, CHECKS) == ()
    deeper.mkdir(parents=True)
    where = f"{project}: tool.tiebreak: expected[0]"
    assert read(None, deeper, CHECKS) == (Expected("cpu-x-*", "claim", "known", where=where),)
    project.write_text("[tool.other]\n")
    assert read(None, tmp_path, CHECKS) == ()
    project.write_text('[tool.tiebreak]\nexpected = "e.toml"\n')
    with pytest.raises(UsageError, match=r"pyproject\.toml: tool\.tiebreak\.expected: Expected `array`[^\n]*$"):
        read(None, tmp_path, CHECKS)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "--expected e.toml: No such file or directory"),
        ('x = "\udcff"', "--expected e.toml: 'utf-8' codec"),
        ("expected = 1", "e.toml: expected: Expected `array`"),
        ("[[excused]]", "e.toml: Object contains unknown field `excused`"),
        ('[[expected]]\ncells = "x"\nreason = "x"', "e.toml: expected[0]: Object missing required field `check`"),
        (ENTRY + ENTRY.replace("known", " \\t"), "e.toml: expected[1].reason: expected some text"),
        (ENTRY.replace("claim", "a\\nb"), "e.toml: expected[0].check: unknown check 'a\\nb': known are runs, in_"),
        (f"{ENTRY}expires = 2027-06-30T10:00:00", "e.toml: expected[0].expires: Expected `date | null`"),
        (f"{ENTRY}expires = 2020-01-01", "e.toml: expected[0].expires: 2020-01-01 has passed: remove the entry, o"),
    ],
)
def test_what_is_wrong_with_a_file_is_told_in_one_line_with_file_and_field(
    text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if text is not None:
        Path("e.toml").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UsageError) as refused:
        read("e.toml", tmp_path, CHECKS)
    assert str(refused.value).startswith(message)
    assert str(refused.value).isprintable()


def test_a_pattern_that_is_about_no_cell_is_refused() -> None:
    """But of a backend that is not here: it is for another machine."""
    cells = ["cpu-sdpa-tied[k=2]-bf16", "cpu-sdpa-random-bf16"]
    check_used([entry("cpu-sdpa-*"), entry("cpu-sdpa-tied[k=2]-bf16"), entry("*-random-*")], cells, {})
    check_used([entry("cuda-flex-*")], cells, {"cuda": "no GPU"})
    with pytest.raises(UsageError, match=r"^e\.toml: expected\[0\]\.cells: 'cpu-spda-\*' is about none of the 2"):
        check_used([entry("cpu-spda-*")], cells, {})


DIFFER = Answer(False, "the same bits", "they differ")
UNDECIDED_ANSWER = record(outcome="undecided", answers={"claim": Answer(None, "unbiased", "few heads")})
MINE = entry("cpu-flash@paper-*", reason="why not")
BEFORE = of_baseline(run(failing(), record(case="b")), Path("base.json"))


@pytest.mark.parametrize(
    ("excuses", "made", "why"),
    [
        # The named check of the named cells and no other.
        (Excuses([MINE]), failing(), "why not"),
        (Excuses([MINE]), failing("fair"), None),
        (Excuses([MINE]), failing(answers={"repeatable": DIFFER}), None),
        (Excuses([MINE, entry("*", "repeatable", "two")]), failing(answers={"repeatable": DIFFER}), "two; why not"),
        # What the data do not tell, and what crashed; what holds or was skipped is never excused.
        (Excuses([entry("*")]), UNDECIDED_ANSWER, "known"),
        (Excuses([entry("*")]), skip(outcome="crashed"), None),
        (Excuses([entry("*", "runs")]), skip(outcome="crashed"), "known"),
        (Excuses([entry("*")]), record(), None),
        (Excuses([entry("*")]), skip(), None),
        # A baseline excuses the checks that it does not meet.
        (Excuses((), BEFORE), failing(), "so it is in base.json"),
        (Excuses((), BEFORE), failing(case="b"), None),
        (Excuses((), BEFORE), failing(answers={"repeatable": DIFFER}), None),
    ],
)
def test_what_is_excused(excuses: Excuses, made: Record, why: str | None) -> None:
    excused = excuses.excuse(made)
    assert excused == replace(made, excused=why)
    assert why is None or excused.passes


def test_an_entry_that_excuses_nothing_is_stale() -> None:
    excuses, cell = Excuses([entry("cpu-flash@paper-*")]), "cpu-flash@paper-random-bf16"
    line = f"e.toml: expected[0]: no longer fails: {cell} meets the check claim: remove the entry"
    assert excuses.stale([record()], whole=True) == [line]
    assert "all 2 cells meet" in excuses.stale([record(), record(case="b")], whole=True)[0]
    # One fails; none is of its cells; it has not run; it was not asked.
    for cells in ([record(), failing(case="b")], [record("fair")], [skip()], [skip(outcome="crashed")]):
        assert excuses.stale(cells, whole=True) == []
    # Where a pattern holds may be what a part of a run leaves out; what names one cell is known.
    assert excuses.stale([record()], whole=False) == []
    assert Excuses([entry(cell)]).stale([record()], whole=False) == [line]
    assert Excuses((), BEFORE).stale([record()], whole=True) == [], "the gate says what is better"


KERNEL = """
import os
import torch

def mine(q, k, v, *, causal=False, scale=None):
    {body}
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).detach()
    mine.calls = getattr(mine, "calls", 0) + 1
    o.view(torch.int16)[0, 0, 0, 0] ^= mine.calls % {turns}
    return o
"""
CELL = "cpu-mine-contract_tile-bf16"
Pytest = Callable[..., pytest.RunResult]


@pytest.fixture
def restless(matrix: Pytest, pytester: pytest.Pytester) -> Pytest:
    """Runs one input with a kernel; if restless, its calls differ in one element's bits, which all bounds allow."""

    def run(*options: str, body: str = "", restless: bool = True, workers: int = 0) -> pytest.RunResult:
        # Of another length: bytecode of the same second and length would be taken for it.
        (pytester.path / "mine.py").write_text(KERNEL.format(body=body, turns=2 if restless else "1  "))
        words = ("--kernel", "mine.py:mine", "--cases", "contract_tile", "--heads", "16", "-n", str(workers))
        return matrix(*words, *options)

    return run


@pytest.fixture
def excuse(pytester: pytest.Pytester) -> Callable[..., str]:
    """Writes a file with one entry; its name."""

    def write(check: str = "repeatable", cells: str = CELL) -> str:
        text = f'[[expected]]\ncells = "{cells}"\ncheck = "{check}"\nreason = "https://bug/1"\n'
        (pytester.path / "e.toml").write_text(text)
        return "e.toml"

    return write


def record_of_last() -> Record:
    (record,) = store.read(Path("out/last.json")).records
    return record


def test_a_known_failure_is_green_and_told(restless: Pytest, excuse: Callable[..., str]) -> None:
    result = restless("--expected", excuse(), "--junitxml", "junit.xml", "-rx")
    assert result.ret == 0
    result.assert_outcomes(xfailed=1)
    record = record_of_last()
    assert (record.outcome, record.excused, record.passes) == ("failed", "https://bug/1", True)
    result.stdout.fnmatch_lines(
        [
            f"contract_tile* ({plain_text(record)})",
            f"excused {CELL}: https://bug/1 (not repeatable: *)",
            "1 cell: 1 excused",
            "XFAIL *https://bug/1",
        ]
    )
    result.stdout.no_fnmatch_line("*rerun: *")
    (case,) = ET.parse("junit.xml").getroot().iter("testcase")
    properties = {element.get("name"): element.get("value") for element in case.iter("property")}
    assert properties["tiebreak.repeatable_passed"] == "False"
    assert [element.get("type") for element in case.iter("skipped")] == ["pytest.xfail"]


def test_an_entry_that_is_not_needed_any_more_is_red(restless: Pytest, excuse: Callable[..., str]) -> None:
    result = restless("--expected", excuse(), restless=False)
    assert result.ret == 1
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines([f"e.toml: expected[[]0]: no longer fails: {CELL} meets the check repeatable: *"])


def test_a_wrong_entry_is_refused_before_any_work_and_one_without_a_cell_in_a_whole_run(
    restless: Pytest, matrix: Pytest, excuse: Callable[..., str]
) -> None:
    wrong = restless("--expected", excuse(check="clime")), "check: unknown check 'clime': known are runs, in_time, "
    unused = matrix("--expected", excuse(cells="cpu-spda*")), "cells: 'cpu-spda*' is about none of the "
    for result, message in (wrong, unused):
        assert result.ret == 2
        (line,) = filter(None, (*result.outlines, *result.errlines))
        assert line.startswith(f"Exit: e.toml: expected[0].{message}")
        assert not Path("out").exists()


def test_a_kernel_that_takes_its_worker_with_it_can_be_excused_in_pyproject(
    restless: Pytest, excuse: Callable[..., str]
) -> None:
    excuse("runs")
    Path("pyproject.toml").write_text(Path("e.toml").read_text().replace("[[expected", "[[tool.tiebreak.expected"))
    result = restless("--max-worker-restart", "0", body="os._exit(3)", workers=1)
    assert result.ret == 0
    record = record_of_last()
    assert (record.outcome, record.excused) == ("crashed", "https://bug/1")
    result.stdout.fnmatch_lines(["contract_tile* (crash)", "1 cell: 1 excused"])


def test_a_baseline_that_has_the_failure_excuses_it(restless: Pytest) -> None:
    assert restless("--baseline", "base.json", "--update-baseline").ret == 1
    result = restless("--baseline", "base.json")
    assert result.ret == 0
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(["gate passed: 1 cell compared with base.json: 0 regressions, 0 better"])
    assert record_of_last().excused == "so it is in base.json"
    better = restless("--baseline", "base.json", restless=False)
    assert better.ret == 0
    better.stdout.fnmatch_lines([f"better      {CELL}: *repeatable passes now*"])


def test_an_entry_excuses_nothing_from_the_gate_and_a_damaged_baseline_excuses_nothing(
    restless: Pytest, excuse: Callable[..., str]
) -> None:
    kept = Path("base.json")
    assert restless("--baseline", "base.json", "--update-baseline", restless=False).ret == 0
    result = restless("--baseline", "base.json", "--expected", excuse())
    assert result.ret == 1
    result.assert_outcomes(xfailed=1)
    result.stdout.fnmatch_lines(
        ["gate FAILED: 1 cell compared with base.json: * regression*", "regression *: failed, measured in*"]
    )
    run = store.read(kept)
    not_passed = {**run.records[0].answers, "repeatable": DIFFER}
    store.write(replace(run, records=(replace(run.records[0], answers=not_passed),)), kept)
    damaged = restless("--baseline", "base.json")
    (line,) = filter(None, (*damaged.outlines, *damaged.errlines))
    assert (damaged.ret, line.startswith(f"Exit: --baseline base.json: {CELL}: says ")) == (2, True)
    assert restless("--baseline", "base.json", "--update-baseline").ret == 1, "it excuses nothing"
