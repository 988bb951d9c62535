"""`tiebreak check`, and `pytest --kernel` in a repository that has tests of its own."""

import argparse
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import torch
from msgspec.structs import replace

import tiebreak
from tiebreak.matrix.plugin import faster_alone
from tiebreak.programs import check, forked
from tiebreak.reports import cli, verdict
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.record import (
    AMBIGUOUS,
    BEHAVES_LIKE,
    BIASED,
    CRASHED,
    FELL,
    FOLLOWS,
    IN_TIME,
    INCONCLUSIVE,
    NO_TIME,
    NONFINITE,
    PREDICTION,
    RUNS,
    SKIPPED,
    TIMED_OUT,
    UNBIASED,
    UNDECIDED,
    UNEXPLAINED,
    Answer,
    CaseRecord,
    CheckRecord,
    ExperimentRecord,
    Explanation,
    MeasureRecord,
    PlanRecord,
    Record,
    Run,
    Shown,
)
from tiebreak.reports.schemas import schema_of
from tiebreak.reports.verdict import verdicts

KERNEL = """
import torch

def attention(q, k, v, *, causal=False, scale=None):
    p = torch.exp(q.float() @ k.float().mT * scale - (q.float() @ k.float().mT * scale).amax(-1, keepdim=True))
    return ((p.to(v.dtype) @ v) / p.sum(-1, keepdim=True)).to(q.dtype)
"""
BIASED_ON_ONE = "attention on cpu, bf16: biased on 1 of 1 failure input"
FEW = ("--cases", "tied_maxima[k=2],no_tail,random_grouped", "--heads", "64")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the user stands: nothing of a clone, and a pytest configuration that a run here must not meet."""
    (tmp_path / "mine.py").write_text(KERNEL)
    (tmp_path / "conftest.py").write_text("raise SystemExit('not for you')\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option-either")
    monkeypatch.setattr(forked, "possible", lambda: False)  # what is printed is looked at in this process
    return tmp_path


def test_the_verdict_comes_first_then_what_it_rests_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["mine.py:attention", *FEW, "-n", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{BIASED_ON_ONE}, by its own rounding"
    assert printed[1].startswith("  in training harmless: its gradients don't contain it, delta is off by ")
    assert printed[2] == "  biased      tied_maxima[k=2] +0.23"
    assert printed[6].startswith("  skipped     1 cell: tried with grouped-query heads, it raised RuntimeError: The si")
    assert any(line.startswith("tied_maxima[k=2] ") for line in printed[7:])
    assert printed[-1] == "records: out/last.json"
    assert {record.case for record in store.read(folder / "out" / "last.json").records} >= {"no_tail"}


def test_why_a_run_fell_is_told_though_no_cell_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing ran, and where the gate found something: by cells that the baseline has and the run has not."""
    skipped = ("mine.py:attention", "--cases", "random_grouped", "--heads", "16", "-n", "0")
    assert check.main([*skipped, "--save", "base"]) == 1
    assert "fell: no cell ran, and what did not run does not pass" in capsys.readouterr().out
    ran = ("mine.py:attention", "--cases", "no_tail", "--heads", "16", "-n", "0")
    assert check.main([*ran, "--save", "base", "--cell-timeout", "60"]) == 0
    assert capsys.readouterr().err.startswith("tiebreak check: --cell-timeout has no effect without workers: ")
    (folder / "mine.py").write_text(KERNEL.replace(".to(q.dtype)", ".to(q.dtype) * torch.nan"))
    assert check.main([*ran, "--baseline", "out/base.json"]) == 1
    assert "gate FELL" in capsys.readouterr().out
    base = json.loads((folder / "out" / "base.json").read_text())
    base["records"][0]["measures"]["bias"]["mean"] = base["records"][0]["measures"]["max_ulps"] = 1e-9
    (folder / "base.json").write_text(json.dumps(base))
    (folder / "mine.py").write_text(KERNEL)
    assert check.main([*ran, "--baseline", "base.json"]) == 1
    assert ": FELL (gate FELL: 1 cell compared with base.json" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("mine.py:attention", "-n", "many"), "tiebreak check: argument -n/--workers: many: expected a number"),
        (("absent.py:f",), "tiebreak check: absent.py:f: cannot import absent.py: no such file: absent.py"),
        (("mine.py:attention", "--cases", "no"), "tiebreak check: --cases: unknown case 'no': did you mean no_tail"),
        (("mine.py:attention", "--budget", "0s"), "tiebreak check: --budget 0s: expected a time of a second or more"),
        (("mine.py:attention", "--budget", "9", "--baseline", "b.json"), "tiebreak check: --budget leaves out other"),
        (("mine.py:attention", "--declare", "x=1"), "tiebreak check: mine.py:attention: --declare: "),
    ],
)  # fmt: skip
def test_bad_usage_is_one_line_and_exit_code_2(
    folder: Path, words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["check", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith(line)
    assert len(printed.err.splitlines()) == 1
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("first", "code"), [("", 0), ("q, k, v = (x.detach() for x in (q, k, v)); ", 1)])
def test_gradients_that_are_asked_for_must_be_there(
    folder: Path, first: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "mine.py").write_text(KERNEL.replace("p = ", f"{first}p = "))
    ran = ("mine.py:attention", "--cases", "random", "--heads", "16", "-n", "0", "--backward", "own")
    assert check.main(ran) == code
    line = "fell: attention gave no gradients, and --backward own asks for them"
    assert (line in capsys.readouterr().out) == bool(code)


@pytest.mark.parametrize(("cases", "workers", "alone"), [("random,no_tail", 2, True), ("*", 8, False)])
def test_few_cheap_cells_take_no_workers(pytester: pytest.Pytester, cases: str, workers: int, alone: bool) -> None:
    (pytester.path / "mine.py").write_text(KERNEL)
    config = pytester.parseconfig("-p", "tiebreak.matrix.plugin", "--kernel", "mine.py:attention", "--cases", cases)
    assert faster_alone(config, workers) is alone


@pytest.mark.skipif(sys.platform != "linux", reason="there it always has workers")
def test_a_kernel_that_holds_the_one_process_is_run_again_with_workers(folder: Path) -> None:
    """Here it does so where there are no workers alone."""
    (folder / "mine.py").write_text(
        KERNEL.replace(
            "import torch\n",
            "import os, re, torch\nfrom tiebreak.matrix.experiments.call import Call\n"
            "alone = 'PYTEST_XDIST_WORKER' not in os.environ\nif alone:\n    Call.time_limit = 2.0\n",
        ).replace("    p =", "    if alone and q.shape[2] == 7:\n        re.fullmatch('(a+)+b', 'a' * 64)\n    p =")
    )
    command = [sys.executable, "-m", "tiebreak.reports.cli", "check", "mine.py:attention"]
    options = ("--plan", "paper", "--cases", "random,random_odd", "--heads", "16")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = inherited | {"PYTEST_XDIST_AUTO_NUM_WORKERS": "1"}
    ran = subprocess.run(
        [*command, *options], cwd=folder, env=environment, capture_output=True, text=True, timeout=240, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "2 cells: 2 held" in ran.stdout
    (line,) = ran.stderr.splitlines()
    assert line.startswith("tiebreak check: no result after 2 s of CPU time; it was in attention (mine.py, line ")
    assert line.endswith("; once more with workers, to tell which cells are to blame")


@pytest.mark.parametrize(
    ("imported", "code", "message"),
    [
        (
            True,
            7,
            "the process has ended, or its device is beyond use; once more with workers, to tell which cells are",
        ),
        (False, 2, "mine.py:attention: it ended the process as it was imported, without a word"),
    ],
)
def test_what_ends_the_one_process_is_told_from_what_ends_it_as_it_is_imported(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    imported: bool,
    code: int,
    message: str,
) -> None:
    def gone(options: argparse.Namespace, follower: Any) -> int | None:
        if follower.loaded is None:
            return 7
        if imported:
            follower.pytest_configure(SimpleNamespace(stash={}))
        return None

    monkeypatch.setattr(forked, "possible", lambda: True)
    monkeypatch.setattr(forked, "in_a_fork", lambda work: work())
    monkeypatch.setattr(check, "_check", gone)
    assert check.main(["mine.py:attention"]) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"tiebreak check: {message}")


def test_what_falls_falls_though_nobody_reads_on(folder: Path) -> None:
    command = [sys.executable, "-m", "tiebreak.reports.cli", "check", "mine.py:attention", "--fair"]
    options = ("--cases", "tied_maxima[k=2]", "--heads", "64")
    with subprocess.Popen([*command, *options], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == 1


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_pytest_runs_the_matrix_in_a_repository_of_its_own(tmp_path: Path) -> None:
    """With a package called kernels, a conftest.py and strict options; without --kernel it is as if not there."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").touch()
    (tmp_path / "kernels" / "flash.py").write_text(KERNEL)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_own.py").write_text(
        "import sys\ndef test_own():\n    assert not any(name.startswith('tiebreak.matrix') for name in sys.modules)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers --strict-config\ntestpaths = tests\n")
    own = "def pytest_addoption(parser):\n    parser.addoption('--{}')\n"
    (tmp_path / "conftest.py").write_text(own.format("slow"))
    assert "1 passed" in pytest_in(tmp_path).stdout
    mine = ("--kernel", "kernels/flash.py:attention", "--plan", "paper", "--cases", "no_tail", "--heads=16")
    matrix = pytest_in(tmp_path, *mine)
    assert matrix.returncode == 0
    assert "attention on cpu, bf16: no failure input was run" in matrix.stdout
    assert "1 cell: 1 held" in matrix.stdout
    assert "1 passed" in matrix.stdout
    both = pytest_in(tmp_path, "tests", *mine)
    assert "1 cell: 1 held" in both.stdout
    assert "1 failed, 1 passed" in both.stdout  # its own test looks for the matrix' modules
    (tmp_path / "conftest.py").write_text(own.format("backend"))
    taken = pytest_in(tmp_path, *mine)
    assert taken.returncode == 4  # pytest's own, of bad usage
    assert "--kernel: a conftest.py here and tiebreak have an option of one name" in taken.stderr


def record(case: str, verdict: str | None, bias: float | None) -> Record:
    return Record(
        id=f"cpu-mine-{case}-bf16", backend="cpu", kernel="mine", case=case, case_version=1, format="bf16", seed=1,
        heads=1, experiment="call", outcome="measured", command="", verdict=verdict,
        shown=Shown(NONFINITE) if bias is None else Shown("bias", bias, verdict=verdict),
    )  # fmt: skip


FAILING_WORDS = ("never ran", "WRONG", "NOT TOLD", "INCOMPLETE", "FELL")
ULPS = {"bias": MeasureRecord("mean error", "ulp")}
EXPERIMENTS = {
    "call": ExperimentRecord("one call", agreement="equal_bits", carried="carried"),
    "run": ExperimentRecord("a training run", pooled=True),
}
PLANS = {
    "flash@fused,base=2": PlanRecord("flash"),
    "flash@fused": PlanRecord("flash"),
    "standard": PlanRecord("standard"),
    "stabilized@paper": PlanRecord("stabilized", fix=True),
    "stabilized@fused": PlanRecord("stabilized", fix=True),
    "fair": PlanRecord("dithered", fix=True),
    "gamma@paper": PlanRecord("gamma", fix=True),
}


@pytest.mark.parametrize(
    ("verdict", "plan", "failing", "fix"),
    [
        (BIASED, (FOLLOWS, "flash@fused,base=2"), 2, "none for ties: each row is shifted by its maximum"),
        (UNBIASED, (FOLLOWS, "stabilized@paper"), 1, "partial: stabilized; fails on the 1 input above, holds on 1"),
        (BIASED, (AMBIGUOUS, "flash@fused", "standard"), 2, "none for ties: each row is shifted by its maximum"),
        (BIASED, (AMBIGUOUS, "flash@fused", "stabilized@fused"), 2, "not known: these cases do not"),
        (BIASED, (BEHAVES_LIKE, "fair", "gamma@paper"), 2, "partial: dithered or gamma; fails on the 2 inputs"),
        (BIASED, (UNEXPLAINED, "flash@fused"), 2, "not known: it follows no known plan"),
    ],
)
def test_a_fix_is_told_by_the_plan_and_by_where_it_fails(
    verdict: str, plan: tuple[str, ...], failing: int, fix: str
) -> None:
    records = (
        record("tie", verdict, 0.23),
        record("large", NONFINITE, None),
        replace(record("crashing", None, 0.0), outcome=CRASHED, shown=None, excused="a known bug"),
        record("control", BIASED, 0.1),
    )
    cases = {cell.case: CaseRecord("", failure=cell.case != "control") for cell in records}
    explanations = {"cpu-mine": Explanation(plan[0], plan[1:], 2, 0.99)}
    (summary,) = verdicts(Run({}, {}, records=records, cases=cases, explanations=explanations, plans=PLANS))
    fails = "biased on 1 and NaN or Inf on 1" if failing == 2 else "NaN or Inf on 1"
    assert summary.headline == f"mine on cpu, bf16: {fails} of 3 failure inputs, 1 not known"
    assert (summary.biased + summary.nonfinite, summary.inputs) == (failing, 3)
    assert summary.unknown == 1
    text = str(summary)
    assert f"fix         {fix}" in text
    assert summary.severity == BIASED
    assert "NaN         large NaN" in text
    assert "elsewhere   control +0.10" in text
    assert "ended       crashing crash" in text


@pytest.mark.parametrize(
    ("plan", "met", "fix", "rounding"),
    [
        ("flash@fused", True, "none for ties: each row", "declares flash@fused; as predicted in 2 of 2 cells, 99.50 %"),
        ("stabilized@paper", True, "partial: stabilized; fails on the 1 input", "declares stabilized@paper; as"),
        ("flash@fused", False, "not known: it is not what flash@fused predicts", "declares flash@fused; as"),
    ],
)  # fmt: skip
def test_a_declared_plan_is_told_with_what_came_of_its_prediction(
    plan: str, met: bool, fix: str, rounding: str
) -> None:
    answers = {PREDICTION: Answer(met, f"what {plan} predicts", "" if met else "other bits")}
    declared = partial(replace, plan=plan, answers=answers)
    records = (
        declared(record("tie", BIASED, 0.23), measures={"equal_bits": 0.99}),
        declared(record("other", UNBIASED, 0.0), measures={"equal_bits": 1.0}),
    )
    cases = {cell.case: CaseRecord("", failure=True) for cell in records}
    (summary,) = verdicts(Run({}, {}, records=records, cases=cases, experiments=EXPERIMENTS, plans=PLANS))
    assert f"fix         {fix}" in str(summary)
    assert f"rounding    {rounding}" in str(summary)


@pytest.mark.parametrize(
    ("tied", "doing"),
    [
        ((True, False, False), ": 1 where O itself ties, 2 by its own rounding"),
        ((True, True, True), ", where O itself ties"),
        ((False, False, False), ", by its own rounding"),
        ((True, None, False), ""),
    ],
)
def test_the_headline_says_whose_doing_a_bias_is(tied: tuple[bool | None, ...], doing: str) -> None:
    records = tuple(replace(record(name, BIASED, 0.2), tied=of) for name, of in zip("abc", tied, strict=True))
    cases = {cell.case: CaseRecord("", failure=True) for cell in records}
    (verdict,) = verdicts(Run({}, {}, records=records, cases=cases))
    assert verdict.headline == f"mine on cpu, bf16: biased on 3 of 3 failure inputs{doing}"


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((0.999, 0.99, 0.997), "follows flash's: 99.51 % of bits in 2 cells"),
        ((0.999, 0.7, 0.997), "unexplained: nearest is flash's with 94.68 % of bits in 2 cells"),
    ],
)
def test_the_backward_pass_whose_bits_the_gradients_have_is_named(shares: tuple[float, ...], told: str) -> None:
    measured = dict(zip(("dq", "dk", "dv"), shares, strict=True))
    cells = (
        {"eager's": dict.fromkeys(measured, 0.5), "flash's": bits}
        for bits in (measured, dict.fromkeys(measured, 0.995))
    )
    evidence = zip("ab", cells, strict=True)
    records = tuple(replace(record(case, UNBIASED, 0.0), evidence={"backward": bits}) for case, bits in evidence)
    cases = dict.fromkeys("ab", CaseRecord(""))
    experiments = {"call": ExperimentRecord("")}
    (verdict,) = verdicts(Run({}, {}, records=records, cases=cases, experiments=experiments))
    assert f"backward    {told}" in str(verdict)


NEVER = "not measured: no input was run backward"


@pytest.mark.parametrize(
    ("carried", "runs", "message", "contained"),
    [
        ((2e-6, UNBIASED), (UNBIASED, UNBIASED),
         "harmless: its gradients don't contain it, delta is off by 0.0002 % at most; no drift in 2 training runs",
         UNBIASED),
        ((1.5e-3, BIASED), (UNBIASED, BIASED),
         "its gradients contain it: delta is off by +0.15 % in tie; drifts in 1 of 2 training runs: run1 +0.00",
         BIASED),
        ((2e-4, UNDECIDED), (), "not known: too few heads to tell whether its gradients contain it", UNDECIDED),
        ((2e-6, UNBIASED), (UNBIASED, UNDECIDED),
         "harmless: its gradients don't contain it, delta is off by 0.0002 % at most;"
         " not known in 1 of 2 training runs: run1 +0.00", UNDECIDED),
        ((None, None), (), "not measured: it has no backward pass", None),
        (None, (), NEVER, None),
        (None, (UNBIASED,), f"{NEVER}; no drift in 1 training run", UNBIASED),
    ],
)  # fmt: skip
def test_what_training_takes_of_a_bias_stands_below_the_headline(
    carried: tuple[float | None, str | None] | None, runs: tuple[str, ...], message: str, contained: str | None
) -> None:
    tie = record("tie", BIASED, 0.23)
    if carried is not None:
        tie = replace(tie, measures={} if carried[0] is None else {"carried": carried[0]}, in_training=carried[1])
    trained = tuple(
        replace(record(f"run{at}", None, 0.0), experiment="run", in_training=verdict) for at, verdict in enumerate(runs)
    )
    cases = {"tie": CaseRecord("", failure=True, backward=carried is not None)}
    cases |= {cell.case: CaseRecord("", headline="growth") for cell in trained}
    (verdict,) = verdicts(Run({}, {}, records=(tie, *trained), cases=cases, experiments=EXPERIMENTS))
    assert (verdict.findings[0].name, verdict.findings[0].text) == ("in training", message)
    assert verdict.in_training == contained
    assert ("autograd has no gradients of what it returns" in str(verdict)) == message.endswith("no backward pass")


def test_a_budget_names_what_it_left_out_and_fails_nothing() -> None:
    (judged,) = verdicts(Run({}, {}, records=(RAN, LATE), cases={"tie": CaseRecord(""), "late": CaseRecord("")}))
    (left_out,) = [finding for finding in judged.findings if finding.name in ("left out", "skipped")]
    assert (left_out.name, left_out.cases, judged.left, judged.ok) == ("left out", ("late",), 1, True)


RAN = record("tie", BIASED, 0.23)
LATE = replace(record("late", None, 0.0), outcome=SKIPPED, skipped=NO_TIME)
CHECKS = {RUNS: CheckRecord("", wrong=True), "bound": CheckRecord("", wrong=True), "claim": CheckRecord("")}
NOT_MET = Answer(False, "asked", "4 times the bound; and more")
ENDS: Mapping[str, tuple[list[Record], dict[str, Any], list[str], str]] = {
    "fair": ([record("tie", UNBIASED, 0.0)], {}, [], "unbiased on 1 of 1 failure input"),
    "biased": ([RAN], {}, [], "biased on 1 of 1 failure input"),
    "tied": ([replace(RAN, tied=True)], {}, [], "biased on 1 of 1 failure input, where O itself ties"),
    "no failure input": ([replace(RAN, case="random")], {}, [], "no failure input was run, nothing is known of its"),
    "claimed otherwise": ([replace(RAN, outcome=FELL, answers={"claim": NOT_MET})], {}, [],
                          "FELL by claim on 1 input, biased on 1 of 1 failure input"),
    "wrong": ([replace(RAN, outcome=FELL, answers={"claim": NOT_MET, "bound": NOT_MET}),
               record("other", UNBIASED, 0.0)], {}, [], "WRONG on 1 of 2 inputs (tie: +0.23 ulp, 4 times the bound)"),
    "excused": ([replace(RAN, outcome=FELL, answers={"bound": NOT_MET}, excused="known")], {}, [], "biased on 1 of 1"),
    "wrong in one cell, crashed in another": (
        [replace(RAN, outcome=CRASHED, shown=None, verdict=None, answers={RUNS: Answer(False, "", "KeyError: 'x'")}),
         record("other", UNBIASED, 0.0)], {}, [], "WRONG on 1 of 2 inputs (tie: KeyError: 'x')"),
    "crashed": ([replace(RAN, outcome=CRASHED, shown=None, verdict=None, answers={RUNS: NOT_MET})], {}, [],
                "never ran: 4 times the bound"),
    "timed out": ([replace(RAN, outcome=TIMED_OUT, shown=None, verdict=None, answers={IN_TIME: NOT_MET})], {}, [],
                  "never ran: 4 times the bound"),
    "too few heads": ([replace(record("tie", UNDECIDED, 0.04), outcome=INCONCLUSIVE,
                               answers={"decided": Answer(None, "", "8 heads do not tell; --heads 64 would do")})],
                      {}, [], "NOT TOLD on 1 of 1 input (tie: +0.04 ulp, 8 heads do not tell)"),
    "skipped": ([replace(RAN, outcome=SKIPPED, skipped="no GPU", shown=None)], {}, [],
                "INCOMPLETE, no cell ran: no GPU"),
    "interrupted": ([RAN], {"complete": False, "not_run": ("cpu-mine-a-bf16",)}, [],
                    "INCOMPLETE, 1 of 2 cells done: biased on 1 of 1"),
    "a budget for too little": ([RAN, replace(LATE, case="needed")], {}, [],
                                "INCOMPLETE, 1 of 2 cells in its budget: biased on 1 of 1"),
    "a budget for enough": ([RAN, LATE], {}, [],
                            "1 of 2 cells in its budget: biased on 1 of 1"),
    "gate": ([RAN], {}, ["gate FELL: 1 cell compared"], "FELL (gate FELL: 1 cell compared), biased on 1 of 1"),
}  # fmt: skip


@pytest.mark.parametrize(("records", "how", "failures", "message"), ENDS.values(), ids=ENDS)
def test_the_first_line_says_what_the_exit_code_does_however_a_run_ends(
    records: list[Record], how: dict[str, Any], failures: list[str], message: str
) -> None:
    cases = {each.case: CaseRecord("", failure=each.case != "random", needed=each.case == "needed") for each in records}
    run = Run({}, {}, records=tuple(records), cases=cases, checks=CHECKS, measures=ULPS, **how)
    (judged,) = verdicts(run, failures=failures)
    assert judged.headline.removeprefix("mine on cpu, bf16: ").startswith(message)
    assert judged.ok is not any(word in judged.headline for word in FAILING_WORDS)
    fails = any(each.fails for each in records) or how or failures or judged.severity == "did not run"
    assert judged.ok is not bool(fails or "INCOMPLETE" in message)
    validated(verdict.as_json([judged]))


HEADS = ("--heads", "64")
SOURCES = {
    "no scale": ("scale = 1.0; ", HEADS, "WRONG on 1 of 1 input (tied_maxima[k=2]: "),
    "raises": ("q = torch.sofmax(q); ", HEADS, "never ran: AttributeError: module 'torch' has no attribute 'sofmax'"),
    "gives nothing": ("return; ", HEADS, "WRONG on 1 of 1 input (tied_maxima[k=2]: returned NoneType"),
    "ends itself": ("import sys; sys.exit(3); ", HEADS, "WRONG on 1 of 1 input (tied_maxima[k=2]: called sys.exit(3)"),
    "takes no such input": ("raise NotImplementedError('not on a CPU'); ", HEADS,
                            "INCOMPLETE, no cell ran: NotImplementedError: not on a CPU"),
    "few heads": ("", ("--heads", "2", "--plan", "fair"), ""),
}  # fmt: skip


@pytest.mark.parametrize(("first", "options", "message"), SOURCES.values(), ids=SOURCES)
def test_the_exit_code_says_what_the_first_line_does(
    folder: Path, capsys: pytest.CaptureFixture[str], first: str, options: tuple[str, ...], message: str
) -> None:
    (folder / "mine.py").write_text(KERNEL.replace("    p = ", f"    {first}p = "))
    assert check.main(["mine.py:attention", "--cases", "tied_maxima[k=2]", "-n", "0", *options]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].removeprefix("attention on cpu, bf16: ").startswith(message)
    assert any(word in printed[0] for word in FAILING_WORDS)


def validated(text: str) -> Any:
    plain = json.loads(text)
    jsonschema.Draft202012Validator(schema_of("verdicts")).validate(plain)
    return plain


def test_what_falls_is_exit_code_1_and_json_is_the_verdict_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["mine.py:attention", "--fair", *FEW, "-n", "0", "--json", "-"]) == 1
    text = capsys.readouterr().out
    (plain,) = validated(text)["verdicts"]
    (again,) = verdict.from_json(text)
    assert plain["headline"] == again.headline
    fell = "FELL by claim on 1 input, biased on 1 of 1 failure input, by its own rounding"
    assert (again.headline, again.severity, again.tied) == (f"attention on cpu, bf16: {fell}", BIASED, 0)
    assert again.in_training == UNBIASED
    assert (again.ok, again.seed, again.cells) == (False, 1, {"fell": 1, "held": 1, "skipped": 1})
    assert [(cell.cell, cell.outcome) for cell in again.fell] == [("cpu-attention-tied_maxima[k=2]-bf16", "fell")]
    assert "--cases 'tied_maxima[k=2]'" in again.fell[0].command
    assert "  fell        claim in tied_maxima[k=2]" in str(again).splitlines()
    assert again.command.startswith("tiebreak check mine.py:attention --fair --cases ")


def test_a_verdict_is_an_object_of_a_function_in_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten lines, as docs/your-kernel.md has it."""
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("mine", None)  # other tests have a module of that name
    attention = importlib.import_module("mine").attention
    del sys.modules["mine"]
    checked = tiebreak.check(attention, cases="tied_maxima[k=2]", heads=64, seed=2, workers=0)
    assert str(checked).startswith(f"{BIASED_ON_ONE}, by its own rounding\n")
    assert (checked.ok, checked.biased, checked.seed, checked.fell) == (True, 1, 2, ())
    assert checked.plan.plans[0] == "flash@paper"
    assert checked.versions["torch"] == torch.__version__
    assert not (folder / "out").exists()


def test_a_function_without_a_file_is_checked_in_this_process_alone(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(KERNEL, names)
    with pytest.raises(UsageError, match=r"^'attention' stands in no file .* in_process=True$"):
        tiebreak.check(names["attention"])
    checked = tiebreak.check(names["attention"], in_process=True, cases="no_tail", heads=16)
    assert checked.headline == "attention on cpu, bf16: no failure input was run, nothing is known of its bias"
    with pytest.raises(UsageError, match=r"^tiebreak.check has no heds; it has backend, "):
        tiebreak.check(names["attention"], heds=16)
