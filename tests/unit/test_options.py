"""The table of the matrix's options, and what follows from it: refusals, records, baselines, commands that rerun."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.feature_cases import with_features
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.external import external_kernel
from tiebreak.kernels.formats import FP16
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import call, captured, features
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.options import OPTIONS, RECORDED, command, refuse_twice
from tiebreak.matrix.workbench import Settings
from tiebreak.reports import cli
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run

pytestmark = pytest.mark.quick

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

KERNEL = """
import torch

def mine(q, k, v, *, causal=False, scale=None):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
"""
QUICK = ("--heads", "16", "-n", "0")
FEW = [OneCall(case) for case in SCRIPTED if case.name in ("random", "no_tail")]


@pytest.fixture
def mine(pytester: pytest.Pytester) -> str:
    (pytester.path / "mine.py").write_text(KERNEL)
    return "mine.py:mine"


@pytest.fixture
def baseline(matrix: MatrixRun, kept: Kept, mine: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a kernel of one's own and one of the suite, on two calls each and one training run."""
    # All that there are: a run that names none has these.
    monkeypatch.setattr(call, "SCRIPTED", [each.case for each in FEW])
    monkeypatch.setattr(features, "FEATURED", ())
    monkeypatch.setattr(captured, "OWN", ())
    both = ("--backend", "cpu", "--kernel", mine, "--kernels", "flash@paper", *QUICK)
    assert matrix(*both, "--experiments", "call", "--save", "base").ret == 0
    run = kept("base")
    trained = structs.replace(
        run.records[0], id="cpu-mine-train_x-bf16", kernel="mine", case="train_x", experiment="training"
    )
    cases = {**run.cases, "train_x": run.cases["random"]}
    experiments = {**run.experiments, "training": run.experiments["call"]}
    path = Path("base.json")
    store.write(structs.replace(run, records=(*run.records, trained), cases=cases, experiments=experiments), path)
    return path


def test_what_an_option_leaves_out_has_not_vanished_and_is_not_lost_from_the_baseline(
    matrix: MatrixRun, kept: Kept, mine: str, baseline: Path
) -> None:
    before = baseline.read_bytes()
    of_both, of_mine = ("--kernels", "flash@paper", "--cases", "random"), ("--experiments", "call")
    for narrowed in (of_both, of_mine):
        options = ("--backend", "cpu", "--kernel", mine, *narrowed, *QUICK, "--baseline", str(baseline))
        held = matrix(*options)
        held.stdout.fnmatch_lines(["gate passed: 2 cells compared with base.json: 0 regressions, 0 better"])
        assert {each.field: each.names for each in kept().narrowing}["backend"] == ("cpu",)
    refused = matrix(*options, "--update-baseline")
    assert refused.ret == 2
    refused.stderr.fnmatch_lines(["*not updated: 3 of its cells lie outside this run's --*"])
    assert baseline.read_bytes() == before


def test_what_stands_twice_is_refused() -> None:
    for option in (option for option in OPTIONS.values() if option.once):
        value = option.choices[0] if option.choices else "1"
        refuse_twice([option.flag, value, "--kernel", "a", "--kernel", "b"])
        with pytest.raises(UsageError, match=rf"^{option.flag}: given 2 times \({value}; {value}\); give it once"):
            refuse_twice([option.flag, value, f"{option.flag}={value}"])


def test_pytest_and_check_refuse_it(matrix: MatrixRun, capsys: pytest.CaptureFixture[str]) -> None:
    twice = ("--cases", "random", "--cases=no_tail")
    assert matrix(*twice).ret == 2
    assert cli.main(["check", "mine.py:mine", *twice]) == 2
    error = capsys.readouterr().err.splitlines()
    message = "--cases: given 2 times (random; no_tail); give it once, lists are comma-separated"
    assert error[-2:] == [f"Exit: {message}", f"tiebreak check: {message}"]


def test_what_a_file_of_records_keeps_stands_in_the_command_that_reruns_a_cell(
    mine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for what only chose the cell among others: it has its name."""
    own = external_kernel(mine, "fused", ("layout=bhnd",))
    own = replace(own, origin=(*own.origin, "--backward", "emulated"))
    monkeypatch.setattr(OneCall, "options", ("--captured", "here"))
    backend = replace(BACKENDS["interpreter"].assuming("sm_90"), name="interpreter")
    settings = Settings(seed=7, heads=32, fair=True, as_rounded=True, cell_timeout=9.5)
    of_own = command(Cell(backend, own, FEW[0], FP16), settings).split()
    of_suite = command(
        Cell(backend, composed_kernel("standard"), OneCall(with_features(FEW[0].case, ["sink"])), FP16), settings
    ).split()
    missing = {name for name in RECORDED if f"--{name}" not in (*of_own, *of_suite)}
    assert missing == {"experiments", "budget"}
    assert of_own[2:6] == ["--backend", "interpreter", "--as", "sm_90"]
    assert of_own[-12:] == [
        *("--cases", FEW[0].name, "--dtype", "fp16", "--seed", "7", "--heads", "32"),
        *("--cell-timeout", "9.5", "-n", "1"),
    ]
    assert not {"--kernel", "--fair", "--no-worse-than"} & set(of_suite)
