"""The kernels' source as a module: compiled, or interpreted, or both in one process."""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

_SWITCH = "TRITON_INTERPRET"
_FOLDER = Path(__file__).parent / "device"
_NAMES = {False: "tiebreak.kernels.triton.compiled", True: "tiebreak.kernels.triton.interpreted"}


def missing() -> str | None:
    """None, or why there is no triton here, in one line."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'tiebreak[triton]'"
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
