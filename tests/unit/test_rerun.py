"""The command that reruns a cell, as a reader pastes it."""

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tiebreak.reports import terminal
from tiebreak.reports.terminal import runnable

COMMAND = "pytest --version"
Environment = Callable[..., Path]


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    terminal._pytest.cache_clear()
    yield
    terminal._pytest.cache_clear()


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    """Makes this process one of a virtual environment in a folder, with a pytest of its own or without."""

    def make(name: str, *, own: bool = True) -> Path:
        folder = tmp_path / name / "bin"
        script(folder / "python", f'exec {shlex.quote(sys.executable)} "$@"')
        if own:
            script(folder / "pytest", f'exec {shlex.quote(sys.executable)} -m pytest "$@"')
        monkeypatch.setattr(sys, "executable", str(folder / "python"))
        return folder

    return make


def ran(command: str) -> str:
    """What a shell makes of a command."""
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr


def put_first(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


def test_it_is_short_where_the_shell_finds_this_environments_pytest(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_first(monkeypatch, environment("mine"))
    assert runnable(COMMAND) == COMMAND
    assert f"pytest {pytest.__version__}" in ran(runnable(COMMAND))


@pytest.mark.parametrize(("own", "other"), [(True, True), (False, False)])
def test_it_names_the_python_where_the_shell_finds_another_pytest_or_none(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, other: bool
) -> None:
    """`make` leaves its environment off the PATH, where a pytest of the system may stand."""
    folder = environment("mine", own=own)
    monkeypatch.setenv("PATH", os.defpath)
    if other:
        script(tmp_path / "other" / "pytest", "echo another pytest; exit 3")
        put_first(monkeypatch, tmp_path / "other")
    assert runnable(COMMAND) == f"{folder / 'python'} -m pytest --version"
    assert f"pytest {pytest.__version__}" in ran(runnable(COMMAND))


def test_it_is_relative_to_where_the_reader_stands_and_quoted(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment("my environment")
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.chdir(tmp_path)
    assert runnable(COMMAND) == "'my environment/bin/python' -m pytest --version"
    assert f"pytest {pytest.__version__}" in ran(runnable(COMMAND))


def test_arguments_stay_as_they_are_and_other_commands_too(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment("mine")
    monkeypatch.setenv("PATH", os.defpath)
    quoted = "pytest tests/matrix --cases 'tied_maxima[k=2]'  --kernel 'my file.py:f'"
    assert runnable(quoted).endswith(quoted.removeprefix("pytest"))
    for other in ("tiebreak show out/last.json", "pytester x"):
        assert runnable(other) == other
