"""A kernel's error in one line; and a small call that shows whether a kernel can do what it does not declare."""

from pathlib import Path

from tiebreak.backends.backend import Backend, to_device
from tiebreak.kernels.external.call import SHAPE
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.loading import place_of
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Blame, CannotRunError, Kernel, OutOfBoundsError, first_line


def raised(error: Exception, kernel: Kernel) -> str:
    """Return an error with the deepest line of the kernel's own file; for a broken contract, the kernel's name."""
    code = kernel.caller.code if isinstance(kernel, UserKernel) else None
    at = place_of(error, code.co_filename if code else "")
    if isinstance(error, CannotRunError):
        at = f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else at
        return f"{first_line(error)}{at}"
    what = f"{type(error).__name__}: {first_line(error)}{at}"
    return "; ".join([what, *getattr(error, "__notes__", ())])  # with what is known of the cause


def refusal(backend: Backend, kernel: Kernel, inputs: AttentionInputs) -> str | None:
    """Return None, or why a kernel can't run inputs that are on the host.

    It can't if it does not declare a feature, or if it fails on one that it never declared.
    """
    return kernel.refusal(to_device(inputs, backend.device)) or failed_trial(backend, kernel, inputs)


def failed_trial(backend: Backend, kernel: Kernel, inputs: AttentionInputs) -> str | None:
    """Try a kernel once on inputs on the host that it does not declare, such as grouped heads or a head dimension.

    None where it computes anything, where the call itself will show the error, or where nothing has to be tried; else
    what was tried and how it failed: a reason to skip the cell. An error that breaks the device is raised.
    """
    undeclared = kernel.undeclared(inputs)
    if undeclared is None:
        return None
    small = inputs.part(slice(1))
    failure = _failure(backend, kernel, small)
    oblong = inputs.causal and inputs.q.shape[2] != inputs.k.shape[2]
    plainer = AttentionInputs(small.q, small.k, small.v, small.do, small.formats, oblong, noise_seed=small.noise_seed)
    differs = {*plainer.required_features()} != {*small.required_features()}
    variant = any(feature.variant_of for feature in small.required_features())
    if failure is None or (differs and not variant and _failure(backend, kernel, plainer) is None):
        return None  # what it does say that it takes is to blame
    return f"tried with {undeclared}, it {failure}"


def _failure(backend: Backend, kernel: Kernel, inputs: AttentionInputs) -> str | None:
    """Return None, or how a call failed."""
    try:
        backend.run(kernel, inputs, gradients=False)
    except OutOfBoundsError:  # who reads past an argument has not refused: the call is to fall
        return None
    except CannotRunError as error:  # perhaps it has one head of O for each of K's
        per_key_head = error.blame is Blame.KERNEL and str(error).startswith(SHAPE) and inputs.groups > 1
        return str(error) if per_key_head else None
    except Exception as error:  # whatever the kernel raises
        if backend.poisoned():
            raise
        return f"raised {raised(error, kernel)}"
    return None
