"""A time for a whole run: what comes first, what ends with it, and what is left out."""

import faulthandler
import os
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path

import pytest

from tiebreak.matrix import watch
from tiebreak.matrix.scheduling import seconds_of
from tiebreak.matrix.watch import BudgetSpentError, Watch
from tiebreak.reports.records.record import NO_TIME, Run

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

KERNEL = """
def mine(q, k, v, *, scale=None):
    return (q.float() @ k.float().mT * scale).softmax(-1).matmul(v.float()).to(q.dtype)
"""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60.0), ("60s", 60.0), ("1.5m", 90.0), ("1h", 3600.0)]
    + [(text, None) for text in ("", "0", "0.5", "-3", "inf", "nan", "1d", "60S", "1e3", "s")],
)
def test_a_budget_is_a_time_of_a_second_or_more(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_cells_run_in_the_order_of_what_they_tell_until_the_budget_is_spent(
    pytester: pytest.Pytester, matrix: MatrixRun, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.path / "mine.py").write_text(KERNEL)
    clock = count()
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)  # which has a clock of its own
    monkeypatch.setattr(watch, "now", lambda: next(clock) / 4)  # a look at it takes 0.25 s
    cases = ("--cases", "single_maximum,no_tail,random,interleaved,strided_views", "--heads", "16")
    matrix("--kernel", "mine.py:mine", *cases, "--budget", "1", "-n", "0")
    run = kept()
    done = [record.case for record in run.records if record.skipped != NO_TIME]
    assert set(done) == {"strided_views", "random", "interleaved"}
    assert run.complete
    assert run.options["budget"] == "1"


def test_the_deadline_ends_a_cell_in_its_midst(monkeypatch: pytest.MonkeyPatch) -> None:
    """The alarm is raised by hand: no test waits for a clock."""
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    before = signal.getsignal(signal.SIGALRM)
    with pytest.raises(BudgetSpentError), Watch.of({}, 9.0, 60.0).over(None):  # type: ignore[arg-type]
        os.kill(os.getpid(), signal.SIGALRM)
    assert signal.getsignal(signal.SIGALRM) is before


def test_workers_share_the_deadline_and_what_hangs_ends_soon_after_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walls: list[float] = []
    monkeypatch.setattr(watch, "_WALL", 10)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda wall, **_: walls.append(wall))
    monkeypatch.setattr(watch, "now", lambda: 100.0)
    begun = Watch.of({}, None, 60.0)
    monkeypatch.setattr(watch, "now", lambda: 150.0)
    for seconds in (6.0, 0.2):
        worker = Watch.of(begun.worker_input(tmp_path / "gw0"), seconds)
        with worker.over(None):  # type: ignore[arg-type]
            assert worker.deadline == pytest.approx(154.0)  # a tenth is for the start and the end
    assert walls == pytest.approx([9.0, 2.0])
