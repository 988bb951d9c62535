"""Rounding plans: format and mode of every rounding point of an attention kernel, and the presets."""

import enum
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any

from tiebreak.kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, INT8, Format, Formats, Rounding, hashed_once
from tiebreak.kernels.quantization import Quantization, Scaling


class Follows(enum.Enum):
    """The formats of a call that a rounding point of a plan may follow."""

    OPERANDS = "operands"  # what products take: P-bar and, in some plans, S, l and O-bar
    OUTPUT = "output"  # O and the gradients


class Steps(enum.Enum):
    """The steps of a tile at which a running sum, O-bar or l, is cast."""

    EVERY = "every"  # what the tile adds, what is rescaled, and their sum
    KEPT = "kept"  # what is rescaled, and the sum
    ONCE = "once"  # the sum alone


@hashed_once
@dataclass(frozen=True)
class Cast:
    """One rounding: to a format, in a mode."""

    fmt: Format  # the format that holds the result
    rounding: Rounding = Rounding.RNE  # how a value between two neighbours is placed
    follows: Follows | None = None  # the call's format that takes the place of `fmt`; None: `fmt`, whatever the call
    saturates: bool = False  # whether what lies beyond the format's largest value becomes that value, not Inf or NaN
    every: int = 0  # of a product's or l's: after how many terms the sum is rounded, the next added; 0: after all
    steps: Steps = Steps.EVERY  # of a running sum's

    @cached_property
    def narrows(self) -> bool:
        """True if the cast drops bits of fp32."""
        return self.fmt != FP32

    @property
    def of_a_tile(self) -> "Cast":
        """The cast of a tile's part of a running sum."""
        return self if self.steps is Steps.EVERY else Cast(FP32)


class Accumulator(enum.Enum):
    """The way in which the products of a matrix product, or the terms of a row sum, are added up to one fp32 value."""

    EXACT = "exact"  # in fp64, rounded once to fp32
    # Matrix products alone; row sums are in fp32, as a balanced tree. Operands of tensor cores count as bf16 (Volta's
    # as fp16, those of fp8 as e4m3), which their subnormals alone tell from another format.
    SEQUENTIAL = "fp32, term after term"  # a chain of fused multiply-adds, as code for CPUs is compiled
    ROUNDED = "products in bf16, fp32, term after term"  # each product is rounded, then added, as in tinygrad
    VOLTA = "tensor core of Volta"
    AMPERE = "tensor core of Turing, Ampere or Ada"
    HOPPER = "tensor core of Hopper or Blackwell"
    CDNA3 = "matrix core of CDNA3"
    BFMMLA = "bf16 instructions of Arm"  # BFMMLA and BFDOT: sums of two products, rounded to odd
    VDPBF16 = "bf16 instruction of AVX-512"  # VDPBF16PS: a chain of fused multiply-adds
    AMX = "bf16 tiles of AMX"  # TDPBF16PS: two such chains for 32 terms
    ADA_FP8 = "tensor core of Ada, fp8"
    HOPPER_FP8 = "tensor core of Hopper, fp8"


class SumOf(enum.Enum):
    """The P-bar that the row sum l adds up. P V always takes P-bar after its cast."""

    UNROUNDED = "unrounded"  # before the cast, as FlashAttention-2 to -4 do
    CLAMPED = "clamped"  # before the cast, but no more than the largest value of its format
    ROUNDED = "rounded"  # after the cast


class SinkEntry(enum.Enum):
    """The point at which a learned sink, a logit s without a V, enters a row of tiled attention."""

    FIRST = "first"  # the row begins with m = s and l = 1, as in vLLM's unified kernel: l is rounded with 1 in it
    MAXIMUM = "maximum"  # it begins with m = s alone, and exp(s - m) is added to l at the end, as in gpt-oss
    LAST = "last"  # m knows nothing of it, and exp(s - m) is added to l at the end, as in FlashAttention-3
    AFTERWARDS = "afterwards"  # O of the keys alone is cast, times 1 / (1 + exp(s - lse)), cast: around FlexAttention


class DeltaSource(enum.Enum):
    """The numbers from which delta, the row term of the softmax's gradient, is computed (paper, section 3.2)."""

    OUTPUT = "rowsum(dO*O)"  # flash attention: from the stored O, with its rounding error
    PROBABILITIES = "rowsum(dP*P)"  # standard attention: never sees O
    RECOMPUTED_OUTPUT = "rowsum(dO*(PV in fp32))"  # O computed anew in fp32 in the backward pass
    UNNORMALISED = "rowsum(dO*O-bar/l)"  # autograd's, where O is O-bar / l: P-bar and dO / l enter dP and dV


