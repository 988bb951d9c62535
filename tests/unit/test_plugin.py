"""The matrix as a pytest plug-in: what it runs, prints, keeps and refuses."""

import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tiebreak.backends.backend import CPU, EMULATION, Backend
from tiebreak.cases.feature_cases import EVERY
from tiebreak.matrix import plugin
from tiebreak.reports.records import store
from tiebreak.reports.records.record import CRASHED, PASSED, Run

ROOT = Path(__file__).parents[2]
MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

HEADER = """
import os
import torch

def plain(q, k, v, *, causal=False, scale=None):
    s = q.float() @ k.float().mT * scale
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    return (s.softmax(-1) @ v.float()).to(q.dtype)
"""
# Behind a kernel: a file of one changes the backend that it runs on, on the controller and on the workers.
DEVICE = """
import sys
from pathlib import Path
from tiebreak.backends.backend import CPU
vars(CPU).update(
    poisoned=lambda: getattr(sys, "broken", False),
    worker_environment=lambda worker: {{"ABACUS": f"bead-{{worker}}"}},
    set_up=lambda: Path({folder!r}, "set-up-" + os.environ.get("ABACUS", "on-the-controller")).touch(),
    describe=lambda: {{"beads": 7}},
)
"""
ODD_QUERIES = 7  # of the case random_odd: by them a kernel knows the case

FEW = ("--backend", "emulation", "--kernels", "standard,flash@paper", "--cases", "tied_maxima[k=2],random,no_tail")
QUICK = (*FEW, "--heads", "16")
PLAN = ("--plan", "fp32_inside")  # of `plain`: to find it takes longer than a cell


def user_kernel(pytester: pytest.Pytester, body: str = "return plain(q, k, v, causal=causal, scale=scale)") -> str:
    """A file with a function `mine`, written around `plain`; what --kernel takes."""
    lines = "".join(f"    {line}\n" for line in body.strip().splitlines())
    source = f"{HEADER}\ndef mine(q, k, v, *, causal=False, scale=None):\n{lines}"
    pytester.path.joinpath("mine.py").write_text(source, encoding="utf-8")
    return "mine.py:mine"


def outcomes(run: Run) -> dict[str, str]:
    return {record.case: record.outcome for record in run.records}


class TestCells:
    def test_ids_are_readable_and_collecting_writes_nothing(self, matrix: MatrixRun, pytester: pytest.Pytester) -> None:
        result = matrix(*FEW, "--collect-only", "-q")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["*::test_cell[[]emulation-flash@paper-tied_maxima[[]k=2]-bf16]"])
        assert list(pytester.path.iterdir()) == []

    def test_on_workers_records_are_the_same_and_cells_of_a_case_stay_together(
        self, matrix: MatrixRun, kept: Kept
    ) -> None:
        places: dict[str, set[str]] = {}

        class Spy:
            def pytest_runtest_logreport(self, report: Any) -> None:
                places.setdefault(report.nodeid.split("-")[2], set()).add(report.node.gateway.id)

        both = ("--backend", "emulation,cpu", "--kernels", "flash@paper,fair", "--heads", "32")
        cases = ("--cases", "tied_maxima[k=2],no_tail,random_odd")
        assert matrix(*both, *cases, "--save", "n0").ret == 0
        assert matrix(*both, *cases, "-n", "2", "--save", "n2", plugins=[Spy()]).ret == 0
        alone = kept("n0").records
        assert len(alone) == 12
        assert alone == kept("n2").records
        assert len(places) == 3
        assert all(len(workers) == 1 for workers in places.values())
        assert len(set.union(*places.values())) == 2

    def test_no_name_has_the_ids_dash(self) -> None:
        names = [case.name for case in EVERY]
        names += [kernel.name for backend in (EMULATION, CPU) for kernel in backend.kernels()]
        assert not [name for name in names if "-" in name]


