"""What the snippets train with: plain flash attention, its fixes, and section 3.2's single changes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP32, Rounding
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import FP32_PLAN, ISOLATION, PAPER, STANDARD, Cast, RoundingPlan
from tiebreak.kernels.shift_rules import SHIFT_RULES

_LOW, _HIGH = Cast(BF16), Cast(FP32)
_TILES = Block(queries=16, keys=16)  # of the snippets' 64 tokens


@dataclass(frozen=True)
class Variant:
    """The kernels of one training run."""

    name: str  # how tables call it
    scripted: Declaration  # of the layer with the scripted head
    before: Declaration | None = None  # of the layers before it; None: as the snippet has it
    head: Declaration | None = None  # of the scripted head itself; None: as its layer

    @property
    def row_sum_from_rounded(self) -> bool:
        """Whether l sums P-bar after its cast; standard attention has no such choice."""
        return self.scripted.plan.row_sum_from_rounded


FP32_ATTENTION = Declaration("flash", FP32_PLAN, SHIFT_RULES["safe"])


def _base(name: str, row_sum_from_rounded: bool, plan: RoundingPlan = PAPER) -> RoundingPlan:
    """A plan as training runs have it: S in bf16 too (torch's autocast), the backward pass in fp32."""
    return replace(plan, name=name, s=_LOW, row_sum_from_rounded=row_sum_from_rounded)


def variants(*, row_sum_from_rounded: bool) -> Mapping[str, Variant]:
    """Plain flash attention, the fixes and standard attention, unfused and fused, by name."""
    unfused = _base("training", row_sum_from_rounded)
    fused = replace(unfused, name="training_fused", o_bar=_HIGH)
    stochastic = replace(fused, name="training_stochastic", o=Cast(BF16, Rounding.STOCHASTIC))
    o_fp32 = replace(unfused, name="training_o_fp32", o_bar=_HIGH, o=_HIGH)
    flash = {
        "flash": (unfused, "safe"),
        "flash_fused": (fused, "safe"),
        "stabilized": (unfused, "stabilized"),
        "stabilized_fused": (fused, "stabilized"),
        "dithered": (unfused, "dithered"),
        "dithered_fused": (fused, "dithered"),
        "o_fp32": (o_fp32, "safe"),
        "stochastic_fused": (stochastic, "safe"),
        "fair": (stochastic, "dithered"),
    }
    found = {name: Variant(name, Declaration("flash", plan, SHIFT_RULES[rule])) for name, (plan, rule) in flash.items()}
    return {**found, "standard": Variant("standard", _standard(row_sum_from_rounded))}


def _standard(row_sum_from_rounded: bool) -> Declaration:
    return Declaration("standard", _base("training_standard", row_sum_from_rounded, STANDARD), SHIFT_RULES["safe"])


def isolation(*, row_sum_from_rounded: bool) -> Mapping[str, Variant]:
    """The single changes of section 3.2 to plain flash attention, by name, plain flash attention itself first."""
    safe = SHIFT_RULES["safe"]
    flash = variants(row_sum_from_rounded=row_sum_from_rounded)["flash"].scripted
    standard = _standard(row_sum_from_rounded)
    changed = {
        name: Declaration("flash", _base(name, row_sum_from_rounded, plan), safe) for name, plan in ISOLATION.items()
    }
    found = [
        Variant("flash in tiles", replace(flash, block=_TILES), before=replace(flash, block=_TILES)),
        Variant("tiling off", flash, before=flash),
        Variant("flash in layer 2 only", flash, before=standard),
        Variant("standard in layer 2 only", standard, before=flash),
        Variant("delta from rowsum(dP*P)", changed["delta_from_dp"], before=changed["delta_from_dp"]),
        Variant("O recomputed in fp32", changed["o_recomputed"], before=changed["o_recomputed"]),
        Variant("O in fp32", changed["o_fp32"], before=changed["o_fp32"]),
        Variant("P̄V in fp32", changed["pv_fp32"], before=changed["pv_fp32"]),
        Variant("O in fp32 for the worst head", flash, before=flash, head=changed["o_fp32"]),
    ]
    return {variant.name: variant for variant in found}
