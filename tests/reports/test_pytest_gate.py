"""The gate, JUnit's XML and GitHub's summary as pytest gives them, with workers and without."""

import json
import os
import signal
import xml.etree.ElementTree as ET
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from _pytest.runner import runtestprotocol

from tiebreak.backends.registry import BACKENDS
from tiebreak.defects.mutations import GONE, edited
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Estimate, Run
from tiebreak.reports.schemas import schema_of

MATRIX = Path(__file__).parents[1] / "matrix"
QUICK = ["--backend", "cpu", "--kernels", "flash@paper", "--heads", "16", "--out", "out"]
CASES = ["--cases", "tied_maxima[k=2],random"]
IDS = ["cpu-flash@paper-tied_maxima[k=2]-bf16", "cpu-flash@paper-random-bf16"]
# And cases; with a plan, for to find it takes longer than a cell.
OWN = ["--kernel", "mine.py:attention", "--plan", "fp32_inside", "--heads", "16", "--out", "out"]
KERNEL = """
import pytest
import torch

def attention(q, k, v, *, causal=False, scale=None):
    {body}
    s = q.float() @ k.float().mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ v.float()).to(q.dtype)
"""


@pytest.fixture
def matrix(matrix: Callable[..., pytest.RunResult]) -> Callable[..., pytest.RunResult]:
    """Runs two quick cells of the matrix in this process, its workers, if any, in theirs."""

    def call(
        *arguments: str, workers: int = 0, cells: Sequence[str] = (*QUICK, *CASES), plugins: Sequence[object] = ()
    ) -> pytest.RunResult:
        return matrix("-n", str(workers), *cells, *arguments, plugins=plugins)

    return call


Matrix = Callable[..., pytest.RunResult]


def change(path: Path, steps: Sequence[str | int], value: Any) -> None:
    """Change one value in a file of records."""
    path.write_text(json.dumps(edited(json.loads(path.read_text(encoding="utf-8")), tuple(steps), value)))


@pytest.fixture
def baseline(matrix: Matrix) -> Path:
    """A baseline of the two cells, made without workers."""
    assert matrix("--baseline", "base.json", "--update-baseline").ret == 0
    return Path("base.json").absolute()


def check_junit(ids: Sequence[str]) -> None:
    """JUnit's XML has these cells, with the numbers and not with the whole record."""
    properties = {
        case.get("name"): {element.get("name"): element.get("value") for element in case.iter("property")}
        for case in ET.parse("junit.xml").getroot().iter("testcase")
    }
    assert set(properties) == {f"test_cell[{cell}]" for cell in ids}
    told = properties[f"test_cell[{IDS[0]}]"]
    (record,) = (cell for cell in store.read(Path("out/last.json")).records if cell.id == IDS[0])
    bias = record.measures["bias"]
    assert isinstance(bias, Estimate)
    expected = {
        "bias": bias.mean,
        "bias_half_width": bias.half_width,
        "max_ulps": record.measures["max_ulps"],
        "verdict": "biased",
        "bound_passed": True,
    }
    assert {name: told[f"tiebreak.{name}"] for name in expected} == {name: str(it) for name, it in expected.items()}
    assert {f"tiebreak.{name}_passed" for name in record.answers} <= told.keys()
    assert "tiebreak" not in told


def test_gate_junit_and_narrowing_work_with_workers(matrix: Matrix, baseline: Path) -> None:
    """Narrowed by pytest's own option; tests/unit/test_options.py has the matrix', which are seen before the run."""
    tied = [record.case for record in store.read(baseline).records].index("tied_maxima[k=2]")
    change(baseline, ["records", tied, "case_version"], 0)
    before = baseline.read_bytes()
    words = ["--baseline", "base.json", "--update-baseline", "--junitxml", "junit.xml", "-k", "tied"]
    worse = matrix(*words, workers=1)
    assert worse.ret == 2
    worse.assert_outcomes(passed=1)
    worse.stdout.fnmatch_lines(
        [
            "gate FAILED: 1 cell compared*: 1 regression*",
            "regression  cpu-flash@paper-tied*: not comparable: case_version*",
            "note        1 cell of the baseline NOT compared: outside -k tied*",
            "*base.json: not updated: 1 of its cells lie outside this run's *-k tied*; run all of them, or delete*",
        ]
    )
    assert baseline.read_bytes() == before
    check_junit(IDS[:1])


