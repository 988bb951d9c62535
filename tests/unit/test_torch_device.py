"""Backends `torch:DEVICE`: a device written in Python runs cells, in a process of its own; others are not here."""

import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
from torch.utils import backend_registration

from tiebreak.backends.registry import BACKENDS
from tiebreak.backends.torch_device import DeviceError, torch_device, torch_devices
from tiebreak.kernels import sdpa
from tiebreak.reports import cli
from tiebreak.reports.records import store
from tiebreak.reports.records.record import CRASHED, SKIPPED, Record, Run

CELLS = Path(__file__).parents[1] / "matrix" / "test_cells.py"
GIB = 2**30
MINE = """
def mine(q, k, v, *, scale=None):
    p = (q.float() @ k.float().mT * (scale or q.shape[-1] ** -0.5)).softmax(-1)
    return (p.to(v.dtype) @ v).to(q.dtype)
"""
COMPOSED = ("standard", "flash@paper", "fair")


class Ran(NamedTuple):
    """What a run left."""

    output: str
    calls: dict[str, int]  # operations that the device carried out
    folder: Path
    run: Run

    def of(self, backend: str, case: str = "random_causal") -> dict[str, Record]:
        own = (record for record in self.run.records if (record.backend, record.case) == (backend, case))
        return {record.kernel: record for record in own}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """Cells of the CPU and of the abacus, which a package with an entry point brings; an Intel GPU may be missing."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no devices written in Python")
    folder = tmp_path_factory.mktemp("abacus")
    site = folder / "site"
    (site / "abacus-1.dist-info").mkdir(parents=True)
    (site / "abacus-1.dist-info" / "entry_points.txt").write_text("[torch.backends]\nabacus = abacus:load\n")
    (site / "abacus-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: abacus\nVersion: 1\n")
    shutil.copy(Path(__file__).with_name("abacus.py"), site)
    (folder / "mine.py").write_text(MINE)
    words = ["--backend", "cpu,torch:aba*,torch:xpu", "--allow-missing", "torch:xpu", "--cases", "random,random_causal"]
    words += ["--kernel", "mine.py:mine", "--kernels", ",".join((*COMPOSED, "flash@fused_contracted", "sdpa*", "flex"))]
    words += ["--heads", "16", "--save", "here", "--junitxml", "here.xml", "-n", "0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(site), "ABACUS": str(folder / "calls.json")}
    command = [sys.executable, "-m", "pytest", str(CELLS), *words]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    assert (folder / "out" / "here.json").exists(), output
    calls = json.loads((folder / "calls.json").read_text())
    return Ran(output, calls, folder, store.read(folder / "out" / "here.json"))


class TestADeviceWrittenInPython:
    def test_composed_kernels_and_a_user_s_run_there_and_have_the_bits_of_the_cpu_that_carries_them_out(
        self, ran: Ran
    ) -> None:
        for name, case in [*((name, "random_causal") for name in (*COMPOSED, "sdpa_math")), ("mine", "random")]:
            ours, cpu = (ran.of(backend, case)[name] for backend in ("torch:abacus", "cpu"))
            assert ours.outcome not in (SKIPPED, CRASHED), ran.output
            assert (ours.outcome, ours.digest) == (cpu.outcome, cpu.digest), name
        assert min(ran.calls["aten::bmm"], ran.calls["aten::exp"], ran.calls["synchronize"]) > 0

    def test_float64_is_never_asked_of_it(self, ran: Ran) -> None:
        assert "float64" not in ran.calls
        contracted = ran.of("torch:abacus")["flash@fused_contracted"]
        assert contracted.outcome == SKIPPED != ran.of("cpu")["flash@fused_contracted"].outcome
        assert "fused multiply-add" in contracted.reasons[0]

    def test_of_pytorch_s_own_it_has_what_pytorch_has_for_it(self, ran: Ran) -> None:
        assert ran.calls["aten::_safe_softmax"] > 0, "the composed implementation ran there"
        flex = ran.of("torch:abacus")["flex"]
        assert flex.outcome == SKIPPED
        assert flex.reasons[0].startswith("tried with torch.compile, it raised ")
        assert "sdpa_flash" in ran.of("cpu")
        assert "sdpa_flash" not in ran.of("torch:abacus"), "nobody has written it for the abacus"

    def test_the_run_says_what_it_is_and_what_its_arithmetic_does(self, ran: Ran) -> None:
        assert ran.run.platform["device"] == "abacus of ten beads"
        assert ran.run.evidence("torch:abacus") == "bits on this abacus"
        measured, cpu = (ran.run.platform["fingerprint"][name] for name in ("torch:abacus", "cpu"))
        assert measured.items() >= cpu.items()
        assert "fp32_matmul_keeps" in measured

    def test_a_device_that_is_not_here_is_no_cell_that_passed(self, ran: Ran) -> None:
        assert ran.of("torch:xpu") == {}
        assert set(ran.run.unavailable) == {"torch:xpu"}
        assert re.search(r"^backend torch:xpu did not run: PyTorch .* finds no xpu$", ran.output, re.MULTILINE)

    def test_reports_take_the_name_apart_where_it_ends(
        self, ran: Ran, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.chdir(ran.folder)
        assert cli.main(["show", "out/here.json", "--backend", "torch:*"]) == 0
        shown = capsys.readouterr().out
        assert "torch:abacus, bf16" in shown
        assert "torch:abacus-mine: " in shown, "the plan that explains it"
        assert "cpu, bf16" not in shown
        Path("again.json").write_text(Path("out/here.json").read_text().replace(str(ran.run.run), "another"))
        assert cli.main(["gate", "out/here.json", "again.json"]) == 0
        names = {case.get("name") for case in ET.parse(ran.folder / "here.xml").iter("testcase")}
        assert "test_cell[torch:abacus-fair-random_causal-bf16]" in names


ABSENT = [
    ("torch:mps", "torch:mps can't run here: PyTorch"),
    ("torch:hpu", "torch:hpu can't run here: PyTorch"),
    ("torch:meta", "torch:meta can't run here: PyTorch"),
    ("torch:frob", "unknown backend 'torch:frob': "),
    ("torch:xpu:1", "unknown backend 'torch:xpu:1': workers take turns"),
    ("torch:", "unknown backend 'torch:': "),
    ("torch:*", "unknown backend 'torch:*'"),
    ("torch:cuda", "backend 'torch:cuda' is called cuda"),
    ("torch:npu", "backend 'torch:npu' is called ascend"),
]


@pytest.mark.parametrize(("name", "line"), ABSENT)
def test_what_is_not_here_or_unknown_is_one_line_and_bad_usage(
    matrix: Callable[..., pytest.RunResult], name: str, line: str
) -> None:
    result = matrix("--backend", name, "--kernels", "standard", "--cases", "random")
    assert result.ret == 2
    said = result.stderr.str().splitlines() + [text for text in result.outlines if "--backend" in text]
    assert [text for text in said if f"--backend: {line}" in text]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Two devices, of which torch.frob would tell no more than it has to."""
    module = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


