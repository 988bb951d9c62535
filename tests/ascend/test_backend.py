"""The host's side of the backend: what is missing, workers, errors, records, versions."""

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tiebreak.backends.ascend import device
from tiebreak.backends.ascend.backend import ASCEND, Ascend, ascend
from tiebreak.backends.ascend.device import (
    DeviceError,
    TorchNpu,
    cann_version,
    deterministic,
    driver_missing,
    driver_version,
    import_failure,
    remedies,
    worker_index,
)
from tiebreak.backends.backend import CPU
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench

CASES = {case.name: case for case in SCRIPTED}
VERSION = torch.__version__.partition("+")[0]

FAKE = """
import os
class npu:
    chosen = None
    class matmul: allow_hf32 = True
    class utils: pass
    device_count = staticmethod(lambda: int(os.environ["NPUS"]))
    set_device = staticmethod(lambda index: setattr(npu, "chosen", index))
    current_device = staticmethod(lambda: npu.chosen)
    get_device_name = staticmethod(lambda index: f"Ascend910B{index}")
    manual_seed_all = staticmethod(lambda seed: None)
    synchronize = staticmethod(lambda: None)
__version__ = "9.9"
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A file system with a driver."""
    return write(
        tmp_path / "root", {"dev/davinci_manager": "", "usr/local/Ascend/driver/version.info": "Version=24.1\n"}
    )


@pytest.fixture
def backend_answers(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, object]]:
    """Asks the real backend, for which torch_npu is what the test says."""
    monkeypatch.setenv("HCCL_DETERMINISTIC", "")  # so that what the backend sets is taken back
    monkeypatch.delenv("HCCL_DETERMINISTIC")
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def ask(package: str, requires: str = f"torch=={VERSION}", **environment: str) -> dict[str, object]:
        metadata = f"Metadata-Version: 2.1\nName: torch-npu\nVersion: 9.9\nRequires-Dist: {requires}\n"
        write(site, {"torch_npu.py": package, "torch_npu-9.9.dist-info/METADATA": metadata})
        importlib.invalidate_caches()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch_npu", None)  # so that what is imported is taken back
            del sys.modules["torch_npu"]
            for once in ("_import_failure", "_start"):  # as in a process that has asked nothing yet
                patch.setattr(device, once, cache(getattr(device, once).__wrapped__))
            return answers(TorchNpu(root=root))

    return ask


def answers(npu: TorchNpu) -> dict[str, object]:
    reason = ascend(npu).unavailable()
    assert ascend(npu).unavailable() == reason
    values: dict[str, object] = {"reason": reason, "imported": "torch_npu" in sys.modules}
    if reason is None:
        ascend(npu).set_up()
        values |= {"facts": npu.facts(), "described": ascend(npu).describe(), "hccl": os.environ["HCCL_DETERMINISTIC"]}
    return values


def test_a_torch_npu_for_another_torch_is_named_without_importing_it(
    backend_answers: Callable[..., dict[str, object]],
) -> None:
    values = backend_answers("raise SystemExit('imported')", requires="torch==2.1.0")
    assert values["reason"] == (
        f"torch-npu 9.9 is built for torch==2.1.0, this is torch {torch.__version__}:"
        " install the one or the other (docs/devices.md)"
    )
    assert not values["imported"]


def test_without_a_driver_torch_npu_is_left_alone(
    backend_answers: Callable[..., dict[str, object]], root: Path
) -> None:
    (root / "dev/davinci_manager").unlink()
    (root / "usr/local/Ascend/driver/version.info").unlink()
    values = backend_answers("raise SystemExit('imported')")
    assert str(values["reason"]).startswith("no Ascend driver: install it")
    assert not values["imported"]


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            OSError("libascend_hal.so: cannot open shared object file: No such file or directory"),
            "no Ascend driver: its library libascend_hal.so can't be found; install it (docs/devices.md)",
        ),
        (
            ImportError("/site/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN3c105ErrorE"),
            "torch-npu does not fit this CANN or this torch: libtorch_npu.so: undefined symbol: _ZN3c105ErrorE;"
            " docs/devices.md has what fits",
        ),
        (
            RuntimeError("Two accelerators cannot be used at the same time\n[ERROR] at length"),
            "torch_npu can't be imported: RuntimeError: Two accelerators cannot be used at the same time",
        ),
        (ImportError(), "torch_npu can't be imported: ImportError: no message"),
    ],
    ids=["driver", "another build", "anything else", "no message"],
)
def test_a_failing_import_is_one_line(error: Exception, reason: str) -> None:
    assert import_failure(error) == reason


