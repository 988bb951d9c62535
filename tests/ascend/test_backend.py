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

from tiebreak.backends import ascend as device
from tiebreak.backends.ascend import ASCEND, Ascend, ascend
from tiebreak.backends.backend import CPU
from tiebreak.backends.torch_device import DeviceError
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Kernel
from tiebreak.studies.cells import CASES

INPUTS = CASES["random"].make(1, 0, 16, BF16)
VERSION = torch.__version__.partition("+")[0]
DRIVER = "usr/local/Ascend/driver/version.info"
Ask = Callable[..., dict[str, Any]]

FAKE = """
import os
class npu:
    chosen = 0
    class matmul: allow_hf32 = True
    class utils: pass
    device_count = staticmethod(lambda: int(os.environ["NPUS"]))
    set_device = staticmethod(lambda index: setattr(npu, "chosen", index))
    current_device = staticmethod(lambda: npu.chosen)
    get_device_name = staticmethod(lambda index: f"Ascend910B{index}")
    synchronize = staticmethod(lambda: None)
__version__ = "9.9"
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Asks the real backend, for which torch_npu and the files of the system are what the test says."""
    monkeypatch.setenv("HCCL_DETERMINISTIC", "")  # so that what the backend sets is taken back
    monkeypatch.delenv("HCCL_DETERMINISTIC")
    monkeypatch.delenv("ASCEND_RT_VISIBLE_DEVICES", raising=False)
    site = tmp_path / "site"
    monkeypatch.syspath_prepend(str(site))

    def answers(
        package: str, requires: str = f"torch=={VERSION}", driver: str = DRIVER, **environment: str
    ) -> dict[str, Any]:
        metadata = f"Metadata-Version: 2.1\nName: torch-npu\nVersion: 9.9\nRequires-Dist: {requires}\n"
        write(site, {"torch_npu.py": package, "torch_npu-9.9.dist-info/METADATA": metadata})
        backend = ascend(write(tmp_path / "root", {driver: "Version=24.1\nascendhal_version=7.35.19\n"}))
        importlib.invalidate_caches()
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch_npu", None)  # so that what is imported is taken back
            del sys.modules["torch_npu"]
            # As in a process that has asked nothing yet.
            patch.setattr(device, "_import_failure", cache(device._import_failure.__wrapped__))
            reason = backend.unavailable()
            assert backend.unavailable() == reason
            values: dict[str, Any] = {"reason": reason}
            if reason is None:
                backend.set_up()
                values |= {"settings": backend._settings(), "described": backend.describe()}
                values["hccl"] = os.environ["HCCL_DETERMINISTIC"]
            return values

    return answers


@pytest.mark.parametrize("driver", ["dev/davinci_manager", "dev/vdavinci100", DRIVER])
def test_a_driver_shows_by_its_devices_or_its_files(ask: Ask, driver: str) -> None:
    assert ask(FAKE, driver=driver, NPUS="1")["reason"] is None


IMPORTED = "raise SystemExit('imported')"  # torch_npu is left alone
MISSING = {
    "another torch": (
        IMPORTED,
        {"requires": "torch==2.1.0"},
        f"torch-npu 9.9 is built for torch==2.1.0, this is torch {torch.__version__}: install the one or the other",
    ),
    "no driver": (IMPORTED, {"driver": "nothing"}, "no Ascend driver: install it, or pass /dev/davinci_manager and"),
    "a library of the driver": (
        "raise OSError('libascend_hal.so: cannot open shared object file: No such file or directory')",
        {},
        "no Ascend driver: its library libascend_hal.so can't be found; install it (docs/devices.md)",
    ),
    "a library of CANN": (
        "raise ImportError('libhccl.so: cannot open shared object file: No such file. Please install cann')",
        {},
        "CANN's library libhccl.so can't be found: install CANN and source its set_env.sh (docs/devices.md)",
    ),
    "another build": (
        "raise ImportError('/site/torch_npu/lib/libtorch_npu.so: undefined symbol: _ZN3c105ErrorE')",
        {},
        "torch-npu does not fit this CANN or this torch: libtorch_npu.so: undefined symbol: _ZN3c105ErrorE;"
        " docs/devices.md has what fits",
    ),
    "anything else": (
        "raise RuntimeError('Two accelerators cannot be used at the same time\\n[ERROR] at length')",
        {},
        "torch_npu can't be imported: RuntimeError: Two accelerators cannot be used at the same time",
    ),
    "no message": ("raise ImportError()", {}, "torch_npu can't be imported: ImportError: no message"),
    "no NPU": (FAKE, {"NPUS": "0"}, "no NPU: torch-npu finds none"),
    "none visible": (
        FAKE,
        {"NPUS": "0", "ASCEND_RT_VISIBLE_DEVICES": "7"},
        "no NPU: ASCEND_RT_VISIBLE_DEVICES='7' leaves none",
    ),
}


