"""Rounding plans: format and mode of every rounding point of an attention kernel, and the presets."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType

from tiebreak.kernels.formats import BF16, FP8_E4M3, FP32, Format, Formats, Rounding


class Follows(enum.Enum):
    """Which of a call's formats a rounding point of a plan is in."""

    OPERANDS = "operands"  # what products take: P-bar and, in some plans, S, l and O-bar
    OUTPUT = "output"  # O and the gradients


@dataclass(frozen=True)
class Cast:
    """One rounding: to a format, in a mode."""

    fmt: Format  # the format that holds the result
    rounding: Rounding = Rounding.TO_EVEN  # how a value between two neighbours is placed
    follows: Follows | None = None  # the call's format that takes the place of `fmt`; None: `fmt`, whatever the call

    @property
    def narrows(self) -> bool:
        """Whether the cast drops bits of fp32."""
        return self.fmt != FP32

    @property
    def ties_away(self) -> bool:
        """Whether ties go away from zero."""
        return self.rounding is Rounding.TIES_AWAY


class Accumulator(enum.Enum):
    """How the products of a matrix product, or the terms of a row sum, are added up to one fp32 value."""

    EXACT = "exact"  # in fp64, rounded once to fp32
    # Matrix products as tensor cores add them up; row sums, which they do not do, in fp32 as a balanced tree. Operands
    # count as bf16 (Volta's as fp16, those of fp8 as e4m3), which their subnormals alone tell from another format.
    VOLTA = "tensor core of Volta"
    AMPERE = "tensor core of Turing, Ampere or Ada"
    HOPPER = "tensor core of Hopper or Blackwell"
    CDNA3 = "matrix core of CDNA3"
    ADA_FP8 = "tensor core of Ada, fp8"
    HOPPER_FP8 = "tensor core of Hopper, fp8"


class DeltaSource(enum.Enum):
    """What delta, the row term of the softmax's gradient, is computed from (paper, section 3.2)."""

    OUTPUT = "rowsum(dO*O)"  # flash attention: from the stored O, with its rounding error
    PROBABILITIES = "rowsum(dP*P)"  # standard attention: never sees O
    RECOMPUTED_OUTPUT = "rowsum(dO*(PV in fp32))"  # O computed anew in fp32 in the backward pass


@dataclass(frozen=True)
class Exponential:
    """The exponential function of a kernel. It is a rounding point too.

    A fast one computes 2**y, y = x log2(e), by taking y for the bits of an fp32 number, exponent and fraction: between
    the powers of two these lie on straight lines, and a polynomial in y's fraction, taken off first, makes up for that
    (Malossi, Ineichen, Bekas, Curioni, Fast Exponential Computation on SIMD Architectures, 2015).
    """

    base_two: bool = False  # exp2(x * log2(e)), the product rounded to fp32, as production kernels compute it
    correction: tuple[float, ...] = ()  # the polynomial's coefficients, the constant first; none: it is no fast one
    lanes: int = 1  # keys that a fast one takes at a time; those of a tile that are left over have the exact one

    @property
    def at_zero(self) -> float:
        """Its value at 0, where every tie sits; a fast one misses 1."""
        # The correction takes y into the binade below 1, where the lines are half as steep.
        return 1.0 - self.correction[0] / 2 if self.correction else 1.0