def test_a_library_of_cann_that_is_missing_is_named(backend_answers: Callable[..., dict[str, object]]) -> None:
    text = "libhccl.so: cannot open shared object file: No such file or directory. Please check that cann is installed"
    assert backend_answers(f"raise ImportError({text!r})")["reason"] == (
        "CANN's library libhccl.so can't be found: install CANN and source its set_env.sh (docs/devices.md)"
    )


@pytest.mark.parametrize(
    ("visible", "message"),
    [(None, "no NPU: torch-npu finds none"), ("7", "no NPU: ASCEND_RT_VISIBLE_DEVICES='7' leaves none")],
)
def test_no_npu_has_a_message(
    backend_answers: Callable[..., dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    message: str,
) -> None:
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    environment = {} if visible is None else {"ASCEND_RT_VISIBLE_DEVICES": visible}
    assert str(backend_answers(FAKE, NPUS="0", **environment)["reason"]).startswith(message)


def test_workers_are_spread_over_the_npus_and_the_versions_recorded(
    backend_answers: Callable[..., dict[str, object]], tmp_path: Path
) -> None:
    record = {"x86_64-linux/ascend_toolkit_install.info": "package_name=toolkit\nversion=8.5.0\n"}
    home = str(write(tmp_path / "cann", record))
    values = backend_answers(
        FAKE, NPUS="2", PYTEST_XDIST_WORKER="gw3", ASCEND_HOME_PATH=home, HCCL_DETERMINISTIC="strict"
    )
    assert values["reason"] is None
    assert values["hccl"] == "strict", "what the user has set stays"
    facts = values["facts"]
    assert isinstance(facts, dict)
    assert facts["npu"] == 1
    assert facts["hf32_allowed"] == "True"
    assert values["described"] == {"soc": "Ascend910B1", "torch_npu": "9.9", "cann": "8.5.0", "driver": "24.1"}


def test_the_package_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ASCEND.unavailable() == f"torch-npu is not installed: pip install torch-npu=={VERSION} (docs/devices.md)"


@pytest.mark.parametrize(
    "files", [{"dev/davinci_manager": ""}, {"dev/vdavinci100": ""}, {"usr/local/Ascend/driver/version.info": ""}]
)
def test_a_driver_shows_by_its_devices_or_its_files(tmp_path: Path, files: dict[str, str]) -> None:
    assert driver_missing(tmp_path) is not None
    assert driver_missing(write(tmp_path, files)) is None


def test_versions_are_read_from_what_the_installers_leave(tmp_path: Path) -> None:
    assert cann_version(tmp_path) == driver_version(tmp_path) == ""
    write(tmp_path, {"aarch64-linux/ascend_toolkit_install.info": "arch=aarch64\nversion=8.3.RC1\n"})
    write(tmp_path, {"usr/local/Ascend/driver/version.info": "Version=23.0.6\nascendhal_version=7.35.19\n"})
    assert cann_version(tmp_path) == "8.3.RC1"
    assert driver_version(tmp_path) == "23.0.6"


@pytest.mark.parametrize(
    ("environment", "index"), [({}, 0), ({"PYTEST_XDIST_WORKER": "gw11"}, 11), ({"PYTEST_XDIST_WORKER": "master"}, 0)]
)
def test_the_number_of_a_worker(environment: dict[str, str], index: int) -> None:
    assert worker_index(environment) == index


def failing(text: str) -> Kernel:
    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        raise RuntimeError(text)

    return Kernel("failing", compute, None)


@pytest.mark.parametrize(
    ("raised", "line"),
    [
        (
            "NPU out of memory. Tried to allocate 2.00 GiB (NPU 0; 60.97 GiB total capacity)\nand more",
            "cpu out of memory: fewer workers (-n) or --heads; NPU out of memory. Tried to allocate 2.00 GiB",
        ),
        (
            "call aclnnMul failed, detail:EZ1001: self not implemented for DT_DOUBLE, should be in dtype support list",
            "cpu has no float64, and the kernel asks for it: compute in float32",
        ),
    ],
    ids=["memory", "float64"],
)
def test_an_error_with_a_remedy_becomes_a_line_with_it(backend: Ascend, raised: str, line: str) -> None:
    with pytest.raises(DeviceError) as caught:
        backend.run(failing(raised), CASES["random"].make(1, 0, 16, BF16), gradients=False)
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_any_other_error_stays_as_it_is(backend: Ascend) -> None:
    with pytest.raises(RuntimeError, match="shapes do not fit") as caught, remedies("npu"):
        raise RuntimeError("shapes do not fit")
    assert not isinstance(caught.value, DeviceError)


def test_a_device_that_fails_to_wait_is_poisoned(npu: Any, backend: Ascend) -> None:
    assert not backend.poisoned()
    assert ascend(replace(npu, broken=True)).poisoned()


def test_a_run_waits_for_the_device_before_it_reads(npu: Any, backend: Ascend) -> None:
    backend.run(backend.kernel("flash@fused"), CASES["random"].make(1, 0, 16, BF16), gradients=False)
    assert npu.waits == ["cpu"]


def test_determinism_is_asked_for_within_a_run_alone(backend: Ascend) -> None:
    seen = []

    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        return AttentionOutput(inputs.q)

    backend.run(Kernel("noting", compute, None), CASES["random"].make(1, 0, 16, BF16), gradients=False)
    assert seen == [(True, True)]
    assert not torch.are_deterministic_algorithms_enabled()
    with pytest.raises(ValueError, match="within"), deterministic():
        raise ValueError("within")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("kernel", ["standard", "flash@fused", "stabilized@paper", "fair", "dithered@all_bf16"])
def test_composed_kernels_run_on_it_as_on_any_torch_device(backend: Ascend, kernel: str) -> None:
    inputs = CASES["random_causal"].make(1, 0, 16, BF16)
    ours = backend.run(backend.kernel(kernel), inputs, gradients=True)
    theirs = CPU.run(CPU.kernel(kernel), inputs, gradients=True)
    assert torch.equal(ours.o, theirs.o)
    assert ours.gradients is not None
    assert theirs.gradients is not None
    assert torch.equal(ours.gradients.dq, theirs.gradients.dq)


def test_the_fingerprint_has_facts_probes_and_statistics(backend: Ascend) -> None:
    values = backend.fingerprint()
    assert backend.describe() == {"soc": "none: torch on a CPU in an NPU's place"}
    assert values["npu"] == 0.0
    assert values["cast"] == "even"
    assert values["fp32_matmul_keeps"] == 23.0
    assert values["p_cast"] == "even"
    assert float(values["softmax_max_error"]) < 1e-5
    assert float(values["softmax_sum_error"]) < 1e-5


def test_a_probe_that_a_device_cannot_run_costs_its_own_answer_alone(backend: Ascend) -> None:
    without = ascend(replace(backend.npu, operators=lambda name: None))
    values = without.fingerprint()
    assert str(values["probe 3 failed"]).startswith("NotImplementedError: this torch-npu has no npu_fusion_attention")
    assert values["cast"] == "even"


@pytest.mark.parametrize("changed", [{"name": "ascend"}, {"device": "npu"}])
def test_the_stand_in_cannot_be_called_ascend(backend: Ascend, changed: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="and nothing else is"):
        replace(backend, **changed)  # type: ignore[arg-type]


def test_nothing_but_an_npu_computes_what_is_recorded_as_ascend(backend: Ascend) -> None:
    """The stand-in behind the real one's name and device: torch has no such device here, and no number is recorded."""
    if ASCEND.unavailable() is None:
        pytest.skip("this machine has an NPU: nothing stands in for one")
    dressed_up = replace(backend, name="ascend", device="npu")
    for name in ("flash@fused", "npu_fusion_bnsd_p0"):
        cell = Cell(dressed_up, dressed_up.kernel(name), Call(CASES["random"]), BF16)
        record = run_cell(cell, Workbench(Settings(heads=16)))
        assert record.outcome == "crashed"
        assert record.measures == {}


def test_records_of_the_stand_in_bear_its_name(backend: Ascend) -> None:
    cell = Cell(backend, backend.kernel("npu_fusion_bnsd_p0"), Call(CASES["tied_maxima[k=2]"]), BF16)
    record = run_cell(cell, Workbench(Settings(heads=16)))
    assert record.backend == "ascend_stand_in"
    assert record.id.startswith("ascend_stand_in-npu_fusion_bnsd_p0-")
    assert record.number("bias") is not None