def test_the_gate_works_without_workers_and_github_gets_the_short_table(
    matrix: Matrix, baseline: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as environment:
        environment.setenv("GITHUB_STEP_SUMMARY", "summary.md")
        assert matrix("--baseline", str(baseline), "--junitxml", "junit.xml").ret == 0
    check_junit(IDS)
    text = Path("summary.md").read_text(encoding="utf-8")
    for told in ("### tiebreak: 2 cells: 2 passed", "| cpu", "### tiebreak: the gate passed (2 cells compared"):
        assert told in text
    change(baseline, ["records", 0, "measures", "max_ulps"], 0.0)
    change(baseline, ["records", 0, "answers", "bound"], GONE)
    worse = matrix("--baseline", str(baseline), "--fail", "max_ulps:0.01")
    assert worse.ret == 1
    worse.stdout.fnmatch_lines([f"gate FAILED: 2 cells compared with {baseline}: 1 regression, 0 better"])
    assert matrix("--baseline", str(baseline), "--fail", "max_ulps:1000").ret == 0
    failed = matrix("--baseline", str(baseline), "-k", "nothing_has_this_name")
    assert failed.ret == 1
    failed.stdout.fnmatch_lines(["gate FAILED: no cell ran*"])


@pytest.mark.parametrize(
    ("cells", "words", "told"),
    [
        ("test_cells.py", ["--deselect", f"tests/matrix/test_cells.py::test_cell[{IDS[0]}]"], "outside --deselect *"),
        (f"test_cells.py::test_cell[{IDS[1]}]", [], "outside what pytest was given*"),
    ],
)
def test_deselected_cells_and_node_ids_narrow_too(
    cells: str, words: list[str], told: str, pytester: pytest.Pytester, baseline: Path
) -> None:
    before, options = baseline.read_bytes(), [*QUICK, *CASES, "--baseline", str(baseline), "--update-baseline", *words]
    ran = pytester.runpytest_inprocess(MATRIX / cells, "-p", "no:cacheprovider", *options, no_reraise_ctrlc=True)
    assert ran.ret == 2
    ran.stdout.fnmatch_lines(["gate passed: 1 cell compared*", f"note        1 cell of * NOT compared: {told}"])
    assert baseline.read_bytes() == before


def test_a_run_that_stopped_fails_and_updates_nothing(matrix: Matrix, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=KERNEL.format(body="pass"))
    cells = [*OWN, "--cases", "random,random_causal"]
    assert matrix("--baseline", "base.json", "--update-baseline", cells=cells).ret == 0
    before = Path("base.json").read_bytes()
    pytester.makepyfile(mine=KERNEL.format(body="if not causal: raise ValueError('no')"))
    refused = matrix("--baseline", "base.json", "--update-baseline", "--maxfail=1", cells=cells)
    assert refused.ret == 2
    refused.stdout.fnmatch_lines(
        [
            "gate FAILED: 1 cell compared*",
            "note        the new run was interrupted: it does not hold",
            "base.json: not updated: the run was interrupted",
        ]
    )
    assert Path("base.json").read_bytes() == before


def test_a_baseline_of_another_platform_is_refused_before_any_work(matrix: Matrix, baseline: Path) -> None:
    change(baseline, ["platform", "cpu"], "Another")
    assert matrix("--baseline", str(baseline), "--across").ret == 0
    Path("out/last.json").unlink()
    refused = matrix("--baseline", str(baseline))
    assert refused.ret == 2
    refused.stderr.fnmatch_lines(["*: platform.cpu: 'Another' in the baseline*--across compares all but bits*"])
    assert not Path("out/last.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--baseline", "none.json"], "*none.json: no such file; with --update-baseline *"),
        (["--fail", "bias:1"], "*--fail means nothing alone: it needs --baseline FILE"),
        (
            ["--baseline", "no.json", "--fail", "bais:1"],
            "*--fail: unknown limit 'bais': known are bias, *, each also NAME_share",
        ),
    ],
)
def test_bad_usage_is_refused_before_any_work(matrix: Matrix, arguments: list[str], message: str) -> None:
    refused = matrix(*arguments)
    assert refused.ret == 2
    refused.stderr.fnmatch_lines([message])
    assert not Path("out/last.json").exists()


