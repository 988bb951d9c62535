"""The kernels' source as a module: compiled, or interpreted, or both in one process."""

import importlib.metadata
import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from packaging.version import Version

OLDEST = "3.6"  # the first whose language has all that the kernels say: tl.mul, for one
# Packages that bring the module.
_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-ascend")
_SWITCH = "TRITON_INTERPRET"
_FOLDER = Path(__file__).parent / "device"
_NAMES = {False: "tiebreak.kernels.triton.compiled", True: "tiebreak.kernels.triton.interpreted"}


def installed() -> str | None:
    """Version of Triton, without importing it; None where no package says that it brings it."""
    for name in _PACKAGES:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def missing() -> str | None:
    """None, or why there is no triton here that the kernels can use, in one line. It is not imported."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'tiebreak[triton]'"
    found = installed()
    if found is not None and Version(found) < Version(OLDEST):
        return f"triton {found} is too old: the kernels need {OLDEST} or newer"
    return None


def not_interpreting() -> str | None:
    """None, or why Triton's interpreter can't run the kernels here, in one line."""
    if (reason := missing()) is not None:
        return reason
    found, numpy = installed(), importlib.metadata.version("numpy")
    # Its loops take an array of one element for a number, which numpy has deprecated since 1.25 and refuses since 2.4.
    if found is not None and Version(found) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of triton {found} does not work with numpy {numpy}: pip install 'numpy<2.4'"
    return None


@cache
def source(part: str, *, interpreted: bool) -> ModuleType:
    """One module of `device/`.

    triton.jit decides as it decorates a function whether that function is compiled or interpreted. So the folder is
    imported under a name of its own for each, with triton's switch set meanwhile.

    Args:
        part: its name in the folder.
        interpreted: whether its functions run in Triton's interpreter, on a CPU, or are compiled.

    Raises:
        ValueError: triton is not installed.
    """
    reason = missing()
    if reason is not None:
        raise ValueError(reason)
    package = _NAMES[interpreted]
    with _switched(interpreted):
        if package not in sys.modules:
            _import_folder(package)
        return import_module(f"{package}.{part}")


def _import_folder(package: str) -> None:
    spec = importlib.util.spec_from_file_location(
        package, _FOLDER / "__init__.py", submodule_search_locations=[str(_FOLDER)]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[package] = module
    spec.loader.exec_module(module)


@contextmanager
def _switched(interpreted: bool) -> Iterator[None]:
    # triton's own functions are to be compilable even where the user has set the switch.
    before = os.environ.get(_SWITCH)
    os.environ[_SWITCH] = "0"
    import_module("triton")
    os.environ[_SWITCH] = "1" if interpreted else "0"
    try:
        yield
    finally:
        del os.environ[_SWITCH]
        if before is not None:
            os.environ[_SWITCH] = before
