"""What a Triton kernel is specialised to: one frozen object, passed to it as its only compile-time argument."""

import math
from dataclasses import dataclass

from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import Rounding
from tiebreak.kernels.plans import DeltaSource, RoundingPlan, SumOf
from tiebreak.kernels.shift_rules import ShiftRule

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """Everything about a launch that is known when the kernel is compiled.

    A tile is (rows, columns). Where a program works on several heads at once, as the interpreter's do, it is
    (heads, rows, columns), and every index in the kernels has that many dimensions.
    """

    plan: RoundingPlan  # where and how to round, in the format of the inputs
    shift: ShiftRule  # how a row's shift is chosen
    causal: bool  # query i sees keys 0 .. i + keys - queries
    d: int  # head dimension
    block: Block  # queries and keys of a tile; powers of two
    query_heads: int  # query heads of one batch entry
    groups: int = 1  # query heads per key head
    padded: bool = False  # whether a mask says which keys of a batch entry take part
    heads: int = 1  # heads that one program works on; a power of two
    softmax_scale: float | None = None  # alpha; None: 1/sqrt(d)

    def __post_init__(self) -> None:
        """Refuse what no kernel here computes."""
        if self.plan.exponential.at_zero != 1.0:
            raise ValueError(f"plan {self.plan.name}: the Triton kernels' exponential of 0 is 1")
        if self.plan.contracted:
            raise ValueError(f"plan {self.plan.name}: the Triton kernels are launched with contraction off")
        forward = ("scale", "divisor", "q", "qk", "shifted", "exp", "pv")
        for point in (*forward, "do_over_l", "p_of_ds", "scaled_ds", "scaled_q", "scaled_k", "sums", "group_sums"):
            if getattr(self.plan, point).narrows:
                raise ValueError(f"plan {self.plan.name}: the Triton kernels do not round {point}")
        if self.plan.delta_from is DeltaSource.UNNORMALISED or self.plan.shift_attached:
            raise ValueError(f"plan {self.plan.name}: the Triton kernels' backward pass is not autograd's")
        if self.plan.quantizes:
            raise ValueError(f"plan {self.plan.name}: the Triton kernels take q, K and V as they come, without scales")
        for point, cast in self.plan.casts():
            nearest = cast.rounding in (Rounding.TO_EVEN, Rounding.TIES_AWAY)
            if not nearest and (point, cast.rounding) != ("o", Rounding.STOCHASTIC):
                raise ValueError(
                    f"plan {self.plan.name}: the Triton kernels do not round {point} {cast.rounding.value}"
                )

    @property
    def block_d(self) -> int:
        """The head dimension, padded to a power of two that a matrix instruction takes."""
        return max(16, power_of_two(self.d))

    @property
    def scale(self) -> float:
        """alpha, what Q K^T is multiplied by."""
        return 1.0 / math.sqrt(self.d) if self.softmax_scale is None else self.softmax_scale

    @property
    def sums_rounded(self) -> bool:
        """Whether l sums P-bar after its cast."""
        return self.plan.row_sum_of is SumOf.ROUNDED

    @property
    def sums_clamped(self) -> bool:
        """Whether l sums P-bar before its cast, but no more than the largest value of its format."""
        return self.plan.row_sum_of is SumOf.CLAMPED

    @property
    def raised(self) -> float:
        """What P-bar and l are multiplied by."""
        return float(2**self.plan.offset)

    @property
    def log_raised(self) -> float:
        """Its logarithm in the kernel's base."""
        return self.plan.offset * (1.0 if self.base_two else math.log(2.0))

    @property
    def base_two(self) -> bool:
        """Whether scores, shifts and the exponential are in base two, the scale folded into the scores'."""
        return self.plan.exponential.base_two

    @property
    def unit(self) -> float:
        """What one unit of a natural exponent is in the kernel's."""
        return LOG2_E if self.base_two else 1.0

    @property
    def natural(self) -> float:
        """The inverse of `unit`: a constant, where a device would approximate the division."""
        return 1.0 / self.unit

    @property
    def stochastic(self) -> bool:
        """Whether O's cast is stochastic."""
        return self.plan.stochastic

    @property
    def delta_from_o(self) -> bool:
        """Whether delta is computed from the stored O."""
        return self.plan.delta_from is DeltaSource.OUTPUT

    @property
    def delta_from_p(self) -> bool:
        """Whether delta is computed from P and dP."""
        return self.plan.delta_from is DeltaSource.PROBABILITIES


def power_of_two(size: int) -> int:
    """The smallest power of two that is at least `size`."""
    return 1 << (size - 1).bit_length()
