"""Which kernels are audited for which GPUs, compiled to assembly with no GPU: Triton's compiler asks for no driver.

Everything that an environment variable of Triton's could change about the result is pinned.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from tiebreak.kernels.formats import BF16, FP32, Formats
from tiebreak.kernels.triton.compiling import compiling_text
from tiebreak.kernels.triton.compiling import source as source_of
from tiebreak.kernels.triton.config import Config
from tiebreak.kernels.triton.launch import FORWARD, backward_block, format_of_v, forward_block, options
from tiebreak.kernels.triton.loading import installed, missing
from tiebreak.kernels.triton.roster import DECLARATIONS

# PTX of 3.6 and 3.7 gives the line inside a called function alone, and so not whose cast it is.
OLDEST = "3.8"
_ALIGNED = 16  # bytes: every tensor of PyTorch's starts at a multiple of more
_AUDITED = frozenset(  # each brings a rounding plan or a shift rule that no other has
    {
        *(f"triton_{name}/forward" for name in ("flash", "stabilized", "lazy", "fair", "paper", "fp8", "fp8_offset")),
        *(f"triton_flash/{name}" for name in ("delta", "key_gradients", "query_gradient")),
        *("triton_standard/standard", "triton_standard/delta"),
    }
)


@dataclass(frozen=True)
class Target:
    """A GPU architecture, as Triton names it."""

    name: str  # how tables and --targets call it
    backend: str  # Triton's compiler for it: cuda, hip
    arch: int | str  # its number (cuda) or name (hip)
    cards: str  # what a user would buy

    @property
    def assembly(self) -> str:
        """Triton's name of the assembly's text."""
        return {"cuda": "ptx", "hip": "amdgcn"}[self.backend]


_CUDA = {80: "A100", 89: "L4, L40S, RTX 4090", 90: "H100, H200", 100: "B200", 120: "RTX 5090"}
_HIP = {"gfx942": "MI300", "gfx950": "MI350"}
TARGETS: Mapping[str, Target] = {
    **{f"sm_{number}": Target(f"sm_{number}", "cuda", number, cards) for number, cards in _CUDA.items()},
    **{name: Target(name, "hip", name, cards) for name, cards in _HIP.items()},
}


class NotCompiledError(Exception):
    """A kernel that Triton does not compile for a target; the message is the reason, in one line."""


def unavailable() -> str | None:
    """Return None, or why nothing can be compiled here, in one line."""
    if (reason := missing()) is not None:
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


@dataclass(frozen=True)
class Compilation:
    """One kernel to compile: all arguments of triton.compile."""

    name: str  # of the roster's kernel and, after a slash, of the function
    function: Any  # triton's JITFunction
    signature: Mapping[str, str]  # argument -> type
    constexprs: Mapping[str, object]  # argument -> value
    options: Mapping[str, int]  # warps, pipeline stages, and whether products and sums may be contracted


_BACKWARD = (("backward", "delta"), ("backward", "key_gradients"), ("backward", "query_gradient"))
_TYPES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", "fp8_e4m3": "*fp8e4nv"}


def compilations() -> Iterator[Compilation]:
    """Yield the kernels of the roster to compile for causal inputs in bf16 with d = 64.

    Raises:
        ValueError: triton is not installed.
    """
    d, formats = 64, Formats.of(BF16)
    for name, declaration in DECLARATIONS.items():
        plan = declaration.plan.in_formats(formats)
        pointers = {**dict.fromkeys(("Q", "K", "DO"), formats.inputs), "V": format_of_v(plan, formats)}
        pointers |= {"O": plan.o.fmt, **dict.fromkeys(("DQ", "DK", "DV"), plan.gradients.fmt)}
        for part, function in (("forward", FORWARD[declaration.algorithm.name]), *_BACKWARD):
            block = backward_block(plan, d) if part == "backward" else forward_block(declaration.block, d)
            config = Config(plan, declaration.shift_rule, causal=True, d=d, block=block, query_heads=16)
            jitted = getattr(source_of(part), function)
            names: list[str] = jitted.arg_names
            types = {word: _TYPES[pointers.get(word, FP32).name] if word.isupper() else "i32" for word in names}
            constants = {"C": config, "PADDING": None}  # a mask of keys rounds nothing
            types |= dict.fromkeys(constants, "constexpr")
            yield Compilation(f"{name}/{function}", jitted, types, constants, options(d))


def sources() -> list[Compilation]:
    """Return the kernels to audit, each kind of rounding once; ValueError: triton is not installed."""
    return [compilation for compilation in compilations() if compilation.name in _AUDITED]


def compile_for(target: Target, source: Compilation) -> str:
    """Return a kernel's assembly, PTX or AMDGCN; NotCompiledError: this triton does not compile it for the target."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    pointers = [at for at, kind in enumerate(source.signature.values()) if kind.startswith("*")]
    attributes = {(at,): [["tt.divisibility", _ALIGNED]] for at in pointers}
    try:
        with compiling_text():
            compiled = triton.compile(
                ASTSource(source.function, dict(source.signature), dict(source.constexprs), attributes),
                target=GPUTarget(target.backend, target.arch, 32 if target.backend == "cuda" else 64),
                options=dict(source.options),
            )
    except Exception as error:  # a compiler's errors have no common class
        raise NotCompiledError(_reason(error)) from error
    return str(compiled.asm[target.assembly])


def _reason(error: Exception) -> str:
    """Return the last line, which has the error, those above it the place; without the repr around it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    last = lines[-1] if lines else type(error).__name__
    wrapped = re.fullmatch(r"\w+\((['\"])(.*)\1\)", last)
    return wrapped.group(2) if wrapped else last
