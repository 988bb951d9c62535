"""A rounding-error bound for every element of O, from the plan alone: what accuracy is held to.

First-order forward analysis (Higham, Accuracy and Stability of Numerical Algorithms, 3.1) of O = (P V) / l with
P = exp(S - m). With u the unit roundoff of each rounding point and u32 = 2^-24,

    |dS_j|  <= (u_scale + u_qk + u_s) |S_j| + (u_q + (d + 2) u32) alpha |q| |k_j|
               + alpha (|dq| |k_j| + |q| |dk_j| + |dq| |dk_j|), of q and K in 8 bits
    |dS_j|   of a soft cap c takes that through a slope of at most 1, + (e_tanh + 4 u32 + u_s) c
             of a bias b + u_s |S_j| + 2 u32 |b|
    |dP_j|  <= P_j expm1(|dS_j| + |dS_max| + (2 u32 + u_shifted) |S_j - m| + e_exp + u_exp + u_p)
               + half the smallest subnormal
    |dO|    <= sum_j |dP_j| |V_j| + sum_j |dP_j| sum_j P_j |V_j| + sum_j P_j |dV_j|, of V in 8 bits
               + (c u_obar + c u_l + u_pv + n u32) sum_j P_j |V_j| + u_o |O|
               + the subnormal spacings of O and O-bar

with c = 3 roundings of O-bar and l a block of keys. What falls below the subnormals of P-bar and of a narrow O-bar is
lost before the division by l, which an offset or a dither makes smaller than 1 (`_raised`). A shift rule also enters
where S - m is rounded, which is the larger the farther m lies from the row's maximum. A contracted plan rounds m c in
the place of S's scale, and neither S c nor S - m: the terms above count as many roundings for it, of numbers as large.
A learned sink is a key of a known score without a V. All else that a rule does is to make P underflow, and that is the
harm the bound is there to show.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.flash import TileOrder
from tiebreak.kernels.formats import BF16, FP16, FP32, Rounding
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import ALL_BF16, Accumulator, Cast, RoundingPlan, SinkEntry
from tiebreak.kernels.quantization import Quantization
from tiebreak.kernels.reference import Reference, products
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule

#: The points that determine the errors of P and O: plans that are equal in these share their bounds.
IN_P = (
    "accumulator",
    "scale",
    "divisor",
    "log2_e",
    "q",
    "k",
    "q8",
    "k8",
    "smooth_k",
    "qk",
    "s",
    "shifted",
    "exp",
    "p_bar",
    "p8",
)
_IN_O = (*IN_P, "o_bar", "row_sum", "pv", "v8", "o", "sink")

_EXPONENTIAL_ERROR = 2.0**-13  # relative: 1.2e-4; PyTorch's fast exponential errs by 1.1e-4 at most
_TANH_ERROR = 2.0**-10.9  # relative: tanh.approx.f32 of GPUs, which FlashAttention-2 and -3 take, has 2^-11

# A kernel that declares nothing is held to the loosest preset, with Q K^T and S - m rounded, and exp(S - m) in fp16:
# P-bar may be in that whatever the inputs are in, and loses what lies below its subnormals, which bf16 keeps.
_LOOSEST = replace(ALL_BF16, name="undeclared", qk=ALL_BF16.s, shifted=ALL_BF16.s, exp=Cast(FP16))
UNDECLARED = Declaration(FLASH_ATTENTION, _LOOSEST, SHIFT_RULES["safe"])


def _roundoff(cast: Cast) -> float:
    """Return the largest relative error of a cast: half an ulp to nearest, a whole one otherwise."""
    nearest = cast.rounding in (Rounding.RNE, Rounding.RTNA)
    return cast.fmt.unit_roundoff * (1.0 if nearest else 2.0)


def _narrowing(cast: Cast) -> float:
    """Return the same for a cast right after an fp32 operation, whose rounding is counted there."""
    return _roundoff(cast) if cast.narrows else 0.0


def _step(how: Quantization, x: Tensor, inner: int = -1) -> Tensor:
    """Return the largest error of an element of x that 8 bits with scales hold as a subnormal; broadcastable to x."""
    return how.scales(x.float(), inner).double() * (how.fmt.smallest_subnormal / 2)


def _lost(how: Quantization | None, x: Tensor) -> Tensor:
    """Return a bound on the norm of every row's error in 8 bits, (..., rows, 1)."""
    if how is None:
        return torch.zeros_like(x[..., :1])
    size, steps = (each.norm(dim=-1, keepdim=True) for each in (x, _step(how, x).expand_as(x)))
    lost: Tensor = size * how.relative_error + steps
    return lost


