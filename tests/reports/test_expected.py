"""Excused failures: the file, what it excuses, and what pytest makes of that."""

import xml.etree.ElementTree as ET
from collections.abc import Callable
from datetime import date
from pathlib import Path

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import fallen, record, run, skip
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.expected import Excuses, check_used, of_baseline, read
from tiebreak.reports.gate.settings import Expected
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Answer, Record
from tiebreak.reports.tables.texts import plain_text

CHECKS = ("runs", "in_time", "claim", "repeatable")
ENTRY = '[[expected]]\ncells = "cpu-x-*"\ncheck = "claim"\nreason = "known"\n'


def entry(cells: str, check: str = "claim", reason: str = "known") -> Expected:
    return Expected(cells, check, reason, where="e.toml: expected[0]")


class TestTheFile:
    def test_entries_come_from_the_file_that_the_flag_names_or_from_the_nearest_pyproject(self, tmp_path: Path) -> None:
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

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            (None, "--expected e.toml: No such file or directory"),
            ('x = "\udcff"', "--expected e.toml: 'utf-8' codec"),
            ("expected = 1", "e.toml: expected: Expected `array`"),
            ("[[excused]]", "e.toml: Object contains unknown field `excused`"),
            ('[[expected]]\ncells = "x"\nreason = "x"', "e.toml: expected[0]: Object missing required field `check`"),
            (ENTRY + ENTRY.replace("known", " \\t"), "e.toml: expected[1].reason: expected some text"),
            (ENTRY.replace("claim", "clime"), "e.toml: expected[0].check: unknown check 'clime': known are runs, in_"),
            (ENTRY.replace("claim", "a\\nb"), "e.toml: expected[0].check: unknown check 'a\\nb'"),
            (f"{ENTRY}expires = 2027-06-30T10:00:00", "e.toml: expected[0].expires: Expected `date | null`"),
            (f"{ENTRY}expires = 2020-01-01", "e.toml: expected[0].expires: 2020-01-01 has passed: remove the entry, o"),
        ],
    )
    def test_what_is_wrong_is_told_in_one_line_with_file_and_field(
        self, text: str | None, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        if text is not None:
            Path("e.toml").write_text(text, encoding="utf-8", errors="surrogateescape")
        with pytest.raises(UsageError) as refused:
            read("e.toml", tmp_path, CHECKS)
        assert str(refused.value).startswith(message)
        assert str(refused.value).isprintable()

    def test_an_entry_holds_to_the_end_of_its_last_day(self, tmp_path: Path) -> None:
        path = tmp_path / "e.toml"
        path.write_text(f"{ENTRY}expires = 2027-06-30\n")
        assert read(str(path), tmp_path, CHECKS, date(2027, 6, 30))[0].expires == date(2027, 6, 30)
        with pytest.raises(UsageError, match="2027-06-30 has passed"):
            read(str(path), tmp_path, CHECKS, date(2027, 7, 1))

    def test_a_wrong_kind_in_pyproject_is_told(self, tmp_path: Path) -> None:
        (tmp_path / "pyproject.toml").write_text('[tool.tiebreak]\nexpected = "e.toml"\n')
        with pytest.raises(UsageError, match=r"pyproject\.toml: tool\.tiebreak\.expected: Expected `array`[^\n]*$"):
            read(None, tmp_path, CHECKS)

    def test_a_pattern_that_is_about_no_cell_is_refused(self) -> None:
        """But of a backend that is not here: it is for another machine."""
        cells = ["cpu-sdpa-tied[k=2]-bf16", "cpu-sdpa-random-bf16"]
        check_used([entry("cpu-sdpa-*"), entry("cpu-sdpa-tied[k=2]-bf16"), entry("*-random-*")], cells, {})
        check_used([entry("cuda-flex-*")], cells, {"cuda": "no GPU"})
        with pytest.raises(UsageError, match=r"^e\.toml: expected\[0\]\.cells: 'cpu-spda-\*' is about none of the 2"):
            check_used([entry("cpu-spda-*")], cells, {})


class TestWhatIsExcused:
    def test_the_named_check_of_the_named_cells_and_no_other(self) -> None:
        excuses = Excuses([entry("cpu-flash@paper-*", reason="why not")])
        record = fallen()
        assert excuses.excuse(record) == replace(record, excused="why not")
        assert excuses.excuse(record).passes
        both = fallen(answers={"repeatable": Answer(False, "the same bits", "they differ")})
        for other in (fallen("fair"), both):
            assert excuses.excuse(other) is other
        assert Excuses([entry("*", reason="one"), entry("*", "repeatable", "two")]).excuse(both).excused == "two; one"

    def test_what_the_data_do_not_tell_and_what_crashed(self) -> None:
        untold = record(outcome="inconclusive", answers={"claim": Answer(None, "unbiased", "few heads")})
        assert Excuses([entry("*")]).excuse(untold).excused == "known"
        crashed = skip(outcome="crashed")
        assert Excuses([entry("*")]).excuse(crashed).excused is None
        assert Excuses([entry("*", "runs")]).excuse(crashed).excused == "known"

    def test_what_holds_and_what_is_skipped_is_never_excused(self) -> None:
        for cell in (record(), skip()):
            assert Excuses([entry("*")]).excuse(cell) is cell

    def test_an_entry_that_excuses_nothing_is_stale(self) -> None:
        excuses, cell = Excuses([entry("cpu-flash@paper-*")]), "cpu-flash@paper-random-bf16"
        assert excuses.stale([record()], whole=True) == [
            f"e.toml: expected[0]: no longer fails: {cell} meets the check claim: remove the entry"
        ]
        assert "all 2 cells meet" in excuses.stale([record(), record(case="b")], whole=True)[0]
        assert excuses.stale([record(), fallen(case="b")], whole=True) == []
        assert excuses.stale([record("fair")], whole=True) == []
        assert excuses.stale([skip()], whole=True) == [], "it has not run"
        assert excuses.stale([skip(outcome="crashed")], whole=True) == [], "it was not asked"

    def test_in_a_part_of_a_run_a_pattern_is_not_called_stale(self) -> None:
        """Where it holds may be what the run leaves out; what names one cell is known."""
        assert Excuses([entry("cpu-flash@paper-*")]).stale([record()], whole=False) == []
        assert Excuses([entry("cpu-flash@paper-random-bf16")]).stale([record()], whole=False)

    def test_a_baseline_excuses_the_checks_that_it_does_not_meet(self) -> None:
        before = of_baseline(run(fallen(), record(case="b")), Path("base.json"))
        excuses = Excuses((), before)
        assert excuses.excuse(fallen()).excused == "so it is in base.json"
        assert excuses.excuse(fallen(case="b")).excused is None
        worse = fallen(answers={"repeatable": Answer(False, "the same bits", "they differ")})
        assert excuses.excuse(worse).excused is None
        assert excuses.stale([record()], whole=True) == [], "the gate says what is better"


KERNEL = """
import os
import torch

def mine(q, k, v, *, causal=False, scale=None):
    {body}
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""
# Every call gives other bits in one element, which every bound allows: the check repeatable alone is not met.
RESTLESS = """o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).detach()
    mine.calls = getattr(mine, "calls", 0) + 1
    o.view(torch.int16)[0, 0, 0, 0] ^= mine.calls % 2
    return o"""
CELL = "cpu-mine-random-bf16"
Pytest = Callable[..., pytest.RunResult]


@pytest.fixture
def restless(matrix: Pytest, pytester: pytest.Pytester) -> Pytest:
    """Runs a restless kernel, or one with another body, on one input."""

    def run(*options: str, body: str = RESTLESS, cases: str = "random", workers: int = 0) -> pytest.RunResult:
        (pytester.path / "mine.py").write_text(KERNEL.format(body=body))
        words = ("--kernel", "mine.py:mine", "--cases", cases, "--heads", "16", "-n", str(workers), *options)
        return matrix(*words)

    return run


@pytest.fixture
def excuse(pytester: pytest.Pytester) -> Callable[..., str]:
    """Writes a file with one entry; its name."""

    def write(check: str = "repeatable", cells: str = CELL, reason: str = "https://bug/1", name: str = "e.toml") -> str:
        text = f'[[expected]]\ncells = "{cells}"\ncheck = "{check}"\nreason = "{reason}"\n'
        (pytester.path / name).write_text(text)
        return name

    return write


def record_of(name: str = "last") -> Record:
    (record,) = store.read(Path("out") / f"{name}.json").records
    return record


class TestUnderPytest:
    def test_a_known_failure_is_green_and_told(self, restless: Pytest, excuse: Callable[..., str]) -> None:
        result = restless("--expected", excuse(), "--junitxml", "junit.xml", "-rx")
        assert result.ret == 0
        result.assert_outcomes(xfailed=1)
        record = record_of()
        assert (record.outcome, record.excused, record.passes) == ("fell", "https://bug/1", True)
        result.stdout.fnmatch_lines(
            [
                f"random* ({plain_text(record)})",
                f"excused {CELL}: https://bug/1 (not repeatable: *)",
                "1 cell: 1 excused",
                "XFAIL *https://bug/1",
            ]
        )
        result.stdout.no_fnmatch_line("*rerun: *")
        (case,) = ET.parse("junit.xml").getroot().iter("testcase")
        assert {element.get("name"): element.get("value") for element in case.iter("property")}[
            "tiebreak.repeatable_met"
        ] == "False"
        assert [element.get("type") for element in case.iter("skipped")] == ["pytest.xfail"]

    def test_an_entry_that_is_not_needed_any_more_is_red(self, restless: Pytest, excuse: Callable[..., str]) -> None:
        result = restless("--expected", excuse(), body="")
        assert result.ret == 1
        result.assert_outcomes(passed=1)
        result.stdout.fnmatch_lines([f"e.toml: expected[[]0]: no longer fails: {CELL} meets the check repeatable: *"])

    def test_a_wrong_entry_is_refused_before_any_work_and_one_without_a_cell_in_a_whole_run(
        self, restless: Pytest, matrix: Pytest, excuse: Callable[..., str]
    ) -> None:
        message = "e.toml: expected[0].check: unknown check 'clime': known are runs, in_time, "
        refused(restless("--expected", excuse(check="clime")), message)
        message = "e.toml: expected[0].cells: 'cpu-spda*' is about none of the "
        refused(matrix("--expected", excuse(cells="cpu-spda*")), message)

    def test_a_kernel_that_takes_its_worker_with_it_can_be_excused_in_pyproject(
        self, restless: Pytest, excuse: Callable[..., str]
    ) -> None:
        excuse("runs")
        Path("pyproject.toml").write_text(Path("e.toml").read_text().replace("[[expected", "[[tool.tiebreak.expected"))
        result = restless(body="os._exit(3)", workers=1)
        assert result.ret == 0
        record = record_of()
        assert (record.outcome, record.excused) == ("crashed", "https://bug/1")
        result.stdout.fnmatch_lines(["random* (crash)", "1 cell: 1 excused"])

    def test_a_baseline_that_has_the_failure_excuses_it(self, restless: Pytest) -> None:
        assert restless("--baseline", "base.json", "--update-baseline").ret == 1
        result = restless("--baseline", "base.json")
        assert result.ret == 0
        result.assert_outcomes(xfailed=1)
        result.stdout.fnmatch_lines(["gate held: 1 cell compared with base.json: 0 worse, 0 better"])
        assert record_of().excused == "so it is in base.json"
        better = restless("--baseline", "base.json", body="")
        assert better.ret == 0
        better.stdout.fnmatch_lines([f"better  {CELL}: *repeatable is met now*"])

    def test_a_baseline_that_holds_is_not_talked_over_by_an_entry(
        self, restless: Pytest, excuse: Callable[..., str]
    ) -> None:
        assert restless("--baseline", "base.json", "--update-baseline", body="").ret == 0
        assert restless("--baseline", "base.json", "--expected", excuse()).ret == 1


def refused(result: pytest.RunResult, message: str) -> None:
    """With exit code 2, in one line, before anything was written."""
    assert result.ret == 2
    lines = [line for line in (*result.outlines, *result.errlines) if line]
    assert len(lines) == 1
    assert lines[0].startswith(f"Exit: {message}")
    assert not Path("out").exists()
