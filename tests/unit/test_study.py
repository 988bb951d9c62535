"""Long runs in parts: which tasks of a study are run, what a file keeps, and what a stop loses."""

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiebreak.laboratory import resumable
from tiebreak.studies import study
from tiebreak.studies.study import Study


@dataclass(frozen=True)
class Square:
    """Of one number."""

    value: float


def square(task: int) -> Square:
    return Square(task**2 if task else math.nan)


SQUARES = Study("squares", square, seconds=60.0)


@pytest.fixture
def options(tmp_path: Path) -> argparse.Namespace:
    return argparse.Namespace(workers=1, out=tmp_path / "out" / "squares.jsonl")


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks are run in this process: a process of their own takes seconds to start."""
    monkeypatch.setattr(resumable, "in_processes", lambda run, left, workers: map(run, left))


def test_a_task_runs_in_a_process_of_its_own(options: argparse.Namespace) -> None:
    assert list(SQUARES.results([3], options).values()) == [Square(9)]


@pytest.mark.usefixtures("here")
def test_tasks_are_run_once_and_given_in_their_order_and_nan_stays_nan(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert list(SQUARES.results([3], options).values()) == [Square(9)]
    assert SQUARES.results((2, 3, 2), options) == {2: Square(4), 3: Square(9)}
    out = capsys.readouterr().out
    assert "0 kept, 1 to run, 1 at a time: about 0 h 1 min to go" in out
    assert "1 kept, 1 to run" in out
    assert len(options.out.read_text(encoding="utf-8").splitlines()) == 2
    assert set(SQUARES.kept(options)) == {2, 3}
    SQUARES.results([0], options)
    assert math.isnan(SQUARES.kept(options)[0].value)


@pytest.mark.usefixtures("here")
def test_what_another_commit_ran_is_run_again(options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch) -> None:
    SQUARES.results([3], options)
    monkeypatch.setattr(study, "commit", lambda: "another")
    assert SQUARES.kept(options) == {}
    assert set(Study("squares", square, 1.0, every_commit=True).kept(options)) == {3}


@pytest.mark.usefixtures("here")
def test_a_stop_says_how_to_go_on_and_a_line_that_it_has_cut_is_run_again(
    options: argparse.Namespace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(run: Callable[[int], object], left: Sequence[int], workers: int) -> Iterator[object]:
        yield run(left[0])
        raise KeyboardInterrupt

    SQUARES.results([2], options)
    with options.out.open("a", encoding="utf-8") as file:
        file.write('{"task": 3, "com')
    capsys.readouterr()
    monkeypatch.setattr(resumable, "in_processes", stopped)
    with pytest.raises(SystemExit) as ended:
        SQUARES.results([2, 3, 4], options)
    assert ended.value.code == 130
    outlook, line, end = capsys.readouterr().out.splitlines()
    assert outlook.startswith("1 kept, 2 to run, 1 at a time: about")
    assert line.startswith("3: 0 s; 1 of 2 parts, about")
    assert end == f"stopped; {options.out} has what is done, and the same command goes on"
    assert SQUARES.kept(options) == {2: Square(4), 3: Square(9)}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{}", "line 1: none of this program's"),
        ("no JSON", "line 1: none of this program's"),
        ('{"task": {"no": 1}, "commit": null, "seconds": 1, "result": {}}', ""),
    ],
)
def test_a_file_of_something_else_is_one_line(
    options: argparse.Namespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
    line: str, told: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(study, "commit", lambda: None)
    options.out.parent.mkdir()
    options.out.write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(SystemExit) as ended:
        SQUARES.results([3], options)
    assert ended.value.code == 2
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("squares: ")
    assert told in message