@pytest.mark.parametrize(("package", "given", "reason"), MISSING.values(), ids=MISSING)
def test_what_is_missing_is_one_line(ask: Ask, package: str, given: dict[str, str], reason: str) -> None:
    told = ask(package, **given)["reason"]
    assert told.startswith(reason)
    assert "\n" not in told


def test_workers_are_spread_over_the_npus_and_the_versions_recorded(ask: Ask, tmp_path: Path) -> None:
    record = {"x86_64-linux/ascend_toolkit_install.info": "package_name=toolkit\nversion=8.5.0\n"}
    home = str(write(tmp_path / "cann", record))
    values = ask(FAKE, NPUS="2", PYTEST_XDIST_WORKER="gw3", ASCEND_HOME_PATH=home, HCCL_DETERMINISTIC="strict")
    assert values["reason"] is None
    assert values["hccl"] == "strict", "what the user has set stays"
    assert values["settings"]["npu"] == 1
    assert values["settings"]["hf32_allowed"] == "True"
    assert values["described"] == {
        "device": "Ascend910B0, Ascend910B1",
        "torch_npu": "9.9",
        "cann": "8.5.0",
        "driver": "24.1",
    }
    alone = ask(
        FAKE, NPUS="2", PYTEST_XDIST_WORKER="master", ASCEND_HOME_PATH=str(tmp_path / "none"), HCCL_DETERMINISTIC=""
    )
    assert (alone["settings"]["npu"], alone["described"]["cann"]) == (0, "")


def test_the_package_is_asked_for_where_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert ASCEND.unavailable() == f"torch-npu is not installed: pip install torch-npu=={VERSION} (docs/devices.md)"


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
        ("shapes do not fit", None),
    ],
    ids=["memory", "float64", "any other"],
)
def test_an_error_with_a_remedy_becomes_a_line_with_it(backend: Ascend, raised: str, line: str | None) -> None:
    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        raise RuntimeError(raised)

    with pytest.raises(RuntimeError) as caught:
        backend.run(Kernel("failing", compute, None), INPUTS, gradients=False)
    assert isinstance(caught.value, DeviceError) == (line is not None)
    assert str(caught.value).startswith(line or raised)
    assert "\n" not in str(caught.value)
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_device_that_fails_to_wait_is_poisoned(backend: Any) -> None:
    assert not backend.poisoned()
    assert replace(backend, broken=True).poisoned()


def test_a_run_is_deterministic_and_ends_with_the_device_s_work(backend: Any) -> None:
    seen = []

    def compute(inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool) -> AttentionOutput:
        seen.append(
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled())
        )
        return AttentionOutput(inputs.q)

    backend.run(Kernel("noting", compute, None), INPUTS, gradients=False)
    assert seen == [(True, True)]
    assert backend.waits == ["cpu"]
    assert not torch.are_deterministic_algorithms_enabled()


def test_composed_kernels_run_on_it_as_on_any_torch_device(backend: Ascend) -> None:
    inputs = CASES["random_causal"].make(1, 0, 16, BF16)
    ours, theirs = (each.run(each.kernel("fair"), inputs, gradients=True) for each in (backend, CPU))
    assert torch.equal(ours.o, theirs.o)
    assert ours.gradients is not None
    assert theirs.gradients is not None
    assert torch.equal(ours.gradients.dq, theirs.gradients.dq)


def test_the_fingerprint_has_facts_probes_and_statistics(backend: Ascend) -> None:
    values = backend.fingerprint()
    told = backend.describe()
    assert told["device"] == "none: torch on a CPU in an NPU's place"
    assert "'torch_npu'" in told["torch_npu"], "its error stands for it"
    told = {"npu": 0.0, "cast": "rne", "fp32_matmul_keeps": 23.0, "p_cast": "rne"}
    assert {name: values[name] for name in told} == told
    assert float(values["softmax_max_error"]) < 1e-5
    assert float(values["softmax_sum_error"]) < 1e-5
    without = replace(backend, operators=lambda name: None).fingerprint()
    failed = str(without["probes of the vendor's kernel failed"])
    assert failed.startswith("NotImplementedError: this torch-npu has no npu_fusion_attention"), "its own answer alone"
    assert without["cast"] == "rne"