@dataclass(frozen=True)
class RoundingPlan:
    """Where a kernel rounds. The scores' scale is applied in fp32, after Q K^T is cast and before S is; where q is
    narrow it is applied to q instead. All else not named is fp32.
    """

    name: str  # how tables and --plan call it
    s: Cast  # scores S
    p_bar: Cast  # unnormalised probabilities P-bar (standard attention: the normalised P)
    o_bar: Cast  # unnormalised output O-bar, at every operation on it
    row_sum: Cast  # row sum l
    o: Cast  # output O
    row_sum_from_rounded: bool = False  # whether l sums P-bar after its cast
    accumulator: Accumulator = Accumulator.EXACT  # of matrix products and row sums
    exponential: Exponential = Exponential()  # of the softmax
    contracted: bool = False  # whether its argument is fma(S, c, -m c), c its scale with log2 e: S c is never rounded
    scale: Cast = Cast(FP32)  # the scores' scale alpha itself
    divisor: Cast = Cast(FP32)  # 1 / alpha, where a kernel divides by it
    q: Cast = Cast(FP32)  # q times the scale, in base two times log2(e) too, where a kernel scales q before Q K^T
    qk: Cast = Cast(FP32)  # Q K^T, before the scale
    exp: Cast = Cast(FP32)  # exp(S - m), before it is summed, cast for the product or normalised
    shifted: Cast = Cast(FP32)  # S - m, the exponential's argument, and m - m' of a rescaling
    delta_from: DeltaSource = DeltaSource.OUTPUT  # backward: what delta is computed from
    delta: Cast = Cast(FP32)  # backward: delta
    p: Cast = Cast(FP32)  # backward: the recomputed P where it enters dV
    dp: Cast = Cast(FP32)  # backward: dP
    ds: Cast = Cast(FP32)  # backward: dS where it enters dQ and dK
    gradients: Cast = Cast(FP32)  # backward: dQ, dK and dV as returned

    def __post_init__(self) -> None:
        """Refuse a contraction of what is not there."""
        if self.contracted and self.shifted.narrows:
            raise ValueError("contracted, S - m is never formed: it can't be rounded too")
        if self.contracted and self.exponential.correction:
            raise ValueError("a fast exponential multiplies by log2 e itself: nothing is contracted")

    @property
    def unfused(self) -> bool:
        """Whether O-bar is rounded to a narrow format before the division by l."""
        return self.o_bar.narrows

    @property
    def stochastic(self) -> bool:
        """Whether any cast is stochastic."""
        return any(cast.rounding is Rounding.STOCHASTIC for _, cast in self.casts())

    def casts(self) -> tuple[tuple[str, Cast], ...]:
        """All rounding points, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple((name, value) for name, value in pairs if isinstance(value, Cast))

    def in_formats(self, formats: Formats) -> "RoundingPlan":
        """The same plan for a call in these formats: every rounding point that follows one of them is in it."""
        own = {Follows.OPERANDS: formats.operands, Follows.OUTPUT: formats.output}
        changed = {
            name: replace(cast, fmt=own[cast.follows])
            for name, cast in self.casts()
            if cast.follows is not None and cast.fmt != own[cast.follows]
        }
        return replace(self, **changed) if changed else self  # type: ignore[arg-type]


# Presets stand as they are for a call in bf16.
_LOW = Cast(BF16, follows=Follows.OPERANDS)
OUTPUT = Cast(BF16, follows=Follows.OUTPUT)  # O's cast in any kernel that returns it in the format of the call
_HIGH = Cast(FP32)

PAPER = RoundingPlan("paper", s=_HIGH, p_bar=_LOW, o_bar=_LOW, row_sum=_HIGH, o=OUTPUT)
ALL_BF16 = replace(PAPER, name="all_bf16", s=_LOW, row_sum=_LOW)
FUSED = RoundingPlan(
    "fused", s=_HIGH, p_bar=_LOW, o_bar=_HIGH, row_sum=_HIGH, o=OUTPUT, p=_LOW, ds=_LOW, gradients=OUTPUT
)
FUSED_STOCHASTIC = replace(FUSED, name="fused_stochastic", o=replace(OUTPUT, rounding=Rounding.STOCHASTIC))
STANDARD = RoundingPlan(
    "standard",
    s=_HIGH,
    p_bar=_LOW,
    o_bar=_HIGH,
    row_sum=_HIGH,
    o=OUTPUT,
    delta_from=DeltaSource.PROBABILITIES,
)
FP32_PLAN = RoundingPlan("fp32", s=_HIGH, p_bar=_HIGH, o_bar=_HIGH, row_sum=_HIGH, o=_HIGH)

# The paper's section 3.2: what each single change to the plan is said to cure.
ISOLATION = (
    replace(PAPER, name="delta_from_dp", delta_from=DeltaSource.PROBABILITIES),
    replace(PAPER, name="o_recomputed", delta_from=DeltaSource.RECOMPUTED_OUTPUT),
    replace(PAPER, name="o_fp32", o_bar=_HIGH, o=_HIGH),
    replace(PAPER, name="pv_fp32", p_bar=_HIGH, o_bar=_HIGH),
)

# Ties go away from zero, as public AscendC attention code casts P (CAST_ROUND): a bias of its own.
_AWAY, _OUTPUT_AWAY = (replace(cast, rounding=Rounding.TIES_AWAY) for cast in (_LOW, OUTPUT))
FUSED_HALF_UP = replace(FUSED, name="fused_half_up", p_bar=_AWAY)
FUSED_TIES_AWAY = replace(FUSED, name="fused_ties_away", p_bar=_AWAY, o=_OUTPUT_AWAY)

# P-bar in 8 bits, as fp8 attention has it: 2^-10 and less of it is 0.
FUSED_FP8 = replace(FUSED, name="fused_fp8", p_bar=Cast(FP8_E4M3))

# FlashAttention-2's and -4's exponential, and that of a Triton kernel which leaves contraction on.
FUSED_CONTRACTED = replace(FUSED, name="fused_contracted", exponential=Exponential(base_two=True), contracted=True)

# PyTorch's flash kernel for CPUs with vector instructions, Vectorized<float>::fexp_u20 (aten/src/ATen/cpu/vec), for
# bf16 and fp16 on AVX-512. Its exponential errs by up to 1.1e-4, at 0 by 5.3e-5.
FEXP_U20 = Exponential(
    correction=(0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236), lanes=16
)
FUSED_FAST_EXP = replace(FUSED, name="fused_fast_exp", exponential=FEXP_U20)

# Upcast attention: fp32 in all but what is returned.
FP32_INSIDE = replace(FP32_PLAN, name="fp32_inside", o=OUTPUT, delta_from=DeltaSource.PROBABILITIES)

# Plans whose matrix products are a tensor core's: what a GPU makes of them, before one is at hand.
_TENSOR_CORE = (
    *(
        replace(plan, name=f"{plan.name}_{core.name.lower()}", accumulator=core)
        for plan in (PAPER, FUSED, FUSED_STOCHASTIC)
        for core in (Accumulator.AMPERE, Accumulator.HOPPER)
    ),
    replace(FUSED, name="fused_volta", accumulator=Accumulator.VOLTA),
    replace(FUSED, name="fused_cdna3", accumulator=Accumulator.CDNA3),
    # All products, Q K^T too: of a call whose q, k and v fp8 holds.
    replace(FUSED_FP8, name="fused_fp8_ada", accumulator=Accumulator.ADA_FP8),
    replace(FUSED_FP8, name="fused_fp8_hopper", accumulator=Accumulator.HOPPER_FP8),
)

PRESETS = (PAPER, ALL_BF16, FUSED, FUSED_STOCHASTIC, STANDARD, FP32_PLAN)

# Every plan that has a name.
PLANS: Mapping[str, RoundingPlan] = MappingProxyType(
    {
        plan.name: plan
        for plan in (
            *PRESETS,
            *ISOLATION,
            FUSED_HALF_UP,
            FUSED_TIES_AWAY,
            FUSED_FP8,
            FUSED_CONTRACTED,
            FUSED_FAST_EXP,
            FP32_INSIDE,
            *_TENSOR_CORE,
        )
    }
)