class TestBadInput:
    """Exit code 2, one line that names the flag and what it takes, and nothing written."""

    KNOWN = (
        ("--fair", "--fair .*needs --kernel"),
        ("--kernel mine.py:fair --kernels fair", "--kernel mine.py:fair: --kernels has a fair too; give your function"),
        ("--kernel mine", r"--kernel mine: no adapter 'mine': .*known are aiter, .*path/to/file.py:function.*"),
        ("--kernel mine.py:N", r"--kernel mine.py:N: .*no function 'N'.* fair, mine, plain"),
        ("--kernel exits.py:f", r"--kernel exits.py:f: .*SystemExit: usage: exits.py FILE \(exits.py, line 1\)"),
        ("--kernel ends.py:f", r"--kernel ends.py:f: .*Exit: bye \(ends.py, line 2\)"),
        ("--out mine.py", "--out: cannot write records to mine.py: .*; name another folder"),
        ("--save main", "--save main: out/main.json is a folder; take another name"),
        ("--save ..", r"--save \.\.: expected a plain name.*"),
        ("--heads 40", "--heads 40: expected at most 16 or a multiple of 16"),
        ("--heads=-1", "--heads -1: expected a positive integer"),
        ("--cell-timeout=soon", "--cell-timeout soon: expected a positive number of seconds"),
    )

    @pytest.fixture(autouse=True)
    def files(self, pytester: pytest.Pytester) -> set[Path]:
        user_kernel(pytester)
        Path("out", "main.json").mkdir(parents=True)
        with (pytester.path / "mine.py").open("a") as file:
            file.write("\nN = 3\n\ndef fair(q, k, v):\n    return q\n")
        (pytester.path / "ends.py").write_text("import pytest\npytest.exit('bye')\n")
        (pytester.path / "exits.py").write_text("raise SystemExit('usage:\\n  exits.py FILE')\n")
        return set(pytester.path.iterdir())

    @pytest.mark.parametrize(("options", "message"), KNOWN)
    def test_it_is_refused(self, matrix: MatrixRun, options: str, message: str, files: set[Path]) -> None:
        result = matrix(*options.split(), "-n", "0")
        assert result.ret == 2
        lines = [line for line in (*result.outlines, *result.errlines) if line]
        assert len(lines) == 1
        assert re.fullmatch(f"Exit: {message}.*", lines[0])
        assert {path for path in Path.cwd().iterdir() if path.name != "__pycache__"} == files