FROB = torch_device("torch:frob")


class TestWhatADeviceTells:
    def test_workers_by_memory_and_else_by_devices(self, two: SimpleNamespace) -> None:
        assert FROB.worker_limit() == 2
        two.mem_get_info = lambda index: (9 * GIB * (index + 1), 80 * GIB)
        assert FROB.worker_limit() == 4, "two on each: spread evenly, the fuller one decides"

    def test_workers_take_turns(self, two: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
        taken: list[int] = []
        two.set_device = taken.append
        for worker in ("gw0", "gw3", "master", ""):
            monkeypatch.setenv("PYTEST_XDIST_WORKER", worker)
            FROB.set_up()
        assert taken == [0, 1]

    def test_names_and_driver(self, two: SimpleNamespace) -> None:
        assert FROB.describe() == {"device": "frob"}
        two.get_device_name = "Frob {}".format
        two.get_device_properties = lambda index: SimpleNamespace(driver_version="1.3")
        assert FROB.describe() == {"device": "Frob 0, Frob 1", "driver": "1.3"}
        two.get_device_name = lambda index: 1 / 0
        assert FROB.describe() == {"device": "ZeroDivisionError: division by zero"}, "an error is no end of the run"

    def test_what_stays_broken_is_poisoned_and_what_is_not_in_use_is_not_asked(self, two: SimpleNamespace) -> None:
        def fail() -> None:
            raise RuntimeError("device lost")

        two.synchronize = lambda: None
        assert not FROB.poisoned()
        two.synchronize = fail
        assert FROB.poisoned()
        two.is_initialized = lambda: False
        assert not FROB.poisoned()

    def test_without_a_way_to_wait_a_number_is_read(self, two: SimpleNamespace) -> None:
        replace(FROB, device="cpu").synchronize()
        with pytest.raises(RuntimeError, match="frob"):
            FROB.synchronize()

    @pytest.mark.parametrize("error", [TypeError("Cannot convert a MPS Tensor to float64 dtype"), RuntimeError("x")])
    def test_no_float64_has_a_remedy_whatever_raises_it(self, two: SimpleNamespace, error: Exception) -> None:
        with pytest.raises(DeviceError if isinstance(error, TypeError) else RuntimeError) as caught, FROB.in_use():
            raise error
        assert ("compute in float32" in str(caught.value)) == isinstance(error, TypeError)


def test_of_pytorch_s_implementations_a_device_has_those_registered_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    there = {(sdpa.OVERRIDEABLE.operator, "XPU"), ("aten::_scaled_dot_product_attention_math_for_mps", "MPS")}
    monkeypatch.setattr(torch._C, "_dispatch_has_kernel_for_dispatch_key", lambda *asked: asked in there)
    of_intel, of_apple, of_none = map(sdpa.registered_sdpa_kernels, ("xpu", "mps", "hpu"))
    declared = {kernel.name: kernel.declaration is not None for kernel in of_intel}
    assert declared == {"sdpa_overrideable": False, "sdpa_math": True}
    assert [kernel.declaration for kernel in of_apple] == [None], "Apple's writing of it rounds where nobody says"
    assert [kernel.name for kernel in of_none] == ["sdpa_math"]


def test_other_words_of_a_list_are_left_to_others() -> None:
    assert torch_devices([*BACKENDS, "frob", "interp*"]) == {}
    assert list(torch_devices(["cpu", "torch:mps"])) == ["torch:mps"]
