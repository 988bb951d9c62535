"""Kernels compiled to assembly for a GPU that need not be there: Triton's compiler asks for no driver.

Everything that an environment variable of Triton's could change about the result is pinned.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from packaging.version import Version

from tiebreak.kernels.triton.loading import installed, missing
from tiebreak.kernels.triton.roster import Compilation
from tiebreak.programs.audit.targets import Target

# PTX of 3.6 and 3.7 gives the line inside a called function alone, and so not whose cast it is.
OLDEST = "3.8"
_ALIGNED = 16  # bytes: every tensor of PyTorch's starts at a multiple of more
_ASSEMBLERS = ("cubin", "hsaco")  # Triton's stages after the assembly's text


class NotCompiledError(Exception):
    """A kernel that Triton does not compile for a target; the message is the reason, in one line."""


def unavailable() -> str | None:
    """None, or why nothing can be compiled here, in one line."""
    reason = missing()
    if reason is not None:
        return reason
    version = installed()
    if version is not None and Version(version) < Version(OLDEST):
        return f"triton {version} does not record which line asks for a cast: the audit needs {OLDEST} or newer"
    from triton import knobs

    try:
        _ = knobs.nvidia.ptxas
    except RuntimeError as error:
        return f"{_reason(error)}: it comes with triton's wheel, or set TRITON_PTXAS_PATH"
    return None


def compiler() -> str:
    """Triton's version."""
    import triton

    return str(triton.__version__)


def compile_for(target: Target, source: Compilation) -> str:
    """Compile a kernel.

    Args:
        target: the GPU.
        source: the kernel, with whether a product and a sum may be contracted into one fma.

    Returns:
        The kernel's assembly as text: PTX or AMDGCN. The assembler does not run.

    Raises:
        NotCompiledError: this triton does not know the target, or does not compile the kernel for it.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = [at for at, kind in enumerate(source.signature.values()) if kind.startswith("*")]
    attributes = {(at,): [["tt.divisibility", _ALIGNED]] for at in pointers}
    try:
        with _pinned():
            compiled = triton.compile(
                ASTSource(source.function, dict(source.signature), dict(source.constexprs), attributes),
                target=GPUTarget(target.backend, target.arch, target.warp_size),
                options=dict(source.options),
            )
    # A compiler's errors have no common class.
    except Exception as error:
        raise NotCompiledError(_reason(error)) from error
    return str(compiled.asm[target.assembly])


def _reason(error: Exception) -> str:
    """The last line, which has the error, those above it the place; without the repr around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    wrapped = re.fullmatch(r"\w+\((['\"])(.*)\1\)", last)
    return wrapped.group(2) if wrapped else last


@contextlib.contextmanager
def _pinned() -> Iterator[None]:
    from triton import knobs

    with knobs.runtime.scope(), knobs.compilation.scope(), knobs.language.scope():
        knobs.runtime.override_arch = None
        knobs.runtime.add_stages_inspection_hook = _without_assembler
        knobs.compilation.disable_line_info = False
        knobs.language.force_disable_fp_fusion = False
        yield


def _without_assembler(*stages: Any) -> tuple[str, str]:
    """Triton calls this twice: for what to add to its cache's key, and to let the stages be changed."""
    if stages:
        steps = stages[1]
        for name in _ASSEMBLERS:
            if name in steps:
                steps[name] = lambda _text, _metadata: b""
    return "text only", "text only"
