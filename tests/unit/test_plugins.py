"""What packages bring: somebody else's device in the matrix, and what becomes of a plug-in that is broken."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tiebreak import plugins
from tiebreak.backends import registry
from tiebreak.backends.backend import CPU
from tiebreak.backends.platform import describe
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.external import LoadError, external_kernel
from tiebreak.kernels.external.loading import load
from tiebreak.kernels.formats import BF16
from tiebreak.laboratory.statement.profiles import profile
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.record_collector import described
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports import cli
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import Run

Plug = Callable[..., Path]
EXAMPLE = Path(__file__).parents[2] / "examples" / "my-device"
GROUPS = ("backends", "experiments", "checks", "adapters", "verbs", "files")


def entries(target: str, name: str = "broken") -> str:
    """An entry_points.txt with one object in every group."""
    return "".join(f"[tiebreak.{group}]\n{name} = {target}\n" for group in GROUPS)


def test_somebody_else_s_device_runs_in_the_matrix_beside_a_package_that_is_broken(
    laid: Callable[..., None], tmp_path: Path
) -> None:
    """The example as pip lays it out: its backend, adapter and check, in a process that knows it by that alone."""
    registered = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    sections = ([f"[{group}]", *(f"{name} = {to}" for name, to in own.items())] for group, own in registered.items())
    laid(tmp_path, "my-device", "\n".join(line for section in sections for line in section))
    laid(tmp_path, "broken", entries("nowhere:x"))
    shutil.copy(EXAMPLE / "my_device.py", tmp_path)
    words = ["-p", "tiebreak.matrix.plugin", "--pyargs", "tiebreak.matrix.test_cells", "-c", os.devnull, "-n", "0"]
    words += ["--backend", "my_device", "--kernel", "my_attention", "--kernels", "flash@fused", "--heads", "64"]
    words += ["--cases", "tied_maxima[k=2],random", "--save", "run", "--out", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stdout + done.stderr
    told = [line for line in done.stdout.splitlines() if "broken of broken 1.0 can't be loaded" in line]
    assert {line.partition(":")[0] for line in told} >= {"tiebreak.checks", "tiebreak.experiments"}
    records = {each["id"]: each for each in json.loads((tmp_path / "run.json").read_text(encoding="utf-8"))["records"]}
    assert records.keys() == {f"my_device-{kernel}-{case}-bf16" for kernel in ("flash@fused", "my_attention")
                              for case in ("tied_maxima[k=2]", "random")}  # fmt: skip
    plain = records["my_device-flash@fused-tied_maxima[k=2]-bf16"]
    assert "o_bar=input/32, as this device multiplies, does" in plain["answers"]["prediction"]["why"]
    assert {name: record["answers"]["my_limit"]["passed"] for name, record in records.items()} == {
        name: "flash@fused-random" not in name for name in records
    }


def test_a_package_that_is_broken_is_one_line_where_it_is_asked_for_and_else_changes_nothing(
    plugged: Plug, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = list(checks()), list(kinds())
    plugged("broken", entries("broken_module:x"), broken_module="raise SystemExit('no licence')")
    assert (list(checks()), list(kinds())) == before
    assert [line.partition(":")[0] for line in plugins.problems()] == ["tiebreak.checks", "tiebreak.experiments"]
    assert all(
        line.endswith("SystemExit: no licence: install broken again, or uninstall it") for line in plugins.problems()
    )
    _, unavailable = cells(Selection(kernels="standard", cases="random"))
    assert "no licence" in unavailable["broken"]
    with pytest.raises(UsageError, match=r"^--backend: broken can't run here: .*no licence"):
        cells(Selection(backends="broken"))
    with pytest.raises(LoadError, match="no licence"):
        load("broken")
    (tmp_path / "a.json").write_text('{"x": 1}', encoding="utf-8")
    for words in (["broken"], ["show", str(tmp_path / "a.json")]):
        assert cli.main(words) == 2
        told = capsys.readouterr()
        assert (told.out, told.err.count("\n")) == ("", 1)
        assert "broken 1.0" in told.err
        assert "no licence" in told.err
    assert cli.main(["list", "backends"]) == 0
    assert "no licence" in capsys.readouterr().out


def test_a_name_that_is_taken_or_an_object_of_another_kind_is_left_out(plugged: Plug) -> None:
    text = "[tiebreak.backends]\ncpu = taken:x\nptx = taken:x\nnumber = taken:x\n[tiebreak.checks]\nclaim = taken:x\n"
    plugged("taken", text, taken="x = 5")
    assert BACKENDS["cpu"].unavailable() is None
    assert BACKENDS["ptx"].name == "ptx"
    assert str(BACKENDS["number"].unavailable()).startswith("tiebreak.backends: number of taken 1.0 is no Backend")
    assert checks()["claim"].name == "claim"
    left = [line.partition(" is left out")[0] for line in plugins.problems()]
    assert left == ["tiebreak.backends: ptx of taken 1.0", "tiebreak.checks: claim of taken 1.0"]


def test_a_profile_asks_for_the_same_whatever_is_installed_beside(plugged: Plug) -> None:
    profile.cache_clear()
    before = profile("quick").hash
    text = "[tiebreak.backends]\nmy_device = my_device:DEVICE\n"
    plugged("my-device", text, my_device=(EXAMPLE / "my_device.py").read_text(encoding="utf-8"))
    profile.cache_clear()
    assert BACKENDS["my_device"].unavailable() is None
    assert profile("quick").hash == before


VERB = (
    '"""`tiebreak acme`: what its first line says."""\ndef main(arguments):\n print(*arguments)\n return len(arguments)'
)
KIND = """
from tiebreak.reports.files import FileKind
from tiebreak.reports.records.decode import FileData, Schema
class Chips(FileData, frozen=True):
    schema: Schema  # version of this layout
    chips: tuple[str, ...]  # by name
