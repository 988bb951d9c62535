"""What importing the suite must not do: load a device's package, or fail because one is broken."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

MODULES = (
    "tiebreak.kernels.formats",
    "tiebreak.backends.platform",
    "tiebreak.backends.registry",
    "tiebreak.matrix.plugin",
    "tiebreak.programs.train",
    "tiebreak.programs.audit.command",
)
FORBIDDEN = ("triton", "torch_npu", "matplotlib")


def _python(code: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def broken_device(tmp_path: Path) -> Path:
    """A folder with a device package that torch loads on its own, and that fails as torch-npu does without a driver."""
    (tmp_path / "broken_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')\n")
    info = tmp_path / "broken_npu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_npu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nbroken_npu = broken_npu:autoload\n")
    return tmp_path


def test_torch_alone_falls_over_a_broken_device_package(broken_device: Path) -> None:
    """Shows that the fixture is what the next test says it is."""
    assert _python("import torch", broken_device).returncode != 0


@pytest.mark.parametrize("module", MODULES)
def test_a_broken_device_package_does_not_matter(module: str, broken_device: Path) -> None:
    done = _python(f"import {module}", broken_device)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", MODULES)
def test_importing_loads_no_device_package(module: str) -> None:
    done = _python(f"import sys, {module}; print([name for name in {FORBIDDEN!r} if name in sys.modules])")
    assert done.stdout.strip() == "[]", done.stderr


def test_reports_import_no_torch() -> None:
    done = _python("import sys, tiebreak.reports.tables, tiebreak.reports.store; print('torch' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