@hashed_once
@dataclass(frozen=True)
class Exponential:
    """The exponential function of a kernel. It is a rounding point too.

    A fast one computes 2**y, y = x log2(e), by taking y as the bits of an fp32 number, exponent and fraction: between
    powers of two these are on straight lines, which a polynomial in y's fraction, subtracted first, corrects (Malossi,
    Ineichen, Bekas, Curioni, Fast Exponential Computation on SIMD Architectures, 2015).
    """

    base_two: bool = False  # exp2(x * log2(e)), the product rounded to fp32, as production kernels compute it
    correction: tuple[float, ...] = ()  # the polynomial's coefficients, the constant first; none: it is no fast one
    lanes: int = 1  # keys that a fast one takes at a time; those of a tile that are left over have the exact one

    @property
    def at_zero(self) -> float:
        """The value at 0, where every tie is; a fast one misses 1."""
        # The correction takes y into the binade below 1, where the lines are half as steep.
        return 1.0 - self.correction[0] / 2 if self.correction else 1.0


@hashed_once
@dataclass(frozen=True)
class RoundingPlan:
    """Where a kernel rounds. The scores' scale is applied in fp32, after Q K^T is cast and before S is; where q is
    narrow it is applied to q instead. All else not named is fp32.
    """

    name: str  # how tables and --plan call it
    s: Cast = Cast(FP32)  # scores S
    p_bar: Cast = Cast(FP32)  # unnormalised probabilities P-bar (standard attention: the normalised P)
    o_bar: Cast = Cast(FP32)  # unnormalised output O-bar, at every operation on it unless its steps are others
    row_sum: Cast = Cast(FP32)  # row sum l
    o: Cast = Cast(FP32)  # output O
    row_sum_of: SumOf = SumOf.UNROUNDED  # which P-bar l sums
    accumulator: Accumulator = Accumulator.EXACT  # of matrix products and row sums
    exponential: Exponential = Exponential()  # of the softmax
    contracted: bool = False  # whether its argument is fma(S, c, -m c), c its scale with log2 e: S c is never rounded
    scale: Cast = Cast(FP32)  # the scores' scale alpha itself, or its root where that is what q and K are multiplied by
    divisor: Cast = Cast(FP32)  # 1 / alpha, where a kernel divides by it
    q: Cast = Cast(FP32)  # q times the scale, in base two times log2(e) too, where a kernel scales q before Q K^T
    k: Cast = Cast(FP32)  # K times the root of what q is else multiplied by; q then takes the root too
    log2_e: Cast = Cast(FP32)  # log2(e) itself, where the base is two; with `scale` narrow alpha log2(e), as one number
    qk: Cast = Cast(FP32)  # Q K^T, before the scale
    exp: Cast = Cast(FP32)  # exp(S - m), before it is summed, cast for the product or normalised
    offset: int = 0  # P-bar and l are 2^offset times as large: 8 in fp8 kernels, so that e4m3 holds small ones
    pv: Cast = Cast(FP32)  # P-bar V of a tile, before it is added to O-bar
    q8: Quantization | None = None  # q in 8 bits with scales
    k8: Quantization | None = None  # K in 8 bits with scales
    v8: Quantization | None = None  # V in 8 bits with scales
    p8: Quantization | None = None  # P-bar in 8 bits with its own scales, instead of its cast
    smooth_k: bool = False  # whether the mean of K over the keys is taken off K first, which softmax does not see
    sink: SinkEntry = SinkEntry.FIRST  # where a learned sink enters a row; standard attention has it as one more score
    shifted: Cast = Cast(FP32)  # S - m, the exponential's argument, and m - m' of a rescaling
    delta_from: DeltaSource = DeltaSource.OUTPUT  # backward: what delta is computed from
    delta: Cast = Cast(FP32)  # backward: delta
    do_over_l: Cast = Cast(FP32)  # backward: dO / l where it enters dP and dV, of an unnormalised O
    p: Cast = Cast(FP32)  # backward: the recomputed P where it enters dV
    dp: Cast = Cast(FP32)  # backward: dP
    p_of_ds: Cast = Cast(FP32)  # backward: P where dS and a delta of P are computed from it
    shift_attached: bool = False  # backward: autograd takes the row's maximum for a function of S too
    ds: Cast = Cast(FP32)  # backward: dS where it enters dQ and dK
    scaled_ds: Cast = Cast(FP32)  # backward: alpha dS, where dS is scaled before it enters them
    scaled_q: Cast = Cast(FP32)  # backward: alpha q, where that enters dK, and dQ is scaled at last
    scaled_k: Cast = Cast(FP32)  # backward: alpha log2(e) K, where P is computed anew from it, and it enters dQ
    sums: Cast = Cast(FP32)  # backward: dQ, dK and dV of every head after each tile
    group_sums: Cast = Cast(FP32)  # backward: dK and dV of a key head, to which its heads add one after the other
    gradients: Cast = Cast(FP32)  # backward: dQ, dK and dV as returned

    def __post_init__(self) -> None:
        if self.contracted and self.shifted.narrows:
            raise ValueError("contracted, S - m is never formed: it can't be rounded too")
        if self.contracted and self.exponential.correction:
            raise ValueError("a fast exponential multiplies by log2 e itself: nothing is contracted")
        if self.q.narrows and self.q8 is not None:
            raise ValueError("q is rounded, or put into 8 bits with scales, not both")
        if self.k.narrows and (self.q8 is not None or self.k8 is not None):
            raise ValueError("K is rounded with q, or q and K are put into 8 bits with scales, not both")

    @property
    def quantizes(self) -> bool:
        """True if an operand is put into 8 bits with scales."""
        return any(quantization is not None for quantization in (self.q8, self.k8, self.v8, self.p8))

    @property
    def is_stochastic(self) -> bool:
        """True if any cast is stochastic."""
        return any(cast.rounding is Rounding.STOCHASTIC for _, cast in self.casts())

    def casts(self) -> tuple[tuple[str, Cast], ...]:
        """Return all rounding points, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return tuple((name, value) for name, value in pairs if isinstance(value, Cast))

    def in_formats(self, formats: Formats) -> "RoundingPlan":
        """Return the same plan for a call in these formats: every rounding point that follows one of them is in it."""
        return _in_formats(self, formats)


@lru_cache(maxsize=1024)
def _in_formats(plan: RoundingPlan, formats: Formats) -> RoundingPlan:
    format_of = {None: None, Follows.OPERANDS: formats.operands, Follows.OUTPUT: formats.output}
    casts = {name: (cast, format_of[cast.follows]) for name, cast in plan.casts()}
    changed = {name: replace(cast, fmt=fmt) for name, (cast, fmt) in casts.items() if fmt not in (None, cast.fmt)}
    return replace(plan, **changed) if changed else plan  # type: ignore[arg-type]


_NAMES = [name for name, _ in RoundingPlan("fp32").casts()]
#: Rounding points of the backward pass, in the order in which they come.
BACKWARD_POINTS = tuple(_NAMES[_NAMES.index("delta") :])

_LOW = Cast(BF16, follows=Follows.OPERANDS)
OUTPUT = Cast(BF16, follows=Follows.OUTPUT)  # O's cast in any kernel that returns it in the format of the call
_HIGH = Cast(FP32)

#: Every plan that has a name. They are as written for a call in bf16.
PLANS: dict[str, RoundingPlan] = {}


def _plan(name: str, like: RoundingPlan, **changes: Any) -> RoundingPlan:
    """Return a plan with a name: another one's casts but for some."""
    PLANS[name] = replace(like, name=name, **changes)
    return PLANS[name]


