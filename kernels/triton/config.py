"""The specialisation of a Triton kernel: one frozen object, passed to it as its only compile-time argument."""

import math
from dataclasses import dataclass

from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import Rounding
from tiebreak.kernels.operands import LOG2_E
from tiebreak.kernels.plans import DeltaSource, RoundingPlan
from tiebreak.kernels.shift_rules import ShiftRule

_ROUNDED = frozenset({"s", "p_bar", "o_bar", "row_sum", "o", "delta", "p", "dp", "ds", "gradients"})
_NEAREST = (Rounding.RNE, Rounding.RTNA)


@dataclass(frozen=True)
class Config:
    """The properties of a launch that are known when the kernel is compiled."""

    plan: RoundingPlan  # where and how to round, in the format of the inputs
    shift: ShiftRule  # how a row's shift is chosen
    causal: bool  # query i sees keys 0 .. i + keys - queries
    d: int  # head dimension
    block: Block  # queries and keys of a tile; powers of two
    query_heads: int  # query heads of one batch entry
    groups: int = 1  # query heads per key head
    padded: bool = False  # whether a mask says which keys of a batch entry take part
    softmax_scale: float | None = None  # alpha; None: 1/sqrt(d)

    def __post_init__(self) -> None:
        plan = self.plan
        refused = {
            "know no fast exponential": bool(plan.exponential.correction),
            "are launched with contraction off": plan.contracted,
            "have no backward pass of autograd's": plan.delta_from is DeltaSource.UNNORMALISED or plan.shift_attached,
            "take q, K and V as they come, without scales": plan.quantizes,
        }
        for point, cast in plan.casts():
            refused[f"do not round {point}"] = cast.narrows and point not in _ROUNDED
            supported = cast.rounding in _NEAREST or (point, cast.rounding) == ("o", Rounding.STOCHASTIC)
            refused[f"do not round {point} {cast.rounding.value}"] = not supported
        for reason, applies in refused.items():
            if applies:
                raise ValueError(f"plan {plan.name}: the Triton kernels {reason}")

    @property
    def block_d(self) -> int:
        """The head dimension, padded to a power of two that a matrix instruction takes."""
        return max(16, power_of_two(self.d))

    @property
    def scale(self) -> float:
        """The factor alpha of Q K^T."""
        return 1.0 / math.sqrt(self.d) if self.softmax_scale is None else self.softmax_scale

    @property
    def base_two(self) -> bool:
        """True if scores, shifts and the exponential are in base two, the scale folded into the scores'."""
        return self.plan.exponential.base_two

    @property
    def unit(self) -> float:
        """The kernel's exponent that is one unit of a natural exponent."""
        return LOG2_E if self.base_two else 1.0

    @property
    def log_raised(self) -> float:
        """The logarithm, in the kernel's base, of the factor of P-bar and l."""
        return self.plan.offset * (1.0 if self.base_two else math.log(2.0))


def power_of_two(size: int) -> int:
    """Return the smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