@pytest.mark.parametrize(
    ("pause", "expected"), [(0.0, [(1, False), (2, False), (2, True)]), (3600.0, [(2, True)])], ids=["short", "long"]
)
def test_records_are_kept_on_the_way_now_and_then(
    pause: float, expected: list[tuple[int, bool]], matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[tuple[int, bool]] = []
    write = store.write

    def note(run: Run, path: Path) -> None:
        kept.append((len(run.records), run.complete))
        write(run, path)

    monkeypatch.setattr("tiebreak.matrix.record_collector._EVERY", pause)
    monkeypatch.setattr("tiebreak.matrix.record_collector._SHARE", 0.0)
    monkeypatch.setattr(store, "write", note)
    assert matrix().ret == 0
    assert kept == expected


def test_a_baseline_is_not_where_the_run_writes(matrix: Matrix, pytester: pytest.Pytester) -> None:
    """Else the same command would fail once, and then pass."""
    assert matrix().ret == 0
    os.link("out/last.json", "linked.json")
    for path in ("out/../out/last.json", "linked.json"):
        refused = matrix("--baseline", path)
        assert refused.ret == 2
        refused.stderr.fnmatch_lines([f"*--baseline {path}: this run's own records go there; keep the baseline*"])
    refused = matrix("--baseline", "out/new.json", "--save", "new", "--update-baseline")
    assert refused.ret == 2
    assert not Path("out/new.json").exists()


class Rerunning:
    """As a plug-in that runs again what failed: the first report says `rerun`, and the second counts."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        for outcome in ("rerun", None):
            for report in runtestprotocol(item, log=False):
                if outcome is not None and report.failed:
                    report.outcome = outcome  # type: ignore[assignment]
                item.ihook.pytest_runtest_logreport(report=report)
        return True


def test_a_rerun_takes_back_no_failure(matrix: Matrix, pytester: pytest.Pytester) -> None:
    once = "import os; there = os.path.exists('ran'); open('ran', 'w').close()\n    assert there, 'once'"
    pytester.makepyfile(mine=KERNEL.format(body=once))
    ran = matrix(cells=[*OWN, "--cases", "random"], plugins=[Rerunning()])
    assert ran.ret == 1
    ran.assert_outcomes(passed=1)
    ran.stdout.fnmatch_lines(
        ["failed: cpu-attention-random-bf16 crashed at first, whatever came of it when it was run*"]
    )
    assert store.read(Path("out/last.json")).records[0].outcome == "crashed"


def test_a_device_that_was_asked_for_by_name_may_not_be_missing(
    matrix: Matrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = replace(BACKENDS["interpreter"], unavailable=lambda: "triton is not installed")
    monkeypatch.setattr("tiebreak.matrix.selection.BACKENDS", {**BACKENDS, "interpreter": gone})
    cells = ["--cases", "random", "--kernels", "flash@paper", "--heads", "16", "--out", "out"]
    failed = matrix("--backend", "cpu,interpreter", cells=cells)
    assert failed.ret == 1
    failed.assert_outcomes(passed=1)
    failed.stdout.fnmatch_lines(
        ["failed: interpreter was asked for and can't run here: triton is not installed; --allow*"]
    )
    assert matrix("--backend", "cpu,inter*", cells=cells).ret == 0
    assert matrix("--backend", "cpu,interpreter", "--allow-missing", "interpreter", cells=cells).ret == 0
    refused = matrix("--backend", "cpu", "--allow-missing", "cuda", cells=cells)
    assert refused.ret == 2
    refused.stderr.fnmatch_lines(["*--allow-missing cuda: --backend does not name it"])


class AnotherRun:
    """Another run, which writes its records to the same file while this one is going on."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            store.write_text("of another run", Path("out/last.json"))


def test_two_runs_do_not_write_over_each_other(matrix: Matrix) -> None:
    assert matrix().ret == 0
    ran = matrix(plugins=[AnotherRun()])
    assert ran.ret == 0
    assert Path("out/last.json").read_text(encoding="utf-8") == "of another run"
    (other,) = (path for path in Path("out").glob("last-*.json"))
    assert len(store.read(other).records) == 2
    ran.stdout.fnmatch_lines([f"records: {other}, for another run has written out/last.json meanwhile; --save *"])


def test_records_that_a_kernel_removes_are_written_anew_and_no_other_run_is_blamed(
    matrix: Matrix, pytester: pytest.Pytester
) -> None:
    pytester.makepyfile(mine=KERNEL.format(body="import shutil; shutil.rmtree('out', ignore_errors=True)"))
    cells = [*OWN, "--cases", "random"]
    for line in ("records: out/last.json", "records: out/last.json, written anew: *removed what was there"):
        ran = matrix(cells=cells)
        assert ran.ret == 0
        ran.stdout.fnmatch_lines([line])
        assert [path.name for path in Path("out").iterdir()] == ["last.json"]
        assert len(store.read(Path("out/last.json")).records) == 1


def test_a_full_disk_is_told_and_no_file_is_promised(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: Run, path: Path) -> None:
        raise store.UnwritableFolderError(f"cannot write {path}: No space left on device")

    monkeypatch.setattr(store, "write", full)
    ran = matrix()
    assert ran.ret == 2
    ran.stdout.fnmatch_lines(["cannot write out/last.json: No space left on device"])
    ran.stdout.no_fnmatch_line("records: *")


def test_sigterm_keeps_what_is_done_and_says_what_was_not(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=KERNEL.format(body="if causal: import os, signal; os.kill(os.getpid(), signal.SIGTERM)"))
    cells = [*OWN, "--cases", "random,random_causal,random_scaled", "--baseline", "base.json", "--update-baseline"]
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        ran = pytester.inline_run(
            str(MATRIX / "test_cells.py"), "-p", "no:cacheprovider", *cells, no_reraise_ctrlc=True
        )
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert ran.ret == pytest.ExitCode.INTERRUPTED
    run = store.read(Path("out/last.json"))
    assert not run.complete
    assert not Path("base.json").exists()
    ids = [f"cpu-attention-{case}-bf16" for case in ("random", "random_causal", "random_scaled")]
    assert ([record.id for record in run.records], run.running, run.not_run) == ([ids[0]], (ids[1],), (ids[2],))


def test_a_time_out_is_an_outcome_of_its_own(matrix: Matrix, pytester: pytest.Pytester) -> None:
    pytester.makepyfile(mine=KERNEL.format(body='pytest.fail("Timeout (>1.0s) from pytest-timeout.")'))
    assert matrix(cells=[*OWN, "--cases", "random"]).ret == 1
    (record,) = store.read(Path("out/last.json")).records
    assert record.outcome == "timed_out"
    assert record.reasons[0].endswith("Failed: Timeout (>1.0s) from pytest-timeout.")


def test_every_file_that_the_matrix_writes_fits_the_schema(matrix: Matrix) -> None:
    cells = ["--backend", "emulation", "--kernels", "flash@paper,flash@fused", *CASES, "--heads", "16", "--out", "out"]
    assert matrix(cells=cells).ret == 0
    plain = json.loads(Path("out/last.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema_of("records")).validate(plain)
    drawn = {record["case"]: record.get("evidence", {}).keys() for record in plain["records"]}
    assert drawn == {"tied_maxima[k=2]": {"histogram", "trace"}, "random": set()}
