"""The command that reruns a cell, as a reader pastes it."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tiebreak.reports.terminal import runnable

COMMAND = "pytest --version"


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """This process' Python, in an environment below the working directory that is not on the PATH."""
    path = script(tmp_path / "my environment" / "bin" / "python", f'exec {shlex.quote(sys.executable)} "$@"')
    monkeypatch.setattr(sys, "executable", str(path))
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.chdir(tmp_path)
    return path


@pytest.mark.parametrize("other", [True, False])
def test_it_names_the_python_where_the_shell_finds_another_pytest_or_none(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, other: bool
) -> None:
    """`make` leaves its environment off the PATH, where a pytest of the system may stand."""
    if other:
        script(python.with_name("pytest"), "echo this one")
        system = script(tmp_path / "system" / "pytest", "echo another pytest; exit 3")
        monkeypatch.setenv("PATH", f"{system.parent}{os.pathsep}{os.defpath}")
    assert runnable(COMMAND) == "'my environment/bin/python' -m pytest --version"
    if not other:
        done = subprocess.run(runnable(COMMAND), shell=True, capture_output=True, text=True, check=True)
        assert f"pytest {pytest.__version__}" in done.stdout + done.stderr


def test_it_is_short_where_the_shell_finds_this_environments_pytest(
    python: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(python.with_name("pytest"), "echo this one")
    monkeypatch.setenv("PATH", f"{python.parent}{os.pathsep}{os.defpath}")
    assert runnable(COMMAND) == COMMAND


def test_elsewhere_its_path_is_whole_and_arguments_and_other_commands_stay(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    quoted = "pytest tests/matrix --cases 'tied_maxima[k=2]'  --kernel 'my file.py:f'"
    assert runnable(quoted) == f"'{python}' -m {quoted}"
    for other in ("tiebreak show out/last.json", "pytester x"):
        assert runnable(other) == other
