"""`tiebreak check`, and `pytest --kernel` in a repository that has tests of its own."""

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from msgspec.structs import replace

import tiebreak
from tiebreak.programs import check
from tiebreak.reports import cli, verdict
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import decode
from tiebreak.reports.records.record import Answer, CaseRecord, ExperimentRecord, Explanation, PlanRecord, Record, Run
from tiebreak.reports.schemas import schema_of

pytestmark = pytest.mark.usefixtures("settled_once")
KERNEL = """
import torch

def attention(q, k, v, *, causal=False, scale=None):
    p = torch.exp(q.float() @ k.float().mT * scale - (q.float() @ k.float().mT * scale).amax(-1, keepdim=True))
    return ((p.to(v.dtype) @ v) / p.sum(-1, keepdim=True)).to(q.dtype)
"""
BIASED_ON_ONE = "PASS: attention on cpu, bf16: biased on 1 of 1 failure input"
FEW = ("--cases", "tied_maxima[k=2],no_tail,random_grouped", "--heads", "64")


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of a clone, and a pytest configuration that a run here must not meet."""
    (folder / "dies.py").write_text("import os\nos._exit(7)\n")
    (folder / "conftest.py").write_text("raise SystemExit('not for you')\n")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option-either")
    return folder


def test_the_verdict_comes_first_then_what_it_rests_on(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main(["mine.py:attention", *FEW, "-n", "0"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == f"{BIASED_ON_ONE}, by its own rounding"
    assert printed[1].startswith("  in training harmless: its gradients don't contain it, delta is off by ")
    assert printed[2] == "  biased      tied_maxima[k=2] +0.23"
    assert printed[6].startswith("  skipped     1 cell: tried with grouped-query heads, it raised RuntimeError: The si")
    assert printed[7:-1] == [""]
    assert printed[-1].startswith("3 cells: 2 passed, 1 skipped; -v ")
    assert printed[-1].endswith("records: out/last.json")
    assert {record.case for record in store.read(folder / "out" / "last.json").records} >= {"no_tail"}


DQ_OFF = r"dQ is off by 70\d % of its size, 8(\.\d+)? times the reference"


def test_a_wrong_gradient_is_named_first_with_a_next_step_and_nothing_that_reassures(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of two kernels the wrong one comes first; `--table` shows the rest."""
    (folder / "wrong.py").write_text(KERNEL.replace("    p = ", "    q = q + 7 * (q - q.detach())\n    p = "))
    words = ["wrong.py:attention", "--cases", "random", "--heads", "64", "-n", "0"]
    assert check.main(["mine.py:attention", *words, "--json", "verdicts.json"]) == 1
    headline, looks_like, following, *printed = capsys.readouterr().out.splitlines()
    assert re.fullmatch(rf"FAIL: wrong\.attention on cpu, bf16: wrong on 1 of 1 input \(random: {DQ_OFF}\)", headline)
    assert looks_like.startswith("  looks like  the scale is missing in dQ (explains 9")
    assert following.startswith("  next        rerun random alone: ")
    assert "wrong.py:attention --cases random --dtype bf16" in following
    own = "\n".join(printed[: printed.index("")])
    assert not [word for word in ("harmless", "no drift", "passed wherever") if word in own]
    assert any(re.fullmatch(rf"failed cpu-wrong\.attention-random-bf16: {DQ_OFF}", line) for line in printed)
    judged = json.loads((folder / "verdicts.json").read_text())["verdicts"]
    assert [each["kernel"] for each in judged] == ["wrong.attention", "mine.attention"]
    assert check.main([*words, "--table"]) == 1
    shown = capsys.readouterr().out
    assert re.search("^random +!", shown, re.MULTILINE)
    assert "    rerun: " in shown


KEY_BY_KEY = """
import torch

def attention(q, k, v, *, causal=False, scale=None):
    s, v = q.float() @ k.float().mT * scale, v.float()
    o, l, m = torch.zeros(()), 0.0, s[..., :1]
    for key in range(k.shape[2]):
        this = s[..., key : key + 1]
        above = torch.maximum(m, this)
        p, rescaled = torch.exp(this - above), torch.exp(m - above)
        o = ((o * rescaled).half().float() + p * v[..., key : key + 1, :]).half().float()
        l, m = l * rescaled + p, above
    return (o / l).to(q.dtype)
"""


