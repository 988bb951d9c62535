"""A time for a run: what its cells cost, what comes first, what ends with it, and what is left out."""

import faulthandler
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

from tiebreak.backends.registry import BACKENDS
from tiebreak.matrix import options, watch
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.options import OPTIONS
from tiebreak.matrix.scheduling import ORDER, beyond, cost, expected, rank, seconds_of
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.watch import Budget, BudgetSpentError, Progress, Watchdog
from tiebreak.reports.records.record import NO_TIME, Run

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

KERNEL = """
def mine(q, k, v, *, scale):
    return (q.float() @ k.float().mT * scale).softmax(-1).matmul(v.float()).to(q.dtype)
"""


@pytest.fixture(scope="module")
def users(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Mapping[str, Cell]]:
    """Gives the cells of a user's kernel on a backend, by their cases."""
    file = tmp_path_factory.mktemp("users") / "mine.py"
    file.write_text(KERNEL)
    chosen, _ = cells(Selection("cpu", kernel=(f"{file}:mine",)))
    return lambda name: {cell.experiment.name: replace(cell, backend=BACKENDS[name]) for cell in chosen}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("60", 60.0), ("60s", 60.0), ("1.5m", 90.0), ("1h", 3600.0)]
    + [(text, None) for text in ("", "0", "0.5", "-3", "inf", "nan", "1d", "60S", "1e3", "s")],
)
def test_a_budget_is_a_time_of_a_second_or_more(text: str, seconds: float | None) -> None:
    assert seconds_of(text) == seconds


def test_what_every_cell_costs_is_known_before(users: Callable[[str], Mapping[str, Cell]]) -> None:
    known = {cell.experiment.name for cell in cells(Selection("emulation,cpu", cases="*"))[0]} | users("cpu").keys()
    assert users("cpu").keys() <= ORDER.keys()
    assert {name for name in ORDER if "+" not in name and "[" not in name} <= known
    mine = users("interpreter")["no_tail"]
    other = replace(mine, experiment=users("cpu")["train_runaway"].experiment)
    assert cost(users("cpu")["no_tail"]) < cost(mine) < cost(other)
    joined = replace(mine.experiment.case, name="no_tail+window")
    assert cost(replace(mine, experiment=replace(mine.experiment, case=joined))) == cost(mine)  # type: ignore[type-var]


@pytest.mark.parametrize("slow", ["interpreter", "ptx"])
def test_a_slow_backend_gets_the_list_that_tells_most(users: Callable[[str], Mapping[str, Cell]], slow: str) -> None:
    mine, seconds = list(users(slow).values()), BACKENDS[slow].budget
    left_out = beyond(mine)
    listed = [cell for cell in mine if cell.id not in left_out]
    assert seconds is not None
    assert sum(map(expected, listed)) < seconds < sum(map(expected, mine))
    assert {cell.experiment.name for cell in listed} >= {"tied_maxima[k=2]", "random", "other_parameters"}
    assert not beyond(users("cpu").values())
    two = [*mine, *(replace(cell, kernel=replace(cell.kernel, name="other")) for cell in mine)]
    assert len(beyond(two)) == 2 * len(left_out), "each kernel has a list of its own"


@pytest.mark.parametrize(
    ("given", "default"),
    [({"kernel": ["mine.py"]}, True), ({"kernel": ["mine.py"], "dtype": "fp16", "fair": True}, True), ({}, False)]
    + [
        ({"kernel": ["mine.py"], name: "x"}, False)
        for name in ("cases", "experiments", "budget", "baseline", "keyword")
    ],
)
def test_only_a_check_as_it_comes_has_a_budget_by_default(given: Mapping[str, object], default: bool) -> None:
    values = {**{option.dest: option.default for option in OPTIONS.values()}, **given}
    assert options.is_default(values.get) is default


