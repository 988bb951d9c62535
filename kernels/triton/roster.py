"""The Triton kernels by name, and their declarations."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial

from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.features import COMMON
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import FP8_E4M3
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import PLANS, STANDARD, Exponential
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.triton.launch import refusal, run, unsuited

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
