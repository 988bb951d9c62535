"""Find Triton, and how its kernels are launched."""

import importlib.metadata
import importlib.util
import os
from contextlib import suppress
from typing import ClassVar

from packaging.version import Version

OLDEST = "3.6"  # the first whose language has all that the kernels use: tl.mul, for one
# Packages that bring the module.
_PACKAGES = ("triton", "pytorch-triton", "pytorch-triton-rocm", "triton-rocm", "triton-ascend")
SWITCH = "TRITON_INTERPRET"  # triton.jit reads it as it decorates


def installed() -> str | None:
    """Return the version of Triton, without importing it; None where no installed package provides it."""
    for name in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return None


def missing() -> str | None:
    """Return None, or why there is no triton that the kernels can use, in one line. It is not imported."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'tiebreak[triton]'"
    version = installed()
    if version is not None and Version(version) < Version(OLDEST):
        return f"triton {version} is too old: the kernels need {OLDEST} or newer"
    return None


def is_interpreting() -> bool:
    """Return whether Triton's functions are interpreted now."""
    return os.environ.get(SWITCH) == "1"


class Tuning:
    """The configurations and the count of launches that callers of kernels and their launcher share in this process."""

    chosen = ""  # KERNEL.NAME=VALUE+NAME=VALUE; empty: the first of every kernel
    taken = False  # whether a kernel was launched in the chosen one
    launches: int | None = None  # so far, of any kernel, where an absent card's are run here
    left: ClassVar[dict[str, dict[str, set[str]]]] = {}  # by kernel, by what its code sees: by pruning of calls