_UNROUNDED = RoundingPlan("fp32")
PAPER = _plan("paper", _UNROUNDED, p_bar=_LOW, o_bar=_LOW, o=OUTPUT)
ALL_BF16 = _plan("all_bf16", PAPER, s=_LOW, row_sum=_LOW)
FUSED = _plan("fused", _UNROUNDED, p_bar=_LOW, o=OUTPUT, p=_LOW, ds=_LOW, gradients=OUTPUT)
FUSED_STOCHASTIC = _plan("fused_stochastic", FUSED, o=replace(OUTPUT, rounding=Rounding.STOCHASTIC))
STANDARD = _plan("standard", _UNROUNDED, p_bar=_LOW, o=OUTPUT, delta_from=DeltaSource.PROBABILITIES)
FP32_PLAN = _plan("fp32", _UNROUNDED)
PRESETS = tuple(PLANS.values())

# The paper's section 3.2: what each single change to the plan is said to cure.
ISOLATION = (
    _plan("delta_from_dp", PAPER, delta_from=DeltaSource.PROBABILITIES),
    _plan("o_recomputed", PAPER, delta_from=DeltaSource.RECOMPUTED_OUTPUT),
    _plan("o_fp32", PAPER, o_bar=_HIGH, o=_HIGH),
    _plan("pv_fp32", PAPER, p_bar=_HIGH, o_bar=_HIGH),
)

# Ties go away from zero, as public AscendC attention code casts P (CAST_ROUND): another bias.
_AWAY, _OUTPUT_AWAY = (replace(cast, rounding=Rounding.RTNA) for cast in (_LOW, OUTPUT))
FUSED_P_BAR_AWAY = _plan("fused_p_bar_away", FUSED, p_bar=_AWAY)
FUSED_P_BAR_O_AWAY = _plan("fused_p_bar_o_away", FUSED, p_bar=_AWAY, o=_OUTPUT_AWAY)

