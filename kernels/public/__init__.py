"""Does this attention kernel round fairly, on this device, and does the fix hold?

For files with a kernel: ``tiebreak.kernel``, the decorator that declares what a kernel's signature does not show. For
notebooks and harnesses: ``tiebreak.check(function)``, which returns a verdict. For a kernel's own tests:
``tiebreak.inputs(case)``, a failure input with its exact answer, and ``tiebreak.assert_fair(o, exact)``
(docs/your-kernel.md). To import ``tiebreak`` imports nothing else; torch comes with the names.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__all__ = ["assert_fair", "check", "inputs", "kernel", "pair"]

_HOMES = {
    "assert_fair": "tiebreak.programs.assertions",
    "check": "tiebreak.programs.checking",
    "inputs": "tiebreak.programs.assertions",
    "kernel": "tiebreak.kernels.external",
    "pair": "tiebreak.programs.pair",
}

if TYPE_CHECKING:
    from tiebreak.kernels.external import kernel

    assert_fair: Any  # (o, exact, *, groups=1) -> None
    inputs: Any  # (case, *, heads=64, dtype=torch.bfloat16, ...) -> tiebreak.programs.assertions.ScriptedCall
    check: Any  # (function, *, in_process=False, workers="auto", **options) -> tiebreak.reports.verdict.Verdict
    pair: Any  # (a, b, **options) -> tiebreak.reports.pairs.verdict.PairVerdict
else:

    def __getattr__(name: str) -> Any:
        """The public names, each imported when it is first used: the command answers before torch has loaded."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(import_module(_HOMES[name]), name)
