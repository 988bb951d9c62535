"""Commands of records, as they run where the reader stands."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tiebreak.reports.tables import rerun
from tiebreak.reports.tables.rerun import runnable

COMMAND = "pytest tests/matrix --cases 'tied_maxima[k=2]'"


@pytest.fixture(autouse=True)
def _forget() -> Iterator[None]:
    rerun._pytest.cache_clear()
    yield
    rerun._pytest.cache_clear()


@pytest.fixture
def interpreter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python with a pytest beside it, in a folder with a blank in its name."""
    folder = tmp_path / "my env" / "bin"
    folder.mkdir(parents=True)
    for name in ("python", "pytest"):
        (folder / name).touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    return folder / "python"


def test_pytest_is_called_by_its_name_where_the_shell_finds_this_one(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(interpreter.parent))
    assert runnable(COMMAND) == COMMAND


@pytest.mark.parametrize("other", [True, False], ids=["another", "none"])
def test_elsewhere_it_is_called_through_this_python(
    other: bool, interpreter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if other:
        shutil.copy(interpreter, tmp_path / "pytest")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert runnable(COMMAND) == COMMAND.replace("pytest", "'my env/bin/python' -m pytest", 1)
    rerun._pytest.cache_clear()
    deep = tmp_path / "somewhere"
    deep.mkdir()
    monkeypatch.chdir(deep)
    assert runnable(COMMAND).startswith(f"'{interpreter}' -m pytest tests/matrix")


def test_a_command_of_another_kind_is_left_alone() -> None:
    assert runnable("pytester x") == "pytester x"
    assert runnable("tiebreak show out/last.json") == "tiebreak show out/last.json"
