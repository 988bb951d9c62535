"""The GitHub Action, by running its steps as a runner does: with files for its environment, and its inputs as data."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from tiebreak.reports.gate.gate import CellChange, Outcome
from tiebreak.reports.gate.report import annotations
from tiebreak.reports.records.record import CRASHED, RUNS, Answer, Record, Run

yaml: Any = pytest.importorskip("yaml")
ACTION = yaml.safe_load((Path(__file__).parents[2] / "action.yml").read_text(encoding="utf-8"))
STEPS = {step["name"]: step for step in ACTION["runs"]["steps"] if "name" in step}
KERNEL = """import torch


def attention(q, k, v, *, scale):
    if q.shape[2] == 4:
        raise ValueError("four, 100 %")
    return torch.zeros_like(q)
"""
NARROW = "--cases no_tail --heads 16 -n 0"


class Ran(NamedTuple):
    """What one step came to."""

    code: int
    printed: str
    summary: str
    output: str


Step = Callable[..., Ran]


@pytest.fixture
def step(tmp_path: Path) -> Step:
    """Runs a step in a checkout with a kernel; programs in `bin/` go before those of the machine."""
    (tmp_path / "mine.py").write_text(KERNEL)
    programs = tmp_path / "bin"
    programs.mkdir()
    files = {name: tmp_path / name for name in ("GITHUB_STEP_SUMMARY", "GITHUB_OUTPUT")}

    def run(name: str, base: str = "", **inputs: str) -> Ran:
        given = {key: entry.get("default", "") for key, entry in ACTION["inputs"].items()} | inputs
        declared = STEPS[name].get("env", {})
        words = {key: given[re.fullmatch(r"\$\{\{ inputs\.(\w+) \}\}", value)[1]] for key, value in declared.items()}  # type: ignore[index]
        for file in files.values():
            file.write_text("")
        ours = ("PYTEST", "GITHUB", "PIP_CONSTRAINT")  # make test sets the last
        environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
        environment |= {key: str(file) for key, file in files.items()} | words
        environment |= {"GITHUB_ACTIONS": "true", "GITHUB_WORKSPACE": str(tmp_path), "GITHUB_ACTION_PATH": "ACTION"}
        environment["GITHUB_BASE_REF"] = base
        environment["PATH"] = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
        shell = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", STEPS[name]["run"]]
        done = subprocess.run(shell, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        return Ran(done.returncode, done.stdout + done.stderr, *(file.read_text() for file in files.values()))

    return run


def program(folder: Path, name: str, script: str) -> None:
    """In the place of one of the machine's."""
    file = folder / "bin" / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_a_kernel_that_fails_is_shown_in_the_summary_at_its_line_and_in_an_artifact(step: Step, tmp_path: Path) -> None:
    ran = step("check", target="mine.py:attention", options=NARROW)
    assert ran.code == 1
    (error,) = [line for line in ran.printed.splitlines() if line.startswith("::")]
    assert error.startswith("::error title=no_tail%3A crashed,file=mine.py,line=6::ValueError: four, 100 %25")
    headline = "FAIL: attention on cpu, bf16: never ran: ValueError: four, 100 % (mine.py, line 6)"
    assert ran.output.startswith(f"headline={headline}")
    assert headline in ran.summary
    assert "- crashed cpu-attention-no_tail-bf16" in ran.summary
    assert step("page").code == 0
    kept = {path.name for path in (tmp_path / "tiebreak-records").iterdir()}
    assert {"last.json", "verdict.json", "index.html"} <= kept


def test_an_input_is_no_code_and_bad_usage_leaves_no_page(step: Step, tmp_path: Path) -> None:
    program(tmp_path, "tiebreak", 'for word in "$@"; do echo "$word"; done; exit 2')
    ran = step("check", target="$(touch harm);x", options="--plan $(touch${IFS}harm);touch *")
    assert ran.code == 2
    assert ran.printed.splitlines()[1] == "$(touch harm);x"
    assert ran.printed.splitlines()[-3:] == ["--plan", "$(touch${IFS}harm);touch", "*"]
    assert not (tmp_path / "harm").exists()
    assert step("page").code == 0


def test_a_pull_request_that_changes_its_own_baseline_is_told_of(step: Step, tmp_path: Path) -> None:
    program(tmp_path, "tiebreak", 'echo "$@"')

    def git(*words: str) -> None:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *identity, *words], cwd=tmp_path, check=True, capture_output=True)

    (tmp_path / "base.json").write_text("{}")
    git("init", "-q", "-b", "main")
    git("add", "base.json")
    git("commit", "-q", "-m", "base")
    git("remote", "add", "origin", str(tmp_path))
    given = {"target": "mine.py:attention", "baseline": "base.json", "excuses": "excused.toml"}
    same, without = step("check", base="main", **given), step("check", target="mine.py:attention")
    assert "::warning" not in same.printed
    (tmp_path / "base.json").write_text('{"records": []}')
    changed = step("check", base="main", **given)
    assert changed.printed.startswith(
        "::warning file=base.json::this pull request changes the records that it is held to"
    )
    assert "--baseline base.json --across --expected excused.toml" in same.printed
    assert not {"--baseline", "--expected"} & set(without.printed.split())


@pytest.mark.parametrize(("torch", "constrained"), [(0, "-"), (1, "ACTION/constraints.txt")])
def test_a_pytorch_that_is_there_stays(step: Step, tmp_path: Path, torch: int, constrained: str) -> None:
    program(tmp_path, "python", f'[ "$1" = -c ] && exit {torch}; echo "$@" "${{PIP_CONSTRAINT:--}}"')
    assert step("install").printed.split() == ["-m", "pip", "install", "ACTION", constrained]


def test_what_it_uses_is_pinned_to_commits() -> None:
    used = [step["uses"] for step in ACTION["runs"]["steps"] if "uses" in step]
    assert len(used) == 3
    assert [name for name in used if not re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", name)] == []


def test_annotations_are_cut_short_and_a_record_begins_no_command_of_its_own() -> None:
    why = Answer(False, "", "no\n::add-mask::x")
    record = Record(id="a", backend="cpu", kernel="mine", case="tie", case_version=1, format="bf16", seed=1, heads=1,
                    experiment="call", outcome=CRASHED, command="", answers={RUNS: why})  # fmt: skip
    worse = Outcome(2, (CellChange(record, True, "again"), CellChange(replace(record, id="b"), True, "bias")), ())
    lines = annotations(Run({}, {}, records=(record,)), worse, {"mine": ("m.py", 3)})
    assert [line.split("::")[2] for line in lines] == ["no%0A", "bias"]
    assert not [line for line in lines if "\n" in line]
    many = tuple(replace(record, id=str(n)) for n in range(12))
    shown = annotations(Run({}, {}, records=many), None, {})
    assert len(shown) == 10
    assert shown[-1] == "::error title=3 more cells::see the summary"


def test_its_inputs_are_those_that_its_page_names() -> None:
    page = (Path(__file__).parents[2] / "docs" / "ci.md").read_text(encoding="utf-8")
    assert [name for name in ACTION["inputs"] if f"`{name}`" not in page] == []
    assert json.dumps(ACTION["outputs"]).count("steps.check.outputs") == len(ACTION["outputs"])