def _beyond(rule: ShiftRule, top: Tensor) -> Tensor:
    """Return how far a rule's shift may be from a row's maximum `top`, at most."""
    scaled = torch.where(top > 0, abs(rule.above - 1.0), abs(rule.below - 1.0)) * top.abs()
    return scaled + abs(rule.offset) + (math.log(2.0) if rule.dithered else 0.0) + rule.lag


def _raised(declaration: Declaration) -> float:
    """Return how much an absolute error of P-bar or O-bar may grow in P or O: 1/l where one key is seen.

    It does not cover a rule that scales the maximum: P-bar underflows there, which is the harm to be found.
    """
    rule = declaration.shift_rule
    return math.exp(rule.offset + (math.log(2.0) if rule.dithered else 0.0)) * 2.0**-declaration.plan.offset


def _roundings(inputs: AttentionInputs, declaration: Declaration) -> int:
    """Return how often O-bar and l are rounded: at every block's own sum, at its rescale, and where it is added."""
    block = declaration.block  # tiles begin anew with each split, and behind a prefix
    return 3 * (-(-inputs.k.shape[-2] // block.keys) + block.splits + (block.order is TileOrder.PREFIX))


def _of_sums(inputs: AttentionInputs, declaration: Declaration) -> float:
    """Return how much of O the roundings of O-bar and l may change, as a share."""
    plan, keys = declaration.plan.in_formats(inputs.formats), inputs.k.shape[-2]
    within = sum(_narrowing(cast) * (keys // cast.every) for cast in (plan.o_bar, plan.pv, plan.row_sum) if cast.every)
    return within + _roundings(inputs, declaration) * (_roundoff(plan.o_bar) + _roundoff(plan.row_sum))


def _of_products(plan: RoundingPlan) -> float:
    """Return the error of a term of a matrix product, as a share, where its accumulator rounds it."""
    return BF16.unit_roundoff if plan.accumulator is Accumulator.ROUNDED else 0.0


def lost_of_o_bar(inputs: AttentionInputs, declaration: Declaration) -> float:
    """Return the least error of an element of O: a narrow O-bar loses its subnormals at every rounding."""
    plan = declaration.plan.in_formats(inputs.formats)
    smallest = sum(cast.fmt.smallest_subnormal for cast in (plan.o_bar, plan.pv) if cast.narrows)
    return _roundings(inputs, declaration) * smallest / 2 * _raised(declaration) if smallest else 0.0


def mean_slack(inputs: AttentionInputs, declaration: Declaration) -> float:
    """Return how far O may be outside the range of V, relative to the largest |V|.

    O = (sum of rounded P-bar times V / sum of rounded P-bar) * (sum of rounded P-bar / l): the first factor is a mean
    of V, the second is 1 up to the casts of P-bar, its loss below the subnormals, and the roundings of O-bar, l and O.
    This is true where a row's largest P-bar is about 1; a shift rule that makes it smaller does harm.
    """
    plan, keys = declaration.plan.in_formats(inputs.formats), inputs.k.shape[-2]
    lost = keys * plan.p_bar.fmt.smallest_subnormal * _raised(declaration)
    single = _roundoff(plan.p_bar) + _roundoff(plan.o) + _narrowing(plan.pv) + _EXPONENTIAL_ERROR
    single += sum(how.relative_error for how in (plan.p8, plan.v8) if how is not None)
    single += _of_products(plan) + _of_sums(inputs, declaration)
    return single + lost + 2 * keys * FP32.unit_roundoff


@dataclass(frozen=True)
class ErrorBounds:
    """Bounds for one batch. Parts as large as K and V that no plan changes are computed once."""

    inputs: AttentionInputs
    ref: Reference
    _bounds: dict[Hashable, Tensor] = field(default_factory=dict)
    _of_p: dict[Hashable, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def shared_by(self, declaration: Declaration, points: tuple[str, ...] = _IN_O) -> Hashable:
        """Return the parts of a declaration that bounds depend on: kernels equal in them share their bounds."""
        # Where S - m is not rounded the shift rule is in it by its size alone.
        rule = declaration.shift_rule.name if declaration.plan.shifted.narrows else ""
        plan = declaration.plan.in_formats(self.inputs.formats)
        rounded = tuple(getattr(plan, point) for point in points)
        return rounded, rule, _raised(declaration), _roundings(self.inputs, declaration) if points == _IN_O else 0

    @cached_property
    def values(self) -> Tensor:
        """|V|."""
        return self.inputs.expanded(self.inputs.whole_v.abs().double())

    @cached_property
    def _product_error(self) -> Tensor:
        """The error that fp32 allows the products and sums of Q K^T."""
        q, k = self.inputs.q.double(), self.inputs.whole_k.double()
        norms: Tensor = q.norm(dim=-1, keepdim=True) * self.inputs.expanded(k.norm(dim=-1))[:, :, None, :]
        return norms.mul_((q.shape[-1] + 2) * FP32.unit_roundoff * self.inputs.scale)

    @cached_property
    def _tops(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's largest score, its place, and how far below it every score is."""
        visible = self.inputs.visible(self.ref.s)
        top, at = visible.amax(-1, keepdim=True), visible.argmax(-1, keepdim=True)
        if self.inputs.sink is not None:
            top = torch.maximum(top, self.inputs.sink.double()[:, None, None])
        return top, at, (top - visible).nan_to_num_(nan=0.0, posinf=0.0)

    def of_scores(self, declaration: Declaration) -> Tensor:
        """Return a bound on |dS| for every score, fp64, (batch, heads, queries, keys)."""
        ref, plan = self.ref, declaration.plan.in_formats(self.inputs.formats)
        # In place from here on: a fresh large tensor costs as much as what is computed into it.
        scale = _narrowing(plan.scale) + _narrowing(plan.divisor) + _narrowing(plan.log2_e)
        added = self.inputs.added
        raw = ref.s if added is None and not self.inputs.softcap else products(self.inputs)
        ds = raw.abs().mul_(scale + _narrowing(plan.qk) + _roundoff(plan.s)).add_(self._product_error)
        if plan.q8 is not None or plan.k8 is not None:
            ds.add_(self._eight_bits(plan))
        if in_operands := _narrowing(plan.q) + _narrowing(plan.k) + _of_products(plan):
            in_products = (self.inputs.q.shape[-1] + 2) * FP32.unit_roundoff
            ds.add_(self._product_error, alpha=in_operands / in_products)
        if self.inputs.softcap:  # at most twice the cap, whatever went before
            in_tanh = _TANH_ERROR + 4 * FP32.unit_roundoff + _roundoff(plan.s)
            ds.clamp_(max=2 * self.inputs.softcap).add_(in_tanh * self.inputs.softcap)
        if added is not None:  # which is divided by a factor, and that multiplied with, where alpha is left
            ds.add_(ref.s.abs(), alpha=_roundoff(plan.s)).add_(added.abs(), alpha=2 * FP32.unit_roundoff)
        if self.inputs.is_rescaled:
            ds.add_(raw.abs(), alpha=2 * FP32.unit_roundoff)
        return ds

    def of_slope(self, declaration: Declaration) -> Tensor | float:
        """Return a bound on the error of a soft cap's slope 1 - (s / c)^2, a factor of dS; 0 without one."""
        cap = self.inputs.softcap
        return (self.of_scores(declaration) * (2.0 / cap)).clamp(max=1.0) if cap else 0.0

    def of_probabilities(self, declaration: Declaration) -> Tensor:
        """Return a bound on |dP| for every P, fp64, (batch, heads, queries, keys)."""
        ref, plan = self.ref, declaration.plan.in_formats(self.inputs.formats)
        (top, at, distance), ds = self._tops, self.of_scores(declaration)
        exponent = ds.add_(ds.gather(-1, at)).add_(distance, alpha=2 * FP32.unit_roundoff).add_(_EXPONENTIAL_ERROR)
        if narrowed := _narrowing(plan.shifted):
            beyond = _beyond(declaration.shift_rule, top).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            exponent.add_((distance + beyond).mul_(narrowed)).add_(beyond.mul_(2 * FP32.unit_roundoff))
        in_p_bar = _roundoff(plan.p_bar) + (0.0 if plan.p8 is None else plan.p8.relative_error)
        weights = exponent.add_(_narrowing(plan.exp) + in_p_bar).expm1_().mul_(ref.p)
        lost = plan.p_bar.fmt.smallest_subnormal + (plan.exp.fmt.smallest_subnormal if plan.exp.narrows else 0.0)
        return weights.add_(lost / 2 * _raised(declaration) * (ref.p > 0))

    def _eight_bits(self, plan: RoundingPlan) -> Tensor:
        """Return how much 8 bits of q and K change S, at most, (batch, heads, queries, keys)."""
        q, k = self.inputs.q.double(), self.inputs.expanded_k().double()
        in_format = 0.0
        if plan.smooth_k:  # one vector taken off all keys is nothing to softmax, but each difference is rounded
            k, in_format = k - k.mean(-2, keepdim=True), self.inputs.formats.inputs.unit_roundoff
        dq, dk = _lost(plan.q8, q), _lost(plan.k8, k) + k.norm(dim=-1, keepdim=True) * in_format
        q_size, k_size = (operand.norm(dim=-1, keepdim=True) for operand in (q, k))
        changed: Tensor = (q_size + dq) @ (k_size + dk).mT - q_size @ k_size.mT
        return self.inputs.scale * changed

    def of_sink(self, declaration: Declaration) -> Tensor | float:
        """Bound the error of P of a learned sink, whose score is exact, (batch, heads, queries, 1); 0 without one."""
        if self.inputs.sink is None:
            return 0.0
        top, at, _ = self._tops
        apart = (top - self.inputs.sink.double()[:, None, None]).abs()
        plan = declaration.plan.in_formats(self.inputs.formats)
        exponent = self.of_scores(declaration).gather(-1, at)
        exponent += apart * (_narrowing(plan.shifted) + 2 * FP32.unit_roundoff) + _EXPONENTIAL_ERROR
        error: Tensor = torch.expm1(exponent + _narrowing(plan.exp)) * (1.0 - self.ref.p.sum(-1, keepdim=True))
        return error

    def of(self, declaration: Declaration) -> Tensor:
        """Return a bound on |O - ref|, fp64, (batch, heads, queries, d); Inf where rounding S does anything."""
        key = self.shared_by(declaration)
        if key in self._bounds:
            return self._bounds[key]
        ref, keys = self.ref, self.inputs.k.shape[-2]
        plan = declaration.plan.in_formats(self.inputs.formats)
        up_to_p = self.shared_by(declaration, IN_P)
        if up_to_p not in self._of_p:  # which many plans share
            dp = self.of_probabilities(declaration)
            self._of_p[up_to_p] = dp.sum(-1, keepdim=True), dp @ self.values
        total, weighted = self._of_p[up_to_p]
        steps = _of_sums(self.inputs, declaration) + _of_products(plan)
        relative = total + self.of_sink(declaration) + steps + keys * FP32.unit_roundoff + _narrowing(plan.pv)
        sees = ref.p.any(-1, keepdim=True)
        least = self.inputs.formats.output.smallest_subnormal + lost_of_o_bar(self.inputs, declaration) * sees
        if plan.v8 is not None:
            relative = relative + plan.v8.relative_error
            least = least + _step(plan.v8, self.inputs.expanded_v(), -2).amax(-2, keepdim=True)
        casts = 2 if self.inputs.sink is not None and plan.sink is SinkEntry.AFTERWARDS else 1
        bound = weighted + relative * ref.magnitude + casts * _roundoff(plan.o) * ref.o.abs() + least
        # Inf * 0: the scores' rounding can move any weight to any key.
        self._bounds[key] = bound.nan_to_num_(nan=torch.inf, posinf=torch.inf)
        return self._bounds[key]