def test_cells_run_in_the_order_of_what_they_tell_until_the_budget_is_spent(
    pytester: pytest.Pytester, matrix: MatrixRun, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out fails nothing: a look at the clock takes 0.25 s, and no cell takes any."""
    (pytester.path / "mine.py").write_text(KERNEL)
    clock = count()
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)  # which has a clock of its own
    monkeypatch.setattr(watch, "now", lambda: next(clock) / 4)
    monkeypatch.setattr(watch, "cpu", lambda: 0.0)
    cases = ("--cases", "single_maximum,no_tail,random,interleaved,strided_views", "--heads", "16")
    result = matrix("--kernel", "mine.py:mine", *cases, "--budget", "1", "-n", "0")
    run = kept()
    done = [record.case for record in run.records if record.skipped != NO_TIME]
    assert set(done) == {"strided_views", "random", "interleaved"}
    assert run.complete
    assert run.options["budget"] == "1"
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["INCOMPLETE: mine on cpu, bf16: *; 3 of 5 cells in its budget"])


def test_a_run_that_has_time_for_nothing_fails(
    pytester: pytest.Pytester, matrix: MatrixRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.path / "mine.py").write_text(KERNEL)
    clock = count()
    monkeypatch.setattr(watch, "now", lambda: 60.0 * next(clock))
    result = matrix("--kernel", "mine.py:mine", "--cases", "random", "--budget", "60s", "-n", "0")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["FAIL: mine on cpu, bf16: no cell ran: *", "failed: no cell ran, *"])


def test_by_default_a_slow_backend_names_what_it_leaves_out(
    pytester: pytest.Pytester, matrix: MatrixRun, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pytester.path / "mine.py").write_text(KERNEL)
    slow = replace(BACKENDS["cpu"], budget=1.0)
    monkeypatch.setattr("tiebreak.matrix.selection.BACKENDS", {**BACKENDS, "cpu": slow})
    monkeypatch.setattr(watch, "cpu", lambda: 0.0)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    result = matrix("--kernel", "mine.py:mine", "--heads", "8", "-n", "0")
    left_out = [record for record in kept().records if record.skipped == NO_TIME]
    ran = [record for record in kept().records if record.skipped is None]
    assert 0 < len(ran) < len(left_out)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(["INCOMPLETE: *; * cells in its budget", "*  left out *; --budget none runs all"])


def test_a_cell_is_begun_if_it_has_time_at_the_pace_of_those_before_it(
    users: Callable[[str], Mapping[str, Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(watch, "now", lambda: 0.0)
    monkeypatch.setattr(watch, "cpu", lambda: 0.0)
    mine = users("interpreter")
    long, short = mine["tied_maxima[k=2]"], mine["hidden_nan"]
    for budget in (Budget(deadline=2 * cost(long)), Budget(cpu=2 * cost(long))):
        kept = Watchdog(None, None, budget)
        with kept.over(long):
            kept.pace.add(cost(long), 4 * cost(long))  # it is a slow kernel
        with kept.over(short), kept.over(mine["padded"]):  # it takes no mask, which costs nothing
            pass
        with pytest.raises(BudgetSpentError), kept.over(long):
            pass
    with pytest.raises(BudgetSpentError), Watchdog(None, None, Budget(left_out=frozenset({short.id}))).over(short):
        pass


@pytest.mark.parametrize("slower", [0.25, 1.0, 8.0])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_time_to_go_is_as_the_table_says_then_as_cells_show(
    users: Callable[[str], Mapping[str, Cell]], monkeypatch: pytest.MonkeyPatch, slower: float, processes: int
) -> None:
    mine = sorted(users("interpreter").values(), key=rank)
    monkeypatch.setattr(watch, "now", lambda: 0.0)
    progress = Progress(mine, Budget(), processes)
    known = list(map(expected, mine))
    assert progress.seconds == pytest.approx(max(sum(known) / processes, *known))
    for cell in mine[: len(mine) // 4]:
        progress.end(cell.id, slower * expected(cell))
    rest = [slower * seconds for seconds in known[len(mine) // 4 :]]
    assert progress.seconds == pytest.approx(max(sum(rest) / processes, *rest), rel=0.1)
    skipped = mine[-1]
    before = progress.seconds
    progress.end(skipped.id, None)
    assert progress.seconds < before
    assert str(replace(progress, budget=Budget(deadline=3.0))).endswith("about 3 s to go")


def test_the_deadline_ends_a_cell_in_its_midst(
    users: Callable[[str], Mapping[str, Cell]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The alarms are raised by hand: no test waits for a clock."""
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    budget = Budget(deadline=watch.now() + 60.0, cpu=watch.cpu() + 60.0)
    for alarm in (signal.SIGALRM, signal.SIGVTALRM):
        before = signal.getsignal(alarm)
        with pytest.raises(BudgetSpentError), Watchdog(None, 9.0, budget).over(users("cpu")["random"]):
            os.kill(os.getpid(), alarm)
        assert signal.getsignal(alarm) is before


def test_workers_share_the_deadline_and_what_hangs_ends_soon_after_it(
    users: Callable[[str], Mapping[str, Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    walls: list[float] = []
    monkeypatch.setattr(watch, "_WALL", 10)
    monkeypatch.setattr(signal, "setitimer", lambda *_: None)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda wall, **_: walls.append(wall))
    monkeypatch.setattr(watch, "now", lambda: 100.0)
    begun = Watchdog.of({}, None, Budget.of(60.0))
    monkeypatch.setattr(watch, "now", lambda: 150.0)
    for seconds in (6.0, 0.2):
        worker = Watchdog.of(begun.worker_input(tmp_path / "gw0"), seconds)
        with worker.over(users("cpu")["hidden_nan"]):
            assert worker.budget.deadline == pytest.approx(154.0)  # a tenth is for the start and the end
    assert walls == pytest.approx([9.0, 2.0])