# P-bar in 8 bits, as fp8 attention has it: 2^-10 and less of it is 0.
FUSED_FP8 = _plan("fused_fp8", FUSED, p_bar=Cast(FP8_E4M3, saturates=True))
# Times 2^8, as in FlashAttention-3 and -4: 2^-18 and less of P is 0, and 448 is 1.75 times the largest P-bar.
FUSED_FP8_OFFSET = _plan("fused_fp8_offset", FUSED_FP8, offset=8)
# Where FlashAttention-4's running maximum is behind by up to 4 in base two (rule `lazy_4`), 2^4 of it is all that fits.
FUSED_FP8_OFFSET_4 = _plan("fused_fp8_offset_4", FUSED_FP8, offset=4)
# Where both are clamped, l counts what P V gets.
FUSED_FP8_CLAMPED = _plan("fused_fp8_clamped", FUSED_FP8_OFFSET, row_sum_of=SumOf.CLAMPED)
# Conditions of fairness in 8 bits: a shift that moves makes P-bar's cast err, so l has to count what the cast left.
FUSED_FP8_FAIR = _plan("fused_fp8_fair", FUSED_FP8_OFFSET, row_sum_of=SumOf.ROUNDED, o=FUSED_STOCHASTIC.o)
FUSED_E5M2_OFFSET = _plan("fused_e5m2_offset", FUSED_FP8_OFFSET, p_bar=Cast(FP8_E5M2, saturates=True))


def _all_in(like: RoundingPlan, name: str, how: Quantization, **changes: Any) -> RoundingPlan:
    return _plan(name, like, **dict.fromkeys(("q8", "k8", "v8"), how), **changes)


# All of attention in 8 bits, as FlashAttention-3 takes it: e4m3 with a scale a head.
_HEAD = Quantization(FP8_E4M3, Scaling.HEAD)
FP8 = _all_in(FUSED_FP8_OFFSET, "fp8", _HEAD)
FP8_TENSOR = _all_in(FP8, "fp8_tensor", Quantization(FP8_E4M3, Scaling.TENSOR))
FP8_BLOCK = _all_in(FP8, "fp8_block", Quantization(FP8_E4M3, Scaling.BLOCK, 128))
FP8_E5M2_V = _plan("fp8_e5m2_v", FP8, v8=replace(_HEAD, fmt=FP8_E5M2))
# The OCP's microscaling formats: 32 numbers along a product's inner dimension share a power of two.
_MX = Quantization(FP8_E4M3, Scaling.MICRO, 32)
MXFP8 = _all_in(FUSED, "mxfp8", _MX, p_bar=_HIGH, p8=_MX)
# SageAttention (arXiv 2410.02367), its Triton kernel: q and K in 8-bit integers, P V in fp16 and summed there.
SAGE = _plan(
    "sage",
    FUSED,
    q8=Quantization(INT8, Scaling.BLOCK, 128, Rounding.RTNA, takes_scale=True),
    k8=Quantization(INT8, Scaling.BLOCK, 64, Rounding.RTNA),
    smooth_k=True,
    p_bar=Cast(FP16),
    pv=Cast(FP16),
    exponential=Exponential(base_two=True),
)

# FlashAttention-2's and -4's exponential, and that of a Triton kernel which leaves contraction on.
FUSED_CONTRACTED = _plan("fused_contracted", FUSED, exponential=Exponential(base_two=True), contracted=True)

# PyTorch's flash kernel for CPUs with vector instructions, Vectorized<float>::fexp_u20 (aten/src/ATen/cpu/vec), for
# bf16 and fp16 on AVX-512. Its exponential errs by up to 1.1e-4, at 0 by 5.3e-5.
FEXP_U20 = Exponential(
    correction=(0.00010703434948458272, 0.30354260500649682, -0.22433836478672356, -0.079204240219773236), lanes=16
)
FUSED_FAST_EXP = _plan("fused_fast_exp", FUSED, exponential=FEXP_U20)

# Upcast attention: fp32 in all but what is returned.
FP32_INSIDE = _plan("fp32_inside", FP32_PLAN, o=OUTPUT, delta_from=DeltaSource.PROBABILITIES)

# Plans whose matrix products are a tensor core's: what a GPU makes of them, before one is at hand. Of fp8's, all
# products, Q K^T too: of a call whose q, k and v fp8 holds.
for _of, _cores in (
    *((plan, (Accumulator.AMPERE, Accumulator.HOPPER)) for plan in (PAPER, FUSED, FUSED_STOCHASTIC)),
    *((plan, (Accumulator.BFMMLA,)) for plan in (PAPER, FUSED)),
    (FUSED, (Accumulator.VOLTA, Accumulator.CDNA3)),
    *((plan, (Accumulator.ADA_FP8, Accumulator.HOPPER_FP8)) for plan in (FUSED_FP8, FP8)),
):
    for _core in _cores:
        _plan(f"{_of.name}_{_core.name.lower().removesuffix('_fp8')}", _of, accumulator=_core)
