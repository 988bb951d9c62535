"""The README's snippets run as they stand there."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.cell import Cell, Settings
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import HELD

README = Path(__file__).parents[2] / "README.md"
SETTINGS = Settings(seed=1)


def snippet(heading: str) -> str:
    """The first Python block under a heading."""
    section = README.read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None, heading
    return found[1]


def names_of(heading: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(snippet(heading), names)
    return names


def case_named(name: str) -> Any:
    return next(case for case in SCRIPTED if case.name == name)


@pytest.mark.parametrize("heading", ["Your kernel", "Add a case", "Add a kernel", "Add a backend"])
def test_snippet_is_short(heading: str) -> None:
    assert len(snippet(heading).splitlines()) < 20


def test_your_kernel_follows_the_plan_that_the_command_names(tmp_path: Path) -> None:
    file = tmp_path / "my_attention.py"
    file.write_text(snippet("Your kernel"), encoding="utf-8")
    kernel = external_kernel(f"{file}:attention", None)
    record = run_cell(Cell(CPU, kernel, case_named("tied_maxima[k=2]"), BF16), Workbench(SETTINGS))
    assert record.outcome == HELD, record.reasons
    nearest = min(record.fits, key=lambda name: abs(record.fits[name].mean or 0.0))
    assert nearest in ("flash@paper", "flash@all_bf16", "standard", "as_printed_v1@paper")


def test_your_kernel_holds_wherever_the_device_flushes_subnormals(tmp_path: Path) -> None:
    file = tmp_path / "my_attention.py"
    file.write_text(snippet("Your kernel"), encoding="utf-8")
    kernel = external_kernel(f"{file}:attention", None)
    record = run_cell(Cell(CPU, kernel, case_named("subnormal_v"), BF16), Workbench(SETTINGS))
    assert record.outcome == HELD, record.reasons


def test_added_case_runs_and_its_claim_holds() -> None:
    case = names_of("Add a case")["TWO_MAXIMA"]
    record = run_cell(Cell(CPU, CPU.kernel("flash@paper"), case, BF16), Workbench(SETTINGS))
    assert record.outcome == HELD, record.reasons
    assert record.claim is not None
    assert record.claim.met


def test_added_kernel_is_predicted_on_a_device() -> None:
    kernel = names_of("Add a kernel")["KERNEL"]
    device = replace(EMULATION, name="device", predicts=False)
    record = run_cell(Cell(device, kernel, case_named("random"), BF16), Workbench(SETTINGS))
    assert record.outcome == HELD, record.reasons
    assert record.prediction is not None
    assert record.prediction.equal_bits == 1.0


def test_added_backend_says_why_it_cannot_run_or_runs() -> None:
    backend = names_of("Add a backend")["MPS"]
    reason = backend.unavailable()
    if reason is not None:
        assert reason == "no Apple GPU"
        backend = replace(backend, device="cpu")
    record = run_cell(Cell(backend, backend.kernel("flash@paper"), case_named("random"), BF16), Workbench(SETTINGS))
    assert record.outcome == HELD, record.reasons
