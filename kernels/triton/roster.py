"""The Triton kernels by name, their declarations, and what there is to compile."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP32, Formats
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import (
    FUSED,
    FUSED_FP8,
    FUSED_FP8_OFFSET,
    FUSED_STOCHASTIC,
    PAPER,
    STANDARD,
    Exponential,
    RoundingPlan,
)
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.triton.config import Config
from tiebreak.kernels.triton.launch import backward_block, format_of_v, forward_block, options, refusal, run, unsuited
from tiebreak.kernels.triton.loading import source

BLOCK = Block(128, 64)
_BASE_TWO = Exponential(base_two=True)


def _declared(plan: RoundingPlan, rule: str) -> Declaration:
    return Declaration(FLASH_ATTENTION, replace(plan, exponential=_BASE_TWO), SHIFT_RULES[rule], BLOCK)


DECLARATIONS: Mapping[str, Declaration] = {
    "triton_flash": _declared(FUSED, "safe"),
    "triton_stabilized": _declared(FUSED, "stabilized"),
    "triton_dithered": _declared(FUSED, "dithered"),
    "triton_lazy": _declared(FUSED, "lazy"),
    "triton_fair": _declared(FUSED_STOCHASTIC, "dithered"),
    "triton_paper": _declared(PAPER, "safe"),
    "triton_fp8": _declared(FUSED_FP8, "safe"),
    "triton_fp8_offset": _declared(FUSED_FP8_OFFSET, "safe"),
    "triton_standard": Declaration(
        STANDARD_ATTENTION, replace(STANDARD, exponential=_BASE_TWO), SHIFT_RULES["safe"], BLOCK
    ),
}


def triton_kernels(*, interpreted: bool) -> tuple[Kernel, ...]:
    """The kernels of the matrix, compiled for a GPU or run in Triton's interpreter: none is imported until it runs."""
    return tuple(
        Kernel(
            name,
            partial(_compute, declaration),
            declaration,
            has_backward=declaration.plan.p_bar.fmt != FP8_E4M3,  # nobody trains with a V of 8 bits
            takes=COMMON,
            missing_requirement=partial(refusal, declaration=declaration, interpreted=interpreted),
            unsuited=partial(unsuited, declaration.plan),
            o_first=True,
        )
        for name, declaration in DECLARATIONS.items()
    )


def _compute(
    declaration: Declaration, inputs: AttentionInputs, arithmetic: Arithmetic, gradients: bool
) -> AttentionOutput:
    del arithmetic
    return run(inputs, declaration, gradients=gradients)


@dataclass(frozen=True)
class Compilation:
    """One kernel to compile: all that triton.compile needs."""

    name: str  # of the roster's kernel and, after a slash, of the function
    function: Any  # triton's JITFunction
    signature: Mapping[str, str]  # argument -> type
    constexprs: Mapping[str, object]  # argument -> value
    options: Mapping[str, int]  # warps, pipeline stages, and whether products and sums may be contracted


_POINTERS = {"O": "o", "P": "p_bar", "DQ": "gradients", "DK": "gradients", "DV": "gradients"}
_FUNCTIONS = {
    "flash": (("forward", "forward"),),
    "standard": (("standard", "all_scores"), ("standard", "softmax"), ("standard", "output")),
}
_BACKWARD = (("backward", "delta"), ("backward", "key_gradients"), ("backward", "query_gradient"))
_TYPES = {"bf16": "*bf16", "fp16": "*fp16", "fp32": "*fp32", "fp8_e4m3": "*fp8e4nv"}


def compilations() -> Iterator[Compilation]:
    """What there is to compile for causal inputs in bf16 with d = 64, kernel by kernel of the roster.

    Raises:
        ValueError: triton is not installed.
    """
    d, formats = 64, Formats.of(BF16)
    for name, declaration in DECLARATIONS.items():
        plan = declaration.plan.in_formats(formats)
        for part, function in (*_FUNCTIONS[declaration.algorithm.name], *_BACKWARD):
            block = backward_block(plan, d) if part == "backward" else forward_block(declaration.block, d)
            config = Config(plan, declaration.shift_rule, causal=True, d=d, block=block, query_heads=16)
            constants = {"C": config, "PADDING": None}  # a mask of keys rounds nothing
            jitted = getattr(source(part), function)
            types = {
                argument: "constexpr" if argument in constants else _type(argument, plan, formats)
                for argument in jitted.arg_names
            }
            known = {argument: constants[argument] for argument in types if argument in constants}
            yield Compilation(f"{name}/{function}", jitted, types, known, options(d))


def _type(argument: str, plan: RoundingPlan, formats: Formats) -> str:
    if argument == "V":
        return _TYPES[format_of_v(plan, formats).name]
    if argument in ("Q", "K", "DO"):
        return _TYPES[formats.inputs.name]
    if argument in _POINTERS:
        return _TYPES[getattr(plan, _POINTERS[argument]).fmt.name]
    return _TYPES[FP32.name] if argument.isupper() else "i32"