class TestUserKernel:
    def test_one_that_raises_fails_its_own_cell_alone(
        self, matrix: MatrixRun, kept: Kept, pytester: pytest.Pytester
    ) -> None:
        spec = user_kernel(
            pytester, 'if causal:\n    raise RuntimeError("no causal mask\\nhere")\nreturn plain(q, k, v, scale=scale)'
        )
        result = matrix(
            "--kernel", spec, *PLAN, *["--cases", "random,random_causal,random_odd", "--heads", "16", "--seed", "3"]
        )
        assert result.ret == 1
        assert outcomes(kept()) == {"random": PASSED, "random_causal": CRASHED, "random_odd": PASSED}
        (reason,) = (record.reasons[0] for record in kept().records if record.case == "random_causal")
        error = r"RuntimeError: no causal mask \(mine\.py, line \d+\)"
        assert re.fullmatch(error, reason)
        result.stdout.re_match_lines([rf"\s*{error}"])
        result.stdout.no_fnmatch_line("*Traceback*")

    @pytest.mark.parametrize("workers", ["0", "auto"])
    def test_one_that_leaves_the_device_unusable_takes_no_other_cell_with_it(
        self, matrix: MatrixRun, kept: Kept, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, workers: str
    ) -> None:
        """As a GPU's sticky error: in the process that has it all later calls fail.

        What a backend says of its device is heeded: how many workers it carries, what each sees, its set-up.
        """
        monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
        monkeypatch.setattr(sys, "broken", False, raising=False)
        monkeypatch.setitem(vars(CPU), "worker_limit", lambda: 1)
        for changed in ("poisoned", "worker_environment", "set_up", "describe"):  # by the kernel's file, here too
            monkeypatch.setitem(vars(CPU), changed, getattr(CPU, changed))
        spec = user_kernel(
            pytester,
            f"""
            if q.shape[-2] == {ODD_QUERIES} or getattr(sys, "broken", False):
                sys.broken = True
                raise RuntimeError("an illegal memory access was encountered")
            return plain(q, k, v, causal=causal, scale=scale)
            """.replace("\n            ", "\n"),
        )
        with (pytester.path / "mine.py").open("a", encoding="utf-8") as file:
            file.write(DEVICE.format(folder=str(pytester.path)))
        cases = ("random_odd", "random", "random_causal", "no_tail")
        result = matrix("--kernel", spec, *PLAN, "--cases", ",".join(cases), "--heads", "16", "-n", workers)
        assert result.ret != 0
        run = kept()
        spoiled = next(record for record in run.records if record.outcome == CRASHED)
        assert spoiled.case == "random_odd"
        assert "RuntimeError: an illegal memory access was encountered" in spoiled.reasons[0]
        assert run.platform["beads"] == 7
        set_up = {path.name for path in pytester.path.glob("set-up-*")}
        if workers == "0":
            assert (len(run.records), run.complete) == (1, False)
            result.stdout.fnmatch_lines(["*the device is beyond use for this process; -n 1 puts another in its place*"])
            assert set_up == {"set-up-on-the-controller"}
        else:
            assert {record.case for record in run.records if record.outcome == PASSED} == set(cases[1:])
            assert run.complete
            assert result.parseoutcomes()["failed"] == 1
            result.stdout.fnmatch_lines(["*1 worker [[]*"])
            assert set_up == {"set-up-on-the-controller", "set-up-bead-0", "set-up-bead-1"}

    def test_cells_that_no_worker_is_left_for_are_in_the_records_as_crashed(
        self, matrix: MatrixRun, kept: Kept, pytester: pytest.Pytester
    ) -> None:
        """As where someone allows no worker to be started anew."""
        cases = [case.name for case in EVERY[:3]]
        options = ("--kernel", user_kernel(pytester, "os._exit(3)"), "--cases", ",".join(cases), "--heads", "16")
        result = matrix(*options, "-n", "1", "--max-worker-restart", "0")
        assert result.ret != 0
        run = kept()
        assert outcomes(run) == dict.fromkeys(cases, CRASHED)
        reasons = [record.reasons[0] for record in run.records]
        assert {reason.partition(":")[0] for reason in reasons} == {"its process died", "never run"}
        lost = sum("never run: too many of the workers died before its turn" in reason for reason in reasons)
        result.stdout.fnmatch_lines([f"failed: {lost} cells never ran: too many workers died"])

    def test_a_fallen_cell_is_rerun_by_the_command_that_is_printed(
        self, matrix: MatrixRun, kept: Kept, pytester: pytest.Pytester
    ) -> None:
        """As it stands there, by a shell that stands where the first run stood."""
        spec = user_kernel(pytester, "return plain(q, k, v, causal=causal, scale=scale) * 1.5")
        cases = "random,tied_maxima[k=2]"
        first = matrix("--kernel", spec, "--plan", "fused", "--cases", cases, "--heads", "16")
        assert first.ret == 1
        printed = [line.split("rerun: ")[1] for line in first.outlines if line.startswith("    rerun: ")]
        command = next(line for line in printed if "tied_maxima" in line)
        lean = f"{command} --save again -k test_cell -p no:cacheprovider"
        again = subprocess.run(lean, shell=True, capture_output=True, text=True, check=False)
        assert again.returncode == 1, again.stdout + again.stderr
        assert re.search(r"^=.* 1 failed\b", again.stdout, re.MULTILINE)
        assert kept("again").records == tuple(each for each in kept().records if each.case == "tied_maxima[k=2]")

    @pytest.mark.parametrize(
        ("folder", "words"),
        [
            (ROOT, "tests/matrix"),
            (ROOT / "docs", "../tests/matrix"),
            (ROOT.parent, "-p tiebreak.matrix.plugin --pyargs tiebreak.matrix"),
        ],
    )
    def test_outside_a_clone_no_command_says_where_it_lies(
        self, monkeypatch: pytest.MonkeyPatch, folder: Path, words: str
    ) -> None:
        """A baseline in a user's repository has a command in every record."""
        monkeypatch.chdir(folder)
        config = pytest.Config(
            pytest.PytestPluginManager(),
            invocation_params=pytest.Config.InvocationParams(args=(), plugins=None, dir=folder),
        )
        assert " ".join(plugin._cells_path(config)) == words


