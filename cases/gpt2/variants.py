"""Kernels that the snippets train with: plain flash attention, its fixes, and section 3.2's single changes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiebreak.cases.gpt2.mitigations import GATED, NO_MITIGATION, QK_CLIP, QK_NORM, Mitigation
from tiebreak.kernels.algorithms import FLASH_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP32, Rounding
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.kernels.plans import ISOLATION, PAPER, STANDARD, Cast, Exponential, RoundingPlan, SumOf
from tiebreak.kernels.shift_rules import SHIFT_RULES

_LOW, _HIGH = Cast(BF16), Cast(FP32)
_SUFFIX, _ROUNDED_SUFFIX = "@train", "@train_l_rounded"


@dataclass(frozen=True)
class Variant:
    """The kernels of one training run."""

    name: str  # how tables and --kernels call it
    scripted: Declaration | Kernel  # of the layer with the scripted head
    before: Declaration | None = None  # of the layer before it; None: as that one
    head: Declaration | None = None  # of the scripted head itself; None: as its layer
    stable: bool | None = None  # whether training is stable with it by the paper (section 3.2); None: not stated
    mitigation: Mitigation = NO_MITIGATION  # a change in addition to the kernels
    held_to: str | None = None  # the variant whose claims it is held to; None: its own


def variant_names(shorts: str, *, rounded: bool | None = None) -> tuple[str, ...]:
    """Return full names of variants by short ones, separated by spaces: with rounded or unrounded l, or (None) both.

    Standard attention has no such choice, and one name.
    """
    suffixes = {True: (_ROUNDED_SUFFIX,), False: (_SUFFIX,), None: (_SUFFIX, _ROUNDED_SUFFIX)}[rounded]
    return tuple(
        short + suffix for short in shorts.split() for suffix in ((_SUFFIX,) if short == "standard" else suffixes)
    )


def _plan(name: str, like: RoundingPlan, *, rounded: bool) -> RoundingPlan:
    """Return an unfused plan as training runs have it: S in bf16 too (torch's autocast); its backward pass in fp32."""
    name = f"{name}_l_rounded" if rounded else name
    return replace(like, name=name, s=_LOW, row_sum_of=SumOf.ROUNDED if rounded else SumOf.UNROUNDED)


def _flash(plan: RoundingPlan, rule: str = "safe") -> Declaration:
    return Declaration(FLASH_ATTENTION, plan, SHIFT_RULES[rule])


def variants(*, rounded: bool) -> Mapping[str, Variant]:
    """Return every variant by its short name; `rounded`: l sums P-bar after its cast (FlashAttention-2: before)."""
    standard = Declaration(STANDARD_ATTENTION, _plan("train_standard", STANDARD, rounded=False), SHIFT_RULES["safe"])
    unfused = _plan("train", PAPER, rounded=rounded)
    fused = replace(_plan("train_fused", PAPER, rounded=rounded), o_bar=_HIGH)
    stochastic = replace(
        _plan("train_stochastic", PAPER, rounded=rounded), o_bar=_HIGH, o=Cast(BF16, Rounding.STOCHASTIC)
    )
    # As in fused kernels: S in fp32, as contraction needs it.
    base_two = replace(fused, name=fused.name.replace("fused", "base_2"), s=_HIGH, exponential=Exponential(True))
    contracted = replace(base_two, name=fused.name.replace("fused", "contracted"), contracted=True)
    changed = {plan.name: _flash(_plan(f"train_{plan.name}", plan, rounded=rounded)) for plan in ISOLATION}
    plain = _flash(unfused)
    made = (
        Variant("flash", plain, stable=False),  # tiling off: one tile holds a whole row
        Variant("flash_fused", _flash(fused)),
        Variant("flash_base_2", _flash(base_two)),
        Variant("flash_contracted", _flash(contracted)),
        Variant("stabilized", _flash(unfused, "stabilized"), stable=True),
        Variant("stabilized_fused", _flash(fused, "stabilized")),
        Variant("dithered", _flash(unfused, "dithered")),
        Variant("dithered_fused", _flash(fused, "dithered")),
        Variant("stochastic_fused", _flash(stochastic)),
        Variant("fair", _flash(stochastic, "dithered")),
        Variant("o_fp32", changed["o_fp32"], stable=True),
        # The rest of section 3.2: what of the paper's failing kernel is changed, and where.
        Variant("flash_tiled", replace(plain, block=Block(queries=16, keys=16)), stable=False),  # of 64 tokens
        Variant("flash_in_layer_2", plain, before=standard, stable=False),
        Variant("standard_in_layer_2", standard, before=plain, stable=True),
        *(Variant(name, changed[name], stable=True) for name in ("delta_from_dp", "o_recomputed", "pv_fp32")),
        Variant("o_fp32_in_worst_head", plain, head=changed["o_fp32"], stable=True),
        # Stabilisers that the paper names and does not try (sections 1 and 3.1).
        Variant("flash_qk_norm", plain, mitigation=QK_NORM),
        Variant("flash_qk_clip", plain, mitigation=QK_CLIP),
        Variant("flash_gated", plain, mitigation=GATED),
        Variant("standard", standard, stable=True),
    )
    return {each.name: replace(each, name=variant_names(each.name, rounded=rounded)[0]) for each in made}


#: Every variant by its full name, `short@train` or `short@train_l_rounded`.
VARIANTS: Mapping[str, Variant] = {
    variant.name: variant for rounded in (False, True) for variant in variants(rounded=rounded).values()
}
