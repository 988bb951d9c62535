"""Does this attention kernel round fairly, on this device, and does the fix hold?

For files with a kernel: ``tiebreak.kernel``, the decorator that declares what a kernel's signature does not show. For
notebooks and harnesses: ``tiebreak.check(function)``, which returns a verdict. For a kernel's own tests:
``tiebreak.inputs(case)``, a failure input with its exact answer, and ``tiebreak.assert_fair(o, exact)``
(docs/your-kernel.md). To import ``tiebreak`` imports nothing else; torch comes with the names, whose types editors and
type checkers find in ``__init__.pyi``.
"""

from importlib import import_module
from typing import Any

__all__ = ["assert_fair", "check", "inputs", "kernel", "pair"]

_HOMES = {
    "assert_fair": "tiebreak.programs.assertions",
    "check": "tiebreak.programs.checking",
    "inputs": "tiebreak.programs.assertions",
    "kernel": "tiebreak.kernels.external",
    "pair": "tiebreak.programs.pair",
}


def __getattr__(name: str) -> Any:
    """The public names, each imported when it is first used: the command answers before torch has loaded."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
