"""Long runs in parts: what a file keeps, what a stop loses, and what is told."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiebreak.programs.resumable import expected, read_parts, run_parts, show_progress


@dataclass(frozen=True)
class Square:
    """Of one number."""

    of: int
    is_: int


def square(of: int) -> Square:
    return Square(of, of * of)


def run(left: list[int], path: Path, parts: list[Square], line: Callable[[Square], str] | None = None) -> bool:
    options = argparse.Namespace(workers=1, out=path)
    line = line or (lambda part: f"of {part.of}")
    return run_parts(square, left, options, line, parts, outlook="squares", seconds=120.0, gib=0.1)


def test_parts_are_read_as_they_were_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts: list[Square] = []
    assert run([2, 3], tmp_path / "file", parts)
    assert parts == read_parts(tmp_path / "file", Square) == [Square(2, 4), Square(3, 9)]
    outlook, *lines = capsys.readouterr().out.splitlines()
    assert outlook == "squares, 1 at a time: about 0 h 2 min to go"
    assert [line.partition(";")[0] for line in lines] == ["of 2", "of 3"]


def test_parts_that_are_done_are_kept_when_a_run_is_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(part: Square) -> str:
        if part.of == 3:
            raise KeyboardInterrupt
        return ""

    assert not run([2, 3, 4], tmp_path / "file", [], told)
    assert "the same command goes on" in capsys.readouterr().out
    assert read_parts(tmp_path / "file", Square) == [Square(2, 4), Square(3, 9)]


def test_a_part_that_a_stop_has_cut_is_run_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text('{"of": 2, "is_": 4}\n{"of": 3, "is', encoding="utf-8")
    parts = read_parts(path, Square)
    assert parts == [Square(2, 4)]
    assert run([3], path, parts)
    assert read_parts(path, Square) == [Square(2, 4), Square(3, 9)]


def test_a_missing_file_has_no_parts(tmp_path: Path) -> None:
    assert read_parts(tmp_path / "none", Square) == []


def test_a_line_of_something_else_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"of": 2, "is_": 4}\n{"of": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"file, line 2: none of this program's"):
        read_parts(tmp_path / "file", Square)


def test_hours_and_minutes_are_told() -> None:
    assert expected(3 * 3600 + 125) == "about 3 h 2 min to go"


def test_a_terminal_has_a_bar_and_a_pipe_has_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show_progress(["one", "two"], 2, "run")
    assert capsys.readouterr().out.splitlines() == [
        f"{line}; {number} of 2 runs, about 0 h 0 min to go" for number, line in enumerate(("one", "two"), start=1)
    ]
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "90")
    show_progress(["one", "two " * 40], 2, "run")
    *_, last = capsys.readouterr().out.rstrip("\n").split("\r")
    assert last.startswith("100%|")
    assert "2/2" in last
    assert len(last) < 90
