"""A kernel that hangs, dies or talks without end: told apart, each in its own cell, and every other cell runs."""

import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tiebreak.backends.backend import CPU
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.external.isolation import Clock
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix import watch
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.record_collector import RecordCollector
from tiebreak.matrix.watch import Watchdog, timed_out
from tiebreak.matrix.workbench import Settings
from tiebreak.reports.gate.expected import Excuses
from tiebreak.reports.records.record import CRASHED, MEASURED, PASSED, TIMED_OUT, UNDECIDED, Run

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]
Collecting = Callable[..., RecordCollector]

CASES = ("--cases", "random,random_odd,random_causal", "--heads", "16", "--backend", "cpu")
# A PyDLL holds Python's lock while it sleeps, so that no thread of Python could end it.
KERNEL = """
import ctypes
import os
import torch

def mine(q, k, v, *, causal=False, scale=None):
    if q.shape[2] == 7:
        ctypes.PyDLL(None).sleep(60)
    if causal:
        os.kill(os.getpid(), 11)
    return (q.float() @ k.float().mT * scale).softmax(-1).matmul(v.float()).to(q.dtype)

def talks(q, k, v):
    print("word " * 10**6)
    return q[:, :, :1]
"""
DUMP = """Timeout (0:01:02.500000)!
Thread 0x00007fab36bff6c0 (most recent call first):
  File "/lib/gateway.py", line 534 in read

Thread 0x00007fab37fe4b80 (most recent call first):
  File "/my/attention.py", line 8 in hang
  File "/lib/kernels/external/call.py", line 159 in _one
"""
SPENT = """60.0
Thread 0x00007fab36bff6c0 (most recent call first):
  File "/lib/gateway.py", line 534 in read

Current thread 0x00007fab37fe4b80 (most recent call first):
  File "{torch}/functional.py", line 5 in softmax
  File "/my/attention.py", line 9 in spins
"""


@pytest.fixture
def mine(pytester: pytest.Pytester) -> str:
    (pytester.path / "mine.py").write_text(KERNEL)
    return "mine.py:mine"