class TestInterruption:
    def test_what_is_done_is_kept(
        self, interrupted: Callable[..., tuple[int, str]], kept: Kept, pytester: pytest.Pytester
    ) -> None:
        """With workers; tests/reports/test_pytest_gate.py has it without."""
        # The pipe's other end is never written to: the cell waits until Ctrl-C.
        body = f"""
if q.shape[-2] == {ODD_QUERIES}:
    open("started", "wb").close()
    os.mkfifo("never")
    open("never", "rb")
return plain(q, k, v, causal=causal, scale=scale)
"""
        spec = user_kernel(pytester, body)
        # One group: the cell that waits comes after the one that is done.
        cases = ("--cases", "random_odd,random,random_causal", "--heads", "16", "-n", "1")
        code, output = interrupted("--kernel", spec, *PLAN, *cases)
        assert code == pytest.ExitCode.INTERRUPTED, output
        run = kept()
        assert not run.complete
        assert "random_odd" not in outcomes(run)
        assert set(outcomes(run).values()) <= {PASSED}
        assert "INCOMPLETE" in output
        assert "Traceback" not in output
        assert "INTERNALERROR" not in output


class TestReport:
    def test_records_have_a_name_in_a_folder_and_header_and_table_say_what_ran_and_what_cannot_also_without_xdist(
        self, matrix: MatrixRun, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        absent = replace(CPU, name="abacus", unavailable=lambda: "its beads are stuck")
        backends: Mapping[str, Backend] = {backend.name: backend for backend in (EMULATION, CPU, absent)}
        monkeypatch.setattr("tiebreak.matrix.selection.BACKENDS", backends)
        words = ("--kernels", "standard", "--cases", "random,no_tail", "--heads", "16")
        result = matrix(*words, "--save", "main", "--out", "some/where", "-p", "no:xdist")
        assert result.ret == 0
        result.stdout.fnmatch_lines(["platform: *, level *, torch *", "backend abacus can't run: its beads are stuck"])
        result.stdout.fnmatch_lines(["*= tiebreak =*", "emulation, bf16", "case*", "*", "4 cells: *"])
        result.stdout.fnmatch_lines(["backend abacus did not run: *", "records: some/where/main.json"])
        assert [path.name for path in (pytester.path / "some" / "where").iterdir()] == ["main.json"]
        run = store.read(pytester.path / "some" / "where" / "main.json")
        assert run.complete
        assert run.options["heads"] == "16"
        assert run.unavailable == {"abacus": "its beads are stuck"}
        assert set(run.seconds) == {record.id for record in run.records}


class TestWorkers:
    def test_auto_asks_for_cores_and_memory_and_torch_computes_in_one_thread(
        self, matrix: MatrixRun, pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(plugin, "worker_count", lambda memory: int(memory == 2.0))
        monkeypatch.delenv("PYTEST_XDIST_AUTO_NUM_WORKERS", raising=False)
        torch.set_num_threads(2)
        assert matrix(*QUICK, "--collect-only").ret == 0
        assert plugin.pytest_xdist_auto_num_workers(pytestconfig) == 1
        monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "5")
        assert plugin.pytest_xdist_auto_num_workers(pytestconfig) is None  # xdist's own variable wins
        assert torch.get_num_threads() == 1  # however many cores a machine has, sums are added in one order

    def test_another_way_of_dist_is_left_to_xdist(self, pytester: pytest.Pytester) -> None:
        config = pytester.parseconfig("-p", "tiebreak.matrix.plugin", "--dist", "worksteal")
        assert plugin.pytest_xdist_make_scheduler(config, None) is None
