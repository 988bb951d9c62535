"""The repository in examples/: its CI holds as it stands, and falls, naming the cell, once its kernel is worse."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "my-kernel"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "attention.yml"
INSTALLING = "pip install "
# The sum that flash attention carries from tile to tile, kept in 16 bits: half the registers, and ties in every step.
SOUND = "acc = acc * rescale + _product(p.to(v.dtype), v[..., tile, :])"
PLANTED = "acc = (acc * rescale + _product(p.to(v.dtype), v[..., tile, :])).to(v.dtype).float()"


def steps() -> list[str]:
    """The shell commands of the workflow: one line each, or folded (`>`) over more deeply indented lines."""
    text = WORKFLOW.read_text(encoding="utf-8")
    commands = re.findall(r"^( *)- run: (?:>\n((?:\1 {4}.*\n)+)|(.*)\n)", text, re.MULTILINE)
    return [" ".join((folded or line).split()) for _, folded, line in commands]


def gate(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run what CI runs once all is installed, as it stands in the workflow, in a shell that finds this environment."""
    (command,) = [step for step in steps() if not step.startswith(INSTALLING)]
    path = f"{folder.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "GITHUB_"))}
    environment = {
        **inherited,
        "PATH": path,
        "PYTEST_XDIST_AUTO_NUM_WORKERS": "1",
    }  # a second one would import torch again
    return subprocess.run(command, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of the example, beside a folder with the commands that an installed environment has on its PATH."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "pytest"
    script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m pytest "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    copied = ("attention.py", "baseline.json", "pyproject.toml")
    (tmp_path / "my-kernel").mkdir()
    for name in copied:
        shutil.copy(EXAMPLE / name, tmp_path / "my-kernel")
    return tmp_path / "my-kernel"


def test_its_ci_installs_the_suite_then_runs_the_gate() -> None:
    *installing, gated = steps()
    assert [step for step in installing if not step.startswith(INSTALLING)] == []
    assert "tiebreak @ git+" in installing[-1]
    assert "--baseline baseline.json" in gated


def test_its_ci_holds_and_a_planted_change_makes_the_gate_fall_and_name_it(repository: Path) -> None:
    before = gate(repository)
    assert before.returncode == 0, before.stdout + before.stderr
    assert "6 cells: 4 held, 2 excused" in before.stdout
    assert "gate held: 6 cells compared with baseline.json" in before.stdout
    kernel = repository / "attention.py"
    source = kernel.read_text(encoding="utf-8")
    assert source.count(SOUND) == 1
    kernel.write_text(source.replace(SOUND, PLANTED), encoding="utf-8")
    fell = gate(repository)
    assert fell.returncode == 1
    assert "gate FELL: 6 cells compared with baseline.json" in fell.stdout
    worse = [line for line in fell.stdout.splitlines() if line.startswith("worse ")]
    (tie,) = [line for line in worse if "cpu-attention-tied_maxima[k=2]-bf16: fell, held in the baseline" in line]
    assert re.search(r"not what flash@fused predicts: bias \+0\.2\d+ .* measured, bias -0\.0\d+ .* emulated", tie)


def test_its_baseline_names_no_place_on_the_machine_that_made_it() -> None:
    records = json.loads((EXAMPLE / "baseline.json").read_text(encoding="utf-8"))["records"]
    assert {record["outcome"] for record in records} == {"held", "fell"}
    prefix = "pytest -p tiebreak.matrix.plugin --pyargs tiebreak.matrix --backend cpu --kernel attention.py:attention "
    assert [record["command"] for record in records if not record["command"].startswith(prefix)] == []