KIND = FileKind(Chips, "a list of chips", told_by="chips", parts=lambda file: ["; ".join(file.chips)],
                page=lambda files: f"<p>{len(files)} of chips</p>")
"""


def test_verbs_and_kinds_of_file_of_a_package(
    plugged: Plug, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    text = (
        "[tiebreak.verbs]\nacme = acme_verb:main\nlab.acme = acme_verb:main\n[tiebreak.files]\nchips = acme_file:KIND\n"
    )
    plugged("acme", text, acme_verb=VERB, acme_file=KIND)
    assert cli.main(["--help"]) == 0
    assert re.search(r"^  acme +what its first line says$", capsys.readouterr().out, re.MULTILINE)
    assert "acme_verb" not in sys.modules
    assert cli.main(["lab", "acme", "--two", "words"]) == 2
    assert capsys.readouterr().out == "--two words\n"
    (tmp_path / "a.json").write_text('{"schema": 7, "chips": ["A1", "B2"]}', encoding="utf-8")
    assert cli.main(["show", str(tmp_path / "a.json")]) == 0
    assert capsys.readouterr().out == "A1; B2\n"
    assert cli.main(["page", str(tmp_path / "a.json"), "-o", str(tmp_path)]) == 0
    assert "<p>1 of chips</p>" in (tmp_path / "index.html").read_text(encoding="utf-8")
    capsys.readouterr()
    assert cli.main(["schema", "chips"]) == 0
    assert '"description": "by name"' in capsys.readouterr().out


def test_a_backend_of_a_file(
    matrix: Callable[..., pytest.RunResult], kept: Callable[..., Run], pytester: pytest.Pytester,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(registry, "_targets", {})
    monkeypatch.setattr(BACKENDS, "own", {**BACKENDS.own})
    shutil.copy(EXAMPLE / "my_device.py", pytester.path)
    matrix("--backend", "my_device.py:DEVICE", "--kernels", "standard", "--cases", "random", "--heads", "16")
    (record,) = kept().records
    assert record.id == "my_device-standard-random-bf16"
    assert " --backend my_device.py:DEVICE --kernels standard " in record.command
    assert [each.names for each in kept().narrowing if each.field == "backend"] == [("my_device",)]
    with pytest.raises(UsageError, match=r"^--backend: my_device.py has no backend 'LIMIT': name an object of"):
        cells(Selection(backends="cpu,my_device.py:LIMIT"))
    with pytest.raises(UsageError, match=r"^--backend: my_device.py: expected FILE.py:NAME, NAME being an object of"):
        cells(Selection(backends="cpu,my_device.py"))
    shutil.copy("my_device.py", "another.py")
    with pytest.raises(UsageError, match=r"^--backend: another.py:DEVICE: there is a backend called my_device"):
        cells(Selection(backends="another.py:DEVICE"))


@pytest.mark.usefixtures("plugged")
def test_an_installation_that_registers_nothing_is_told_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def targets() -> dict[str, dict[str, str]]:
        plugins.registered.cache_clear()
        known = {group: plugins.registered(f"tiebreak.{group}") for group in GROUPS}
        values = {group: {name: it.entry.value for name, it in own.items()} for group, own in known.items()}
        # Of the laboratory a clone has plug-ins, and a package none.
        return {
            group: {name: value for name, value in own.items() if not value.startswith("tiebreak.laboratory.")}
            for group, own in values.items()
        }

    in_clone = targets()
    monkeypatch.setattr(plugins, "_PROJECT", Path("nowhere"))
    assert targets() == in_clone, "what is installed is older than pyproject.toml: pip install -e ."
    plugins.registered.cache_clear()
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    assert cli.main(["audit"]) == 2
    assert capsys.readouterr().err == "tiebreak: its plug-ins are not registered: install it again\n"


def test_the_core_judges_a_kernel_without_any_plug_in(
    plugged: Plug, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    plugged("empty", "")
    monkeypatch.setattr(plugins, "registered", lambda group: {})
    assert list(kinds()) == ["call"]
    (tmp_path / "mine.py").write_text(
        "def mine(q, k, v, scale=None):\n"
        "    s = q.float() @ k.float().mT * (scale or q.shape[-1] ** -0.5)\n"
        "    p = (s - s.amax(-1, keepdim=True)).exp()\n"
        "    o = (p.to(v.dtype).float() @ v.float()).to(v.dtype)\n"
        "    return (o.float() / p.sum(-1, keepdim=True)).to(q.dtype)\n"
    )
    call = OneCall(next(case for case in SCRIPTED if case.name == "tied_maxima[k=2]"))
    kernels = (external_kernel(f"{tmp_path / 'mine.py'}:mine", plan) for plan in (None, "flash@paper,tile=one"))
    cells = {kernel.declaration: Cell(CPU, kernel, call, BF16) for kernel in kernels}
    unknown, declared = (run_cell(each, Workbench(Settings(heads=32))) for each in cells.values())
    assert (unknown.verdict, declared.verdict) == ("biased", "biased")
    assert (unknown.outcome, declared.outcome) == ("measured", "passed")
    assert "accuracy" in declared.answers.keys() - unknown.answers.keys()
    ran = described(Run(describe(), {}, (unknown,)), {unknown.id: cells[None]})
    assert not ran.explanations
