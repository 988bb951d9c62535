"""Long runs in parts: what a file keeps, what a stop loses, and what is told. `test_study.py` runs whole ones."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tiebreak.programs.resumable import read_parts, run_parts


@dataclass(frozen=True)
class Square:
    """Of one number."""

    of: int
    is_: int


def square(of: int) -> Square:
    return Square(of, of * of)


def run(left: list[int], path: Path, line: Callable[[Square], str]) -> bool:
    options = argparse.Namespace(workers=1, out=path)
    return run_parts(square, left, options, line, [], spent=[40.0], gib=0.1)


def test_a_part_that_a_stop_has_cut_is_run_again_and_those_that_are_done_are_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def told(part: Square) -> str:
        if part.of == 4:
            raise KeyboardInterrupt
        return f"of {part.of}"

    path = tmp_path / "file"
    path.write_text('{"of": 2, "is_": 4}\n{"of": 3, "is', encoding="utf-8")
    assert read_parts(path, Square) == [Square(2, 4)]
    assert not run([3, 4, 5], path, told)
    outlook, line, end = capsys.readouterr().out.splitlines()
    assert outlook == "0 kept, 3 to run, 1 at a time: about 0 h 2 min to go"
    assert line.startswith("of 3; 1 of 3 parts, about")
    assert end == f"stopped; {path} has what is done, and the same command goes on"
    assert read_parts(path, Square) == [Square(2, 4), Square(3, 9), Square(4, 16)]


def test_a_line_of_something_else_is_refused_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "file").write_text('{"of": 2, "is_": 4}\n{"of": 2}\n', encoding="utf-8")
    with pytest.raises(ValueError, match=r"file, line 2: none of this program's"):
        read_parts(tmp_path / "file", Square)
