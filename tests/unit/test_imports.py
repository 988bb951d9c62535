"""What importing the suite must not do: load a device's package, or fail because one is broken."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tiebreak.kernels

MODULES = (
    "tiebreak.kernels.formats",
    "tiebreak.backends.platform",
    "tiebreak.backends.registry",
    "tiebreak.matrix.plugin",
    "tiebreak.laboratory.train",
    "tiebreak.laboratory.sweep",
    "tiebreak.laboratory.fleet",
    "tiebreak.programs.shrink.command",
    "tiebreak.cases.capture",
    "tiebreak.laboratory.audit.command",
)
FORBIDDEN = {"triton", "torch_npu", "ray"}

# Prints what torch finds, or would find, in the variable by which it knows whether to load device packages.
UP_TO_TORCH = """
import contextlib, importlib, os, sys

class Reached(BaseException):
    pass

class AtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise Reached

sys.meta_path.insert(0, AtTorch())
for module in sys.argv[1:]:
    with contextlib.suppress(Reached):
        importlib.import_module(module)
    print(os.environ.pop("TORCH_DEVICE_BACKEND_AUTOLOAD", "unset"))
    for name in [name for name in sys.modules if name.startswith("tiebreak")]:
        del sys.modules[name]
"""


def _python(code: str, path: Path | None = None, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", code, *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


@pytest.fixture
def broken_device(tmp_path: Path) -> Path:
    """A folder with a device package that torch loads on its own, and that fails as torch-npu does without a driver."""
    (tmp_path / "broken_npu.py").write_text("raise ImportError('libascendcl.so: cannot open shared object file')\n")
    info = tmp_path / "broken_npu-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken_npu\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[torch.backends]\nbroken_npu = broken_npu:autoload\n")
    return tmp_path


def test_importing_loads_no_device_package_and_a_broken_one_does_not_matter(broken_device: Path) -> None:
    """The package, or reports alone, import no torch; the public names are there."""
    assert _python("import torch", broken_device).returncode != 0, "torch alone fails over it"
    names = "*(getattr(tiebreak, name).__name__ for name in tiebreak.__all__)"
    reports = "tiebreak.reports.tables.run, tiebreak.reports.records.store"
    code = (
        f"import sys, tiebreak, {reports}; print('torch' in sys.modules, {names}); import {', '.join(MODULES)};"
        f" print([*{FORBIDDEN!r} & sys.modules.keys()], flush=True); tiebreak.kernal"
    )
    done = _python(code, broken_device)
    assert done.stdout.split() == ["False", "assert_fair", "check", "inputs", "kernel", "pair", "[]"], done.stderr
    assert "AttributeError: module 'tiebreak' has no attribute 'kernal'" in done.stderr


def test_whichever_module_comes_first_keeps_torch_from_loading_device_packages() -> None:
    """Each is imported up to its first import of torch, which would take seconds."""
    done = _python(UP_TO_TORCH, None, *MODULES)
    assert done.stdout.split() == ["0"] * len(MODULES), done.stdout + done.stderr


@pytest.mark.parametrize(("inside", "workers"), [(True, "0"), (False, "1")])
def test_a_clone_that_is_not_what_is_imported_is_refused(
    tmp_path: Path, pytester: pytest.Pytester, inside: bool, workers: str
) -> None:
    """From its own folder and from another, before the plug-in of the other version looks at the options."""
    clone, here = tmp_path / "clone", Path(tiebreak.kernels.__file__).resolve().parents[1]
    (clone / "tests").mkdir(parents=True)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(here / name, clone)
    (clone / "tests" / "test_it.py").write_text("def test_it() -> None: ...\n")
    os.chdir(clone if inside else clone.parent)
    words = (str(clone / "tests"), "-p", "no:cacheprovider", "-n", workers, "--cases", "no_such_case")
    refused = pytester.runpytest_inprocess(*words, no_reraise_ctrlc=True)
    assert refused.ret == 2
    (line,) = (line for line in (*refused.outlines, *refused.errlines) if line)
    assert line == (
        f"Exit: tests of {clone}, but `import tiebreak` finds {here}: use this checkout's environment (make venv), or"
        f" install it: pip install -e {clone}"
    )
