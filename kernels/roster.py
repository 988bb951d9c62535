"""The composed kernels, by name: standard attention, and `rule@plan` for every shift rule and rounding plan."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION, TILED
from tiebreak.kernels.formats import FP8_E4M3, FP8_E5M2, Formats
from tiebreak.kernels.kernel import Declaration, Kernel, composed
from tiebreak.kernels.plans import FUSED, FUSED_STOCHASTIC, PLANS, STANDARD, RoundingPlan
from tiebreak.kernels.shift_rules import SHIFT_RULES

_FLASH_PLANS: Mapping[str, RoundingPlan] = {name: plan for name, plan in PLANS.items() if name != STANDARD.name}


_NAMED = {
    "standard": Declaration(STANDARD_ATTENTION, STANDARD, SHIFT_RULES["safe"]),
    "fair": Declaration(FLASH_ATTENTION, FUSED_STOCHASTIC, SHIFT_RULES["dithered"]),
}


def rule_names() -> tuple[str, ...]:
    """Return the words before the @ of a composed kernel's name."""
    return (*TILED, *(rule for rule in SHIFT_RULES if rule != "safe"))


def composed_kernel(name: str) -> Kernel:
    """Return the composed kernel called `name`: `standard`, `fair`, or `rule@plan`.

    A kernel with the rule `safe` has the name of its algorithm: `flash`, `flash_1` or `split`. Raises ValueError: no
    such rule or plan; the message lists those there are.
    """
    if name in _NAMED:
        return composed(name, _NAMED[name])
    rule_name, _, plan_name = name.partition("@")
    rule = SHIFT_RULES.get("safe" if rule_name in TILED else rule_name)
    plan = _FLASH_PLANS.get(plan_name)
    if rule is None or plan is None:
        raise ValueError(
            f"unknown kernel {name!r}: composed kernels are standard, fair and rule@plan"
            f" with rules {', '.join(rule_names())} and plans {', '.join(_FLASH_PLANS)}"
        )
    algorithm = TILED.get(rule_name, FLASH_ATTENTION)
    ignored = [field for field in sorted(algorithm.unused) if getattr(plan, field) != getattr(FUSED, field)]
    if ignored:
        raise ValueError(f"{algorithm.name} attention makes nothing of {', '.join(ignored)} of plan {plan_name}")
    return composed(name, Declaration(algorithm, plan, rule))


# Kernels that the emulation runs on inputs with V in 8 bits, which these plans are for.
_EIGHT_BITS = (
    *("flash@fused_fp8", "flash@fused_fp8_offset", "stabilized@fused_fp8_offset", "dithered@fused_fp8_offset"),
    *("lazy_4@fused_fp8_offset", "lazy_4@fused_fp8_offset_4", "lazy_4@fused_fp8_clamped", "lazy_4@fused_e5m2_offset"),
    *("dithered@fused_fp8_fair", "flash@fp8", "flash@fp8_hopper", "flash@mxfp8", "flash@sage"),
)


def eight_bit_kernels() -> tuple[Kernel, ...]:
    """Return the kernels of attention in 8 bits, for inputs whose V is."""
    return tuple(replace(composed_kernel(name), unsuited=_wide_v) for name in _EIGHT_BITS)


def _wide_v(formats: Formats) -> str | None:
    return None if formats.v in (FP8_E4M3, FP8_E5M2) else f"of attention in 8 bits: V is in {formats.v.name}"


# The matrix' kernels by default: every plan with plain flash attention, every shift rule at its authors' plan.
DEFAULT_ROSTER = (
    *("standard", "flash@paper", "flash@all_bf16", "flash@fused", "flash@fused_contracted", "flash@fused_stochastic"),
    *("flash@fp32", "stabilized@paper", "stabilized@fused", "stabilized_v1@paper", "stabilized_authors@all_bf16"),
    *("as_printed_v1@paper", "as_printed_v2@paper", "fixed_offset@paper", "always_scaled@paper", "gamma@paper"),
    *("dithered@paper", "dithered@fused", "lazy@fused", "fair"),
)


@cache
def roster_labels() -> frozenset[str]:
    """Return the declarations of the kernels of `DEFAULT_ROSTER`, as `Declaration.label` has them."""
    declarations = (composed_kernel(name).declaration for name in DEFAULT_ROSTER)
    return frozenset(declaration.label for declaration in declarations if declaration is not None)
