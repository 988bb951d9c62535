"""The repository in examples/: its CI holds as it stands, and fails, naming the cell, once its kernel is worse."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "my-kernel"
WORKFLOW = EXAMPLE / ".github" / "workflows" / "attention.yml"
ACTION = EXAMPLE.parents[1] / "action.yml"
yaml: Any = pytest.importorskip("yaml")
# The sum that flash attention carries from tile to tile, kept in 16 bits: half the registers, and ties in every step.
SOUND = "acc = acc * rescale + _product(p.to(v.dtype), v[..., tile, :])"
PLANTED = "acc = (acc * rescale + _product(p.to(v.dtype), v[..., tile, :])).to(v.dtype).float()"


def test_its_ci_holds_and_a_planted_change_makes_the_gate_fail_and_name_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CI runs once all is installed, as it stands in the workflow, in a copy of the repository."""
    (step,) = [step for step in yaml.safe_load(WORKFLOW.read_text())["jobs"]["cpu"]["steps"] if "with" in step]
    assert step["uses"].startswith("OWNER/tiebreak@v")
    given = step["with"]
    assert given.keys() <= yaml.safe_load(ACTION.read_text())["inputs"].keys()
    words = ("--kernel", given["target"], "--across", "--baseline", given["baseline"], *given["options"].split())
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    monkeypatch.setenv("PYTEST_XDIST_AUTO_NUM_WORKERS", "0")  # a worker would import torch again
    for name in ("attention.py", "baseline.json", "pyproject.toml"):
        shutil.copy(EXAMPLE / name, pytester.path)
    before = pytester.runpytest_inprocess(*words)
    assert before.ret == 0
    before.stdout.fnmatch_lines(["6 cells: 4 passed, 2 excused*", "gate passed: 6 cells compared with baseline.json*"])
    kernel = pytester.path / "attention.py"
    source = kernel.read_text(encoding="utf-8")
    assert source.count(SOUND) == 1
    kernel.write_text(source.replace(SOUND, PLANTED), encoding="utf-8")
    failed = pytester.runpytest_inprocess(*words)
    assert failed.ret == 1
    failed.stdout.fnmatch_lines(["gate FAILED: 6 cells compared with baseline.json*"])
    worse = [line for line in failed.outlines if line.startswith("regression ")]
    (tie,) = [line for line in worse if "cpu-attention-tied_maxima[k=2]-bf16: failed, passed in the baseline" in line]
    assert re.search(r"not what flash@fused predicts: bias \+0\.2\d+ .* measured, bias -0\.0\d+ .* emulated", tie)


def test_its_baseline_names_no_place_on_the_machine_that_made_it() -> None:
    records = json.loads((EXAMPLE / "baseline.json").read_text(encoding="utf-8"))["records"]
    assert {record["outcome"] for record in records} == {"passed", "failed"}
    prefix = "pytest -p tiebreak.matrix.plugin --pyargs tiebreak.matrix --backend cpu --kernel attention.py:attention "
    assert [record["command"] for record in records if not record["command"].startswith(prefix)] == []