def test_a_kernel_that_hangs_or_dies_has_its_own_outcome_and_every_cell_its_record(
    matrix: MatrixRun, kept: Kept, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_WALL", 10)  # the kernel's file changes it, here and on the workers
    Path("mine.py").write_text(f"from tiebreak.matrix import watch\nwatch._WALL = 1{KERNEL}")  # sleeping takes no CPU
    both = ("--kernel", mine, "--plan", "fp32_inside", "--kernels", "standard")
    result = matrix(*both, *CASES, "--cell-timeout", "4", "-n", "1")
    assert result.ret == 1
    assert result.stdout.str().count("replacing crashed worker") == 3, "one that hangs has a second try, no other"
    run = kept()
    assert run.complete
    of_mine, others = ({record.case: record for record in run.records if record.kernel == name}
                       for name in ("mine", "standard"))  # fmt: skip
    assert {case: record.outcome for case, record in of_mine.items()} == {
        "random": PASSED,
        "random_odd": TIMED_OUT,
        "random_causal": CRASHED,
    }
    assert others.keys() == of_mine.keys()
    assert {record.outcome for record in others.values()} <= {PASSED, MEASURED}
    late = of_mine["random_odd"]
    assert late.passed("in_time") is False
    assert "twice: no result after 4 s; it was in mine (mine.py, line 9)" in late.reasons[0]
    died = "its process died: killed by a signal, out of memory, or ended by the kernel itself"
    assert of_mine["random_causal"].reasons == (died,)


@pytest.fixture
def collecting(pytester: pytest.Pytester) -> Iterator[Collecting]:
    """Makes what collects the records of some cells; the words of its workers are gone in the end."""
    made: list[RecordCollector] = []

    def make(*cells: Cell) -> RecordCollector:
        config = pytester.parseconfig("-p", "tiebreak.matrix.plugin")
        made.append(RecordCollector(config, cells, Settings(1, 16), {}, Excuses(())))
        return made[-1]

    yield make
    for collector in made:
        collector.pytest_unconfigure()


def died(cell: Cell, worker: str) -> pytest.TestReport:
    """What xdist reports of the cell that a worker ran as it died."""
    name = f"a.py::test_cell[{cell.id}]"
    return pytest.TestReport(
        name, ("a.py", None, "a.py"), {}, "failed", f"worker '{worker}' crashed while running '{name}'", "call"
    )


def test_a_kernel_that_hangs_is_given_up(collecting: Collecting) -> None:
    """Workers that run already learn of it; other kernels go on, and one in time begins anew."""
    kernels = [replace(composed_kernel(name), external=True) for name in ("flash@paper", "standard")]
    mine, other = ([Cell(CPU, kernel, OneCall(case), BF16) for case in SCRIPTED[:9]] for kernel in kernels)
    collector = collecting(*mine, *other)
    worker = Watchdog.of(Watchdog.of({}, None).worker_input(collector.words / "gw9"), None)
    (collector.words / "gw0").write_text(DUMP)
    for cell in mine[:5]:
        assert worker.given_up(mine[8]) is None
        assert collector.another_try("gw0", f"a.py::test_cell[{cell.id}]")
    where = "no result after 62.5 s; it was in hang (attention.py, line 8)"
    assert worker.given_up(mine[8]) == f"not run: 5 of its cells in a row had timed out: {where}"
    assert worker.given_up(other[0]) is None
    collector.pytest_runtest_logreport(died(mine[5], "gw1"))  # it has died, and in time
    assert worker.given_up(mine[8]) is None


def test_every_cell_of_a_kernel_that_was_given_up_has_its_record(
    matrix: MatrixRun, kept: Kept, mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Watchdog, "given_up", lambda watch, cell: "not run: that is why")
    assert matrix("--kernel", mine, *CASES, "-n", "0").ret == 1
    assert [(record.outcome, record.reasons) for record in kept().records] == [
        (TIMED_OUT, ("not run: that is why",))
    ] * 3


def test_where_a_kernel_was_is_read_off_the_thread_that_ran_it(tmp_path: Path) -> None:
    file = tmp_path / "gw0"
    assert timed_out(file) is None
    file.write_text("60.0\n")
    assert timed_out(file) is None
    file.write_text(DUMP)
    assert timed_out(file) == ("no result after 62.5 s; it was in hang (attention.py, line 8)", True)
    file.write_text(DUMP.replace("call.py", "workbench.py"))
    assert timed_out(file) == ("no result after 62.5 s; it was in hang (attention.py, line 8)", False)
    file.write_text(SPENT.format(torch=Path(torch.__file__).parent))
    assert timed_out(file) == ("no result after 60 s of CPU time; it was in spins (attention.py, line 9)", True)


def test_a_cell_fails_by_its_time_only_the_second_time_and_in_the_users_code(collecting: Collecting) -> None:
    """Where the user's code was once, and the suite's the second time, is undecided of the kernel."""
    cells = [Cell(CPU, composed_kernel("flash@paper"), OneCall(case), BF16) for case in SCRIPTED[:4]]
    collector = collecting(*cells)
    for cell, first, second in zip(cells[:3], (None, DUMP, DUMP), (DUMP, DUMP, "suite's"), strict=True):
        word = collector.words / "gw0"
        if first is not None:
            word.write_text(first)
            assert collector.another_try("gw0", f"a.py::test_cell[{cell.id}]")
            assert not collector.another_try("gw0", f"a.py::test_cell[{cell.id}]"), "there are two tries"
        word.write_text(DUMP.replace("call.py", "workbench.py") if second == "suite's" else second)
        collector.pytest_runtest_logreport(died(cell, "gw0"))
    records = [collector.records[cell.id] for cell in cells[:3]]
    assert [record.outcome for record in records] == [UNDECIDED, TIMED_OUT, UNDECIDED]
    assert [record.passed("in_time") for record in records] == [None, False, None]
    assert len(collector.late["flash@paper"]) == 5, "it may hang in each of its cells, wherever it was"
    assert records[1].reasons == ("twice: no result after 62.5 s; it was in hang (attention.py, line 8)",)
    (collector.words / "gw0").unlink()
    assert not collector.another_try("gw0", f"a.py::test_cell[{cells[3].id}]"), "it died, and in time"


def test_the_clock_counts_the_cpu_time_of_calls_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = iter([7.5])  # of the timer, when it is stopped
    seen: list[float] = []

    def setitimer(which: int, seconds: float) -> tuple[float, float]:
        seen.append(seconds)
        return 0.0 if seconds else next(left), 0.0

    monkeypatch.setattr(signal, "setitimer", setitimer)
    clock = Clock()
    with clock.running():
        assert seen == [], "without a limit"
    with (tmp_path / "word").open("w") as file, clock.limited(10.0, file):
        with clock.running(), clock.running():
            assert seen == [10.0]
        assert (seen, clock.left) == ([10.0, 0.0], 7.5)
    assert clock.left is None


def test_what_a_kernel_prints_is_cut_and_a_time_limit_without_workers_has_no_effect(
    matrix: MatrixRun, mine: str
) -> None:
    line, options = "--cell-timeout has no effect without workers", ("--cases", "random", "--heads", "16", "-n", "0")
    result = matrix("--kernel", mine.replace(":mine", ":talks"), *options, "--cell-timeout", "9")
    assert result.ret == 1
    assert line in result.stdout.str()
    assert 1_000 < len(result.stdout.str()) < 30_000
    assert line not in matrix("--kernels", "standard", *options, "--collect-only").stdout.str()
