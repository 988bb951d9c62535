"""The kernels' source as modules, which are imported where triton is, and how it is compiled for a card elsewhere."""

import importlib.metadata
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any
from unittest.mock import patch

from packaging.version import Version

from tiebreak.kernels.triton.loading import SWITCH, installed, missing

_EXECUTING = ContextVar("executing", default=False)  # whether what is compiled is executed on the host
_BINARIES = frozenset({"cubin", "hsaco"})  # Triton's stages after the assembly's text


def not_interpreting() -> str | None:
    """Return None, or why Triton's interpreter can't run the kernels here, in one line."""
    if (reason := missing()) is not None:
        return reason
    if importlib.util.find_spec("ml_dtypes") is None:
        return "ml_dtypes is not installed: pip install 'tiebreak[triton]'"
    version, numpy = installed(), importlib.metadata.version("numpy")
    # Its loops take an array of one element for a number, which numpy has deprecated since 1.25 and refuses since 2.4.
    if version is not None and Version(version) < Version("3.7") and Version(numpy) >= Version("2.4"):
        return f"the interpreter of triton {version} does not work with numpy {numpy}: pip install 'numpy<2.4'"
    return None


@cache
def source(part: str) -> ModuleType:
    """Return one module of `device/`, by its name in the folder; ValueError: triton is not installed."""
    if (reason := missing()) is not None:
        raise ValueError(reason)
    # Without the user's switch: what triton.jit decorates under it can't be compiled. What is compiled can be both.
    with patch.dict(os.environ):
        os.environ.pop(SWITCH, None)
        return import_module(f"tiebreak.kernels.triton.device.{part}")


def is_executing() -> bool:
    """Return whether code compiled for an absent card is executed on the host now."""
    return _EXECUTING.get()


@contextmanager
def compiling_text(*, executed: bool = False) -> Iterator[None]:
    """Let Triton compile down to the assembly's text, whatever the environment says: its binary is the text's bytes.

    So no card is needed. If the text is `executed`, launches are made as on a GPU.
    """
    from triton import knobs

    with knobs.runtime.scope(), knobs.compilation.scope(), knobs.language.scope():
        knobs.runtime.override_arch = None
        knobs.runtime.add_stages_inspection_hook = _without_assembler
        knobs.compilation.disable_line_info = False
        knobs.language.force_disable_fp_fusion = False
        before = _EXECUTING.set(executed)
        try:
            yield
        finally:
            _EXECUTING.reset(before)


def _without_assembler(*stages: Any) -> tuple[str, str]:
    """Triton calls this twice: for what to add to its cache's key, and to let the stages be changed."""
    for name in _BINARIES.intersection(stages[1]) if stages else ():
        stages[1][name] = lambda text, _metadata: text.encode()
    return "text as binary", "text as binary"
