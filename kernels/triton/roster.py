"""The Triton kernels by name, their declarations, and what there is to compile."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP32, Formats
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import PLANS, STANDARD, Exponential
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.triton.compiling import source
from tiebreak.kernels.triton.config import Config
from tiebreak.kernels.triton.launch import (
    FORWARD,
    backward_block,
    format_of_v,
    forward_block,
    options,
    refusal,
    run,
    unsuited,
)

BLOCK = Block(128, 64)
_RULES_AND_PLANS = {
    "triton_flash": ("safe", "fused"),
    "triton_stabilized": ("stabilized", "fused"),
    "triton_dithered": ("dithered", "fused"),
    "triton_lazy": ("lazy", "fused"),
    "triton_fair": ("dithered", "fused_stochastic"),
    "triton_paper": ("safe", "paper"),
    "triton_fp8": ("safe", "fused_fp8"),
    "triton_fp8_offset": ("safe", "fused_fp8_offset"),
    "triton_standard": ("safe", STANDARD.name),
}
DECLARATIONS: Mapping[str, Declaration] = {
    name: Declaration(
        STANDARD_ATTENTION if plan == STANDARD.name else FLASH_ATTENTION,
        replace(PLANS[plan], exponential=Exponential(base_two=True)),
        SHIFT_RULES[rule],
        BLOCK,
    )
    for name, (rule, plan) in _RULES_AND_PLANS.items()
}


def triton_kernels(*, interpreted: bool) -> tuple[Kernel, ...]:
    """Return the kernels of the matrix, compiled for a GPU or interpreted: none is imported until it runs."""
    return tuple(
        Kernel(
            name,
            partial(run, declaration=declaration),
            declaration,
            has_backward=declaration.plan.p_bar.fmt != FP8_E4M3,  # nobody trains with a V of 8 bits
            takes=COMMON,
            missing_requirement=partial(refusal, declaration=declaration, interpreted=interpreted),
            unsuited=partial(unsuited, declaration.plan),
        )
        for name, declaration in DECLARATIONS.items()
    )


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
            jitted = getattr(source(part), function)
            names: list[str] = jitted.arg_names
            types = {word: _TYPES[pointers.get(word, FP32).name] if word.isupper() else "i32" for word in names}
            constants = {"C": config, "PADDING": None}  # a mask of keys rounds nothing
            types |= dict.fromkeys(constants, "constexpr")
            yield Compilation(f"{name}/{function}", jitted, types, constants, options(d))
