"""What a kernel raised, in one line."""

from pathlib import Path

from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.loading import place_of
from tiebreak.kernels.kernel import CannotRunError, Kernel


def first_line(error: Exception) -> str:
    """Of its message."""
    return (str(error).strip().splitlines() or ["no message"])[0]


def raised(error: Exception, kernel: Kernel) -> str:
    """What was raised, and the deepest line of the kernel's own file that did; of a broken contract, the kernel's."""
    code = kernel.caller.code if isinstance(kernel, UserKernel) else None
    at = place_of(error, code.co_filename if code else "")
    if isinstance(error, CannotRunError):
        at = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else at
        return f"{first_line(error)}{at}"
    what = f"{type(error).__name__}: {first_line(error)}{at}"
    return "; ".join([what, *getattr(error, "__notes__", ())])  # with what is known of the cause