def test_a_sum_in_a_narrow_accumulator_is_less_accurate_than_what_ships_unless_it_is_declared(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "narrow.py").write_text(KEY_BY_KEY)
    words = ["narrow.py:attention", "--declare", "backward=none", "--cases", "random", "--heads", "32", "-n", "0"]
    assert check.main([*words, "--dtype", "fp16"]) == 1
    first = capsys.readouterr().out.splitlines()[0]
    plan = "flash@fp32_inside,o_bar=fp16:kept,tile=1"
    told = re.search(
        f"it follows {plan}, which .* declared, ([0-9.]+) times the error of .*, the nearest plan that ships", first
    )
    assert told
    assert float(told[1]) > 3
    assert check.main([*words, "--dtype", "fp16", "--plan", plan]) == 0


def test_why_a_run_failed_is_told_though_no_cell_did(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing ran, and where the gate found something: by cells that the baseline has and the run has not."""
    skipped = ("mine.py:attention", "--cases", "random_grouped", "--heads", "16", "-n", "0")
    assert check.main([*skipped, "--save", "base"]) == 1
    assert "failed: no cell ran, and what did not run does not pass" in capsys.readouterr().out
    ran = ("mine.py:attention", "--cases", "no_tail", "--heads", "16", "-n", "0")
    assert check.main([*ran, "--save", "base", "--cell-timeout", "60"]) == 0
    assert capsys.readouterr().err.startswith("tiebreak check: --cell-timeout has no effect without workers: ")
    (folder / "mine.py").write_text(KERNEL.replace(".to(q.dtype)", ".to(q.dtype) * torch.nan"))
    assert check.main([*ran, "--baseline", "out/base.json"]) == 1
    assert "gate FAILED" in capsys.readouterr().out
    base = json.loads((folder / "out" / "base.json").read_text())
    base["records"][0]["case_version"] += 1
    (folder / "base.json").write_text(json.dumps(base))
    (folder / "mine.py").write_text(KERNEL)
    assert check.main([*ran, "--baseline", "base.json"]) == 1
    assert ": (gate FAILED: 1 cell compared with base.json" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("mine.py:attention", "-n", "many"), "tiebreak check: argument -n/--workers: many: expected a number"),
        (("absent.py:f",), "tiebreak check: absent.py:f: cannot import absent.py: no such file: absent.py"),
        (("dies.py:f",), "tiebreak check: dies.py:f: cannot import dies.py: SystemExit: os._exit(7) (dies.py, line 2)"),
        (("mine.py:attention", "--budget", "0s"), "tiebreak check: --budget 0s: expected a time of a second or more"),
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
    line = "failed: attention gave no gradients, and --backward own asks for them"
    assert (line in capsys.readouterr().out) == bool(code)


def pytest_in(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


def test_pytest_runs_the_matrix_in_a_repository_of_its_own(pytester: pytest.Pytester) -> None:
    """With a package called kernels, a conftest.py and strict options; without --kernel it is as if not there."""
    tmp_path = pytester.path
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
    both = pytest_in(tmp_path, "tests", *mine)
    assert "PASS: attention on cpu, bf16: no failure input was run" in both.stdout
    assert "1 cell: 1 passed" in both.stdout
    assert "1 failed, 1 passed" in both.stdout  # its own test looks for the matrix' modules
    (tmp_path / "conftest.py").write_text(own.format("backend"))
    taken = pytester.runpytest_inprocess(*mine, "-p", "no:cacheprovider")
    assert taken.ret == pytest.ExitCode.USAGE_ERROR
    assert "--kernel: a conftest.py here and tiebreak have an option of one name" in taken.stderr.str()


def cell(case: str, verdict: str | None = "biased", bias: float | None = 0.2, **fields: Any) -> Record:
    shown = records.Shown("nonfinite") if bias is None else records.Shown("bias", bias, verdict=verdict)
    return Record(**{
        "id": f"cpu-mine-{case}-bf16", "backend": "cpu", "kernel": "mine", "case": case, "case_version": 1,
        "format": "bf16", "seed": 1, "heads": 1, "experiment": "call", "outcome": "measured", "command": "",
        "verdict": verdict, "shown": shown, **fields,
    })  # fmt: skip


def judged(cells: Sequence[Record], cases: Mapping[str, CaseRecord] | None = None, **run: Any) -> verdict.Verdict:
    """What is said of a kernel with these records; all cases are failure inputs unless they are given."""
    failures = run.pop("failures", ())
    cases = cases or {each.case: CaseRecord("", failure=True) for each in cells}
    of_run = {"experiments": EXPERIMENTS, "plans": PLANS, **run}
    (only,) = verdict.verdicts(Run({}, {}, records=tuple(cells), cases=cases, **of_run), failures=failures)
    return only


EXPERIMENTS = {
    "call": ExperimentRecord("one call", headline="bias", agreement="equal_bits", carried="carried"),
    "run": ExperimentRecord("a training run", pooled=True),
}
PLANS = {
    **{name: PlanRecord(name.partition("@")[0]) for name in ("flash@fused", "flash@fused,base=2", "standard")},
    **{name: PlanRecord("stabilized", fix=True) for name in ("stabilized@paper", "stabilized@fused")},
    "fair": PlanRecord("dithered", fix=True),
    "gamma@paper": PlanRecord("gamma", fix=True),
}


@pytest.mark.parametrize(
    ("tie", "plan", "failing", "fix"),
    [
        ("biased", ("follows", "flash@fused,base=2"), 2, "none for ties: each row is shifted by its maximum"),
        ("unbiased", ("follows", "stabilized@paper"), 1, "partial: stabilized; fails on the 1 input above, holds on 1"),
        ("biased", ("ambiguous", "flash@fused", "stabilized@fused"), 2, "not known: these cases do not"),
        ("biased", ("behaves_like", "fair", "gamma@paper"), 2, "partial: dithered or gamma; fails on the 2 inputs"),
        ("biased", ("unexplained", "flash@fused"), 2, "not known: it follows no known plan"),
    ],
)
def test_a_fix_is_told_by_the_plan_and_by_where_it_fails(
    tie: str, plan: tuple[str, ...], failing: int, fix: str
) -> None:
    crashing = cell("crashing", None, outcome="crashed", shown=None, excused="a known bug")
    cells = (cell("tie", tie), cell("large", "nonfinite", None), crashing, cell("control", bias=0.1))
    cases = {each.case: CaseRecord("", failure=each.case != "control") for each in cells}
    said = judged(cells, cases, explanations={"cpu-mine": Explanation(plan[0], plan[1:], 2, 0.99)})
    fails = "biased on 1 and NaN or Inf on 1" if failing == 2 else "NaN or Inf on 1"
    assert said.headline == f"PASS: mine on cpu, bf16: {fails} of 3 failure inputs, 1 not known"
    assert (said.biased + said.nonfinite, said.inputs, said.unknown, said.severity) == (failing, 3, 1, "biased")
    for line in (
        f"fix         {fix}",
        "NaN         large NaN",
        "elsewhere   control +0.10",
        "ended       crashing crash",
    ):
        assert line in str(said)


@pytest.mark.parametrize(
    ("plan", "passed", "fix"),
    [
        ("flash@fused", True, "none for ties: each row"),
        ("flash@fused", False, "not known: it is not what flash@fused predicts"),
    ],
)
def test_a_declared_plan_is_told_with_what_came_of_its_prediction(plan: str, passed: bool, fix: str) -> None:
    answers = {"prediction": Answer(passed, f"what {plan} predicts", "" if passed else "other bits")}
    tie = cell("tie", plan=plan, answers=answers, measures={"equal_bits": 0.99})
    said = str(judged([tie, cell("other", "unbiased", plan=plan, answers=answers, measures={"equal_bits": 1.0})]))
    assert f"fix         {fix}" in said
    assert f"rounding    declares {plan}; as" in said
    assert ("as predicted in 2 of 2 cells, 99.50 %" in said) is passed


@pytest.mark.parametrize(
    ("tied", "doing"),
    [
        ((True, False, False), ": 1 where O itself ties, 2 by its own rounding"),
        ((False, False, False), ", by its own rounding"),
        ((True, None, False), ""),
    ],
)
def test_the_headline_says_whose_doing_a_bias_is(tied: tuple[bool | None, ...], doing: str) -> None:
    said = judged([cell(name, tied=of) for name, of in zip("abc", tied, strict=True)])
    assert said.headline == f"PASS: mine on cpu, bf16: biased on 3 of 3 failure inputs{doing}"


@pytest.mark.parametrize(
    ("dk", "told"),
    [
        (0.99, "follows flash's: 99.51 % of bits in 2 cells"),
        (0.7, "unexplained: nearest is flash's with 94.68 % of bits in 2 cells"),
    ],
)
def test_the_backward_pass_whose_bits_the_gradients_have_is_named(dk: float, told: str) -> None:
    eager, shares = dict.fromkeys(("dq", "dk", "dv"), 0.5), {"dq": 0.999, "dk": dk, "dv": 0.997}
    bits = {"a": shares, "b": dict.fromkeys(shares, 0.995)}
    cells = [cell(case, evidence={"backward": {"eager's": eager, "flash's": each}}) for case, each in bits.items()]
    assert f"backward    {told}" in str(judged(cells))


NEVER = "not measured: no input was run backward"


@pytest.mark.parametrize(
    ("carried", "runs", "message", "contained"),
    [
        ((2e-6, "unbiased"), ("unbiased", "unbiased"),
         "harmless: its gradients don't contain it, delta is off by 0.0002 % at most; no drift in 2 training runs",
         "unbiased"),
        ((1.5e-3, "biased"), ("unbiased", "biased"),
         "its gradients contain it: delta is off by +0.15 % in tie; drifts in 1 of 2 training runs: run1 +0.00",
         "biased"),
        ((2e-4, "undecided"), (), "not known: too few heads to tell whether its gradients contain it",
         "undecided"),
        ((2e-6, "unbiased"), ("unbiased", "undecided"),
         "harmless: its gradients don't contain it, delta is off by 0.0002 % at most;"
         " not known in 1 of 2 training runs: run1 +0.00", "undecided"),
        ((None, None), (), "not measured: it has no backward pass", None),
        (None, ("unbiased",), f"{NEVER}; no drift in 1 training run", "unbiased"),
    ],
)  # fmt: skip
def test_what_training_takes_of_a_bias_stands_below_the_headline(
    carried: tuple[float | None, str | None] | None, runs: tuple[str, ...], message: str, contained: str | None
) -> None:
    share, in_training = carried or (None, None)
    tie = cell("tie", measures={} if share is None else {"carried": share}, in_training=in_training)
    trained = [cell(f"run{at}", None, 0.0, experiment="run", in_training=drifts) for at, drifts in enumerate(runs)]
    cases = {"tie": CaseRecord("", failure=True, backward=carried is not None)}
    said = judged([tie, *trained], cases | {each.case: CaseRecord("", headline="growth") for each in trained})
    assert (said.findings[0].name, said.findings[0].text) == ("in training", message)
    assert said.in_training == contained
    assert ("autograd has no gradients of what it returns" in str(said)) == message.endswith("no backward pass")


def test_nothing_that_reassures_stands_below_a_failure() -> None:
    answers = {"bound": Answer(False, "", "4 times the bound"), "loss": Answer(True, "")}
    tie = cell("tie", outcome="failed", answers=answers, measures={"carried": 2e-6}, in_training="unbiased")
    trained = cell("run", None, 0.0, experiment="run", in_training="unbiased")
    cases, failed = {"tie": CaseRecord("", failure=True, backward=True), "run": CaseRecord("")}, {"checks": CHECKS}
    assert {"in training", "checks"} & {
        finding.name for finding in judged([tie, trained], cases, **failed).findings
    } == set()
    fine = replace(tie, outcome="passed", answers={"loss": Answer(True, "")})
    assert {"in training", "checks"} <= {finding.name for finding in judged([fine, trained], cases).findings}


LATE = cell("late", None, 0.0, outcome="skipped", skipped=records.NO_TIME)
CHECKS = {name: records.CheckRecord("", wrong=name != "claim") for name in ("runs", "bound", "claim")}
FAILING = Answer(False, "asked", "4 times the bound; and more")
FAIR, NOTHING = cell("other", "unbiased", 0.0), {"shown": None, "verdict": None}
#: By the first line: the records, and what else there is to a run.
ENDS: Mapping[str, tuple[list[Record], dict[str, Any]]] = {
    "PASS: unbiased on 1 of 1 failure input": ([FAIR], {}),
    "PASS: biased on 1 of 1 failure input": (
        [cell("tie", outcome="failed", answers={"bound": FAILING}, excused="known")], {}),
    "PASS: biased on 1 of 1 failure input, where O itself ties": ([cell("tie", tied=True)], {}),
    "PASS: no failure input was run, nothing is known of its": ([cell("random")], {}),
    "FAIL: by claim on 1 input, biased on 1 of 1 failure input": (
        [cell("tie", outcome="failed", answers={"claim": FAILING})], {}),
    "FAIL: wrong on 1 of 2 inputs (tie: +0.20 ulp, 4 times the bound)": (
        [cell("tie", outcome="failed", answers={"claim": FAILING, "bound": FAILING}), FAIR], {}),
    "FAIL: wrong on 3 of 3 inputs (b: dQ is off by 700 %)": (
        [cell(name, outcome="failed", answers={"bound": FAILING}, evidence={"off": off})
         for name, off in (("a", {"O is off by 90 %": 0.9}), ("b", {"dQ is off by 700 %": 7.0}), ("c", {}))], {}),
    "FAIL: wrong on 2 of 2 inputs (b: O is NaN)": (
        [cell("a", outcome="failed", answers={"bound": FAILING}, evidence={"off": {"dQ is off by 700 %": 7.0}}),
         cell("b", outcome="failed", answers={"bound": FAILING}, evidence={"off": {"O is NaN": None}})], {}),
    "FAIL: wrong on 2 of 2 inputs (b: KeyError: 'x')": (
        [cell("a", outcome="failed", answers={"bound": FAILING}, evidence={"off": {"dV is off by 2 %": 0.02}}),
         cell("b", outcome="crashed", answers={"runs": Answer(False, "", "KeyError: 'x'")}, **NOTHING)], {}),
    "FAIL: wrong on 1 of 2 inputs (tie: KeyError: 'x')": (
        [cell("tie", outcome="crashed", answers={"runs": Answer(False, "", "KeyError: 'x'")}, **NOTHING), FAIR], {}),
    "FAIL: never ran: 4 times the bound": (
        [cell("tie", outcome="timed_out", answers={"in_time": FAILING}, **NOTHING)], {}),
    "UNDECIDED: undecided on 1 of 1 input (tie: +0.04 ulp, too few heads, --heads 64 would do": (
        [cell("tie", "undecided", 0.04, outcome="undecided",
              answers={"bound": Answer(None, "", "too few heads, --heads 64 would do")})], {}),
    "PASS: unbiased on 1 of 2 failure inputs, 1 at the margin (tie +0.050 +- 0.004)": (
        [cell("tie", "undecided", 0.05, measures={"bias": records.Estimate(0.05, 0.004)}), FAIR], {}),
    "FAIL: no cell ran: no GPU": ([cell("tie", outcome="skipped", skipped="no GPU", shown=None)], {}),
    "INCOMPLETE: biased on 1 of 1 failure input; 1 of 2 cells done": (
        [cell("tie")], {"complete": False, "not_run": ("cpu-mine-a-bf16",)}),
    "INCOMPLETE: biased on 1 of 1 failure input; 1 of 2 cells in its budget": ([cell("tie"), LATE], {}),
    "FAIL: wrong on 1 of 1 input (tie: +0.20 ulp, 4 times the bound); 1 of 2 cells in its budget": (
        [cell("tie", outcome="failed", answers={"bound": FAILING}), LATE], {}),
    "FAIL: (gate FAILED: 1 cell), biased on 1 of 1": ([cell("tie")], {"failures": ["gate FAILED: 1 cell"]}),
}  # fmt: skip


@pytest.mark.parametrize("message", ENDS)
def test_the_first_line_says_what_the_exit_code_does_however_a_run_ends(message: str) -> None:
    cells, how = ENDS[message]
    cases = {each.case: CaseRecord("", failure=each.case != "random") for each in cells}
    said = judged(cells, cases, checks=CHECKS, measures={"bias": records.MeasureRecord("mean error", "ulp")}, **how)
    assert said.headline.startswith(message.replace(": ", ": mine on cpu, bf16: ", 1))
    assert said.statement.startswith(message)
    assert said.result == message.partition(":")[0]
    assert said.ok is (said.result == "PASS" or (said.result == "INCOMPLETE" and said.complete))
    assert said.ok is not bool(any(each.fails for each in cells) or how or said.severity == "did not run")
    validated(verdict.as_json([said]))


HEADS = ("--heads", "64")
SOURCES = {
    "ends itself": ("import sys; sys.exit(3); ", HEADS,
                    "FAIL: wrong on 1 of 1 input (tied_maxima[k=2]: called sys.exit(3)"),
    "takes no such input": ("raise NotImplementedError('not on a CPU'); ", HEADS,
                            "FAIL: no cell ran: NotImplementedError: not on a CPU"),
    "skips as its tests do": ("import pytest; pytest.skip('not on a CPU'); ", HEADS, "FAIL: no cell ran: not on a CPU"),
    "few heads": ("", ("--heads", "2", "--plan", "fair"), "FAIL: "),
}  # fmt: skip


@pytest.mark.parametrize(("first", "options", "message"), SOURCES.values(), ids=SOURCES)
def test_the_exit_code_says_what_the_first_line_does(
    folder: Path, capsys: pytest.CaptureFixture[str], first: str, options: tuple[str, ...], message: str
) -> None:
    (folder / "mine.py").write_text(KERNEL.replace("    p = ", f"    {first}p = "))
    assert check.main(["mine.py:attention", "--cases", "tied_maxima[k=2]", "-n", "0", *options]) == 1
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].replace(" attention on cpu, bf16:", "").startswith(message)


def test_a_terminal_shows_how_far_it_is_and_how_long_it_takes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(check, "_TELL_EVERY", 0.0)
    check.main(["mine.py:attention", "--cases", "random,no_tail", *HEADS, "-n", "0"])
    told = capsys.readouterr().err
    assert ["about" in told, *(f"{done} of 2 cells, about" in told for done in range(3))] == [True] * 4


def validated(text: str) -> Any:
    plain = json.loads(text)
    jsonschema.Draft202012Validator(schema_of("verdicts")).validate(plain)
    return plain


def test_what_fails_is_exit_code_1_and_json_is_the_verdict_and_nothing_else(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(["mine.py:attention", "--fair", *FEW, "-n", "0", "--json", "-"]) == 1
    text = capsys.readouterr().out
    (plain,) = validated(text)["verdicts"]
    (again,) = decode(text, verdict.Verdicts).verdicts
    assert plain["headline"] == again.headline
    failed = "FAIL: by claim on 1 input, biased on 1 of 1 failure input, by its own rounding"
    assert (again.statement, again.result, again.severity, again.tied) == (failed, "FAIL", "biased", 0)
    assert again.in_training == "unbiased"
    assert (again.ok, again.seed, again.cells) == (False, 1, {"failed": 1, "passed": 1, "skipped": 1})
    assert [(cell.cell, cell.outcome) for cell in again.failed] == [("cpu-attention-tied_maxima[k=2]-bf16", "failed")]
    assert "--cases 'tied_maxima[k=2]'" in again.failed[0].command
    assert "  failed      claim in tied_maxima[k=2]" in str(again).splitlines()
    assert again.command.startswith("tiebreak check mine.py:attention --fair --cases ")


def test_a_verdict_is_an_object_of_a_function_in_a_file(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In ten lines, as docs/your-kernel.md has it."""
    monkeypatch.syspath_prepend(str(folder))
    sys.modules.pop("mine", None)  # other tests have a module of that name
    attention = importlib.import_module("mine").attention
    del sys.modules["mine"]
    checked = tiebreak.check(attention, cases="tied_maxima[k=2]", heads=64, seed=2, workers=0)
    assert str(checked).startswith(f"{BIASED_ON_ONE}, by its own rounding\n")
    assert (checked.ok, checked.biased, checked.seed, checked.failed) == (True, 1, 2, ())
    assert checked.plan is not None
    assert checked.plan.plans[0] == "flash@paper,tile=one"
    assert checked.versions["torch"] == torch.__version__
    assert not (folder / "out").exists()


def test_a_function_without_a_file_is_checked_in_this_process_alone(tmp_path: Path) -> None:
    names: dict[str, Any] = {}
    exec(KERNEL, names)
    with pytest.raises(UsageError, match=r"in_process=True$"):
        tiebreak.check(names["attention"])
    checked = tiebreak.check(names["attention"], in_process=True, cases="no_tail", heads=16)
    words = "no failure input was run, nothing is known of its bias; accuracy, bound"
    assert checked.headline.startswith(f"PASS: attention on cpu, bf16: {words}")
    with pytest.raises(UsageError, match=r"^tiebreak.check has no heds; it has backend, "):
        tiebreak.check(names["attention"], heds=16)  # type: ignore[call-arg]


def test_optional_parameters_that_no_call_gives_are_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "mine.py").write_text(KERNEL.replace("scale=None", "scale=None, dropout_p=0.0, alpha=None"))
    assert check.main(["mine.py:attention", "--cases", "random", *HEADS, "-n", "0"]) == 0
    assert "  not given   dropout_p, alpha (dropout is not judged)" in capsys.readouterr().out.splitlines()
