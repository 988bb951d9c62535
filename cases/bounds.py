"""A rounding-error bound for every element of O, from the plan alone: what accuracy is held to.

First-order forward analysis (Higham, Accuracy and Stability of Numerical Algorithms, 3.1) of O = (P V) / l with
P = exp(S - m). With u the unit roundoff of each rounding point and u32 = 2^-24,

    |dS_j|  <= (u_qk + u_s) |S_j| + (d + 2) u32 alpha |q| |k_j|
    |dP_j|  <= P_j expm1(|dS_j| + |dS_max| + (2 u32 + u_shifted) |S_j - m| + e_exp + u_p)
               + half the smallest subnormal
    |dO|    <= sum_j |dP_j| |V_j| + sum_j |dP_j| sum_j P_j |V_j|
               + (c u_obar + c u_l + n u32) sum_j P_j |V_j| + u_o |O| + the subnormal spacing of O

with c = 3 roundings of O-bar and l a block of keys. A shift rule enters where S - m is rounded, which is the larger the
farther m lies from the row's maximum. All else that it does is to make P underflow, and that is the harm the bound is
there to show.
"""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.formats import FP32, Rounding
from tiebreak.kernels.inputs import AttentionInputs, sum_groups
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import ALL_BF16, Cast
from tiebreak.kernels.reference import Reference
from tiebreak.kernels.shift_rules import SHIFT_RULES, ShiftRule

_EXPONENTIAL_ERROR = 2.0**-13  # relative: 1.2e-4; PyTorch's fast exponential errs by 1.1e-4 at most
_ROUNDINGS_A_BLOCK = 3  # of O-bar and of l: the block's own sum, the rescale, the addition

# A kernel that declares nothing is held to the loosest preset, with every point before the exponential rounded too.
UNDECLARED = Declaration(
    FLASH_ATTENTION, replace(ALL_BF16, name="undeclared", qk=ALL_BF16.s, shifted=ALL_BF16.s), SHIFT_RULES["safe"]
)


def _roundoff(cast: Cast) -> float:
    """Largest relative error of a cast: half an ulp to nearest, a whole one otherwise."""
    nearest = cast.rounding in (Rounding.TO_EVEN, Rounding.TIES_AWAY)
    return cast.fmt.unit_roundoff * (1.0 if nearest else 2.0)


def _narrowing(cast: Cast) -> float:
    """The same, of a cast that comes right after an fp32 operation: its own rounding is counted there."""
    return _roundoff(cast) if cast.narrows else 0.0


def _beyond(rule: ShiftRule, top: Tensor) -> Tensor:
    """How far a rule's shift may lie from a row's maximum `top`, at most."""
    scaled = torch.where(top > 0, abs(rule.above - 1.0), abs(rule.below - 1.0)) * top.abs()
    return scaled + abs(rule.offset) + (math.log(2.0) if rule.dithered else 0.0) + rule.lag


def mean_slack(inputs: AttentionInputs, declaration: Declaration) -> float:
    """How far O may lie outside the range of V, relative to the largest |V|.

    O = (sum of rounded P-bar times V / sum of rounded P-bar) * (sum of rounded P-bar / l): the first factor is a mean
    of V, the second is 1 but for the casts of P-bar, for what of it is lost below the subnormals, and for the roundings
    of O-bar, l and O. That holds where a row's largest P-bar is about 1; a shift rule that makes it smaller does harm.

    Args:
        inputs: of the call.
        declaration: the plan, and the tiles that its roundings are counted in.
    """
    plan, keys = declaration.plan.in_formats(inputs.formats), inputs.k.shape[-2]
    steps = _ROUNDINGS_A_BLOCK * -(-keys // declaration.block.keys) * (_roundoff(plan.o_bar) + _roundoff(plan.row_sum))
    lost = keys * plan.p_bar.fmt.smallest_subnormal
    single = _roundoff(plan.p_bar) + _roundoff(plan.o) + _EXPONENTIAL_ERROR
    return single + steps + lost + 2 * keys * FP32.unit_roundoff


@dataclass(frozen=True)
class GradientBounds:
    """Bounds on the errors of dQ, dK and dV."""

    elements: tuple[Tensor, Tensor, Tensor]  # see `gradient_bounds`
    norms: tuple[float, float, float]  # see `gradient_norm_bounds`


@dataclass(frozen=True)
class ErrorBounds:
    """Bounds for one batch. What no plan changes, all that is as large as K and V, is computed once."""

    inputs: AttentionInputs
    ref: Reference
    _of_gradients: dict[tuple[object, ...], "GradientBounds"] = field(default_factory=dict)

    def of_gradients(self, declaration: Declaration) -> "GradientBounds":
        """What bounds the gradients of all kernels of a declaration's plan."""
        # Where S - m is not rounded the shift rule is not in it.
        rule = declaration.shift_rule.name if declaration.plan.shifted.narrows else ""
        key = (declaration.plan, rule, declaration.block.keys)
        if key not in self._of_gradients:
            found = GradientBounds(gradient_bounds(self, declaration), gradient_norm_bounds(self, declaration))
            self._of_gradients[key] = found
        return self._of_gradients[key]

    @cached_property
    def _values(self) -> Tensor:
        """|V|."""
        return self.inputs.expanded_v().double().abs()

    @cached_property
    def _product_error(self) -> Tensor:
        """What the products and sums of Q K^T may err by in fp32."""
        q, k = self.inputs.q.double(), self.inputs.expanded_k().double()
        norms = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1)[:, :, None, :]
        error: Tensor = norms.mul_((q.shape[-1] + 2) * FP32.unit_roundoff * self.inputs.scale)
        return error

    @cached_property
    def _tops(self) -> tuple[Tensor, Tensor, Tensor]:
        """Each row's largest score, where it is, and how far below it every score lies."""
        hidden = self.inputs.hidden()
        visible = self.ref.s if hidden is None else self.ref.s.masked_fill(hidden, -torch.inf)
        top, at = visible.amax(-1, keepdim=True), visible.argmax(-1, keepdim=True)
        return top, at, (top - visible).nan_to_num_(nan=0.0, posinf=0.0)

    @cached_property
    def _subtraction_error(self) -> Tensor:
        """What the subtraction of the largest score may err by in fp32."""
        return self._tops[2] * (2 * FP32.unit_roundoff)

    def of_probabilities(self, declaration: Declaration) -> Tensor:
        """Bound on |dP| for every P, fp64, (batch, heads, queries, keys)."""
        ref, plan = self.ref, declaration.plan.in_formats(self.inputs.formats)
        top, at, distance = self._tops
        # In place from here on: a fresh large tensor costs as much as what is computed into it.
        ds = ref.s.abs().mul_(_narrowing(plan.qk) + _roundoff(plan.s)).add_(self._product_error)
        exponent = ds.add_(ds.gather(-1, at)).add_(self._subtraction_error).add_(_EXPONENTIAL_ERROR)
        if narrowed := _narrowing(plan.shifted):
            beyond = _beyond(declaration.shift_rule, top).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
            exponent.add_((distance + beyond).mul_(narrowed)).add_(beyond.mul_(2 * FP32.unit_roundoff))
        weights = exponent.add_(_roundoff(plan.p_bar)).expm1_().mul_(ref.p)
        return weights.add_(plan.p_bar.fmt.smallest_subnormal / 2 * (ref.p > 0))

    def of(self, declaration: Declaration) -> Tensor:
        """As `error_bound`."""
        ref, keys = self.ref, self.inputs.k.shape[-2]
        plan = declaration.plan.in_formats(self.inputs.formats)
        dp = self.of_probabilities(declaration)
        blocks = -(-keys // declaration.block.keys)
        steps = _ROUNDINGS_A_BLOCK * blocks * (_roundoff(plan.o_bar) + _roundoff(plan.row_sum))
        relative = dp.sum(-1, keepdim=True) + steps + keys * FP32.unit_roundoff
        subnormal = self.inputs.formats.output.smallest_subnormal
        bound = dp @ self._values + relative * ref.magnitude + _roundoff(plan.o) * ref.o.abs() + subnormal
        # Inf * 0: the scores' rounding can move any weight to any key.
        return torch.nan_to_num(bound, nan=torch.inf, posinf=torch.inf)


def error_bound(inputs: AttentionInputs, ref: Reference, declaration: Declaration) -> Tensor:
    """Bound on |O - ref| for every element, fp64, (batch, heads, queries, d); Inf where rounding S can do anything."""
    return ErrorBounds(inputs, ref).of(declaration)


def gradient_bounds(bounds: ErrorBounds, declaration: Declaration) -> tuple[Tensor, Tensor, Tensor]:
    """Bounds on the errors of dQ, dK and dV, fp64, in the shapes of q, k and v.

    First-order analysis of the backward pass (FlashAttention-2, algorithm 2), with every intermediate rounded to the
    format that products take, at most: where other people's backward passes round is not declared. With dP = dO V^T,
    delta = rowsum(dO O) or rowsum(P dP), dS = P (dP - delta),

        |d(dS)| <= |dP error of P| (|dP - delta| + e_dP + e_delta) + P (e_dP + e_delta) + u P |dP - delta|
        |dQ error| <= alpha (|d(dS)| |K| + (u_out + n u32) P |dP - delta| |K|), dK and dV likewise.

    Args:
        bounds: of the batch.
        declaration: what bounds the errors of P and of O.
    """
    inputs, ref, formats = bounds.inputs, bounds.ref, bounds.inputs.formats
    u, u32, d = formats.operands.unit_roundoff, FP32.unit_roundoff, inputs.q.shape[-1]
    q, k, v, do = (one.double() for one in (inputs.q, inputs.expanded_k(), inputs.expanded_v(), inputs.do))
    p_error = bounds.of_probabilities(declaration)
    p_error = p_error + ref.p * (p_error.sum(-1, keepdim=True) + u)
    dp_error = (u + d * u32) * (do.abs() @ v.abs().transpose(-1, -2))
    dp = do @ v.transpose(-1, -2)
    size = (do.abs() * ref.o.abs()).sum(-1, keepdim=True)
    from_o = (do.abs() * bounds.of(declaration)).sum(-1, keepdim=True) + (u + d * u32) * size
    from_p = (p_error * dp.abs() + ref.p * dp_error).sum(-1, keepdim=True)
    both, centred = dp_error + from_o + from_p, (dp - ref.delta).abs()
    ds = ref.p * centred
    ds_error = p_error * (centred + both) + ref.p * both + u * ds
    # Of grouped heads the sum may be rounded at every addition.
    last = formats.output.unit_roundoff * inputs.groups

    def bound(error: Tensor, exact: Tensor, factor: Tensor, scale: float) -> Tensor:
        total = scale * (error @ factor.abs() + (last + exact.shape[-1] * u32) * (exact @ factor.abs()))
        return torch.nan_to_num(total + formats.output.smallest_subnormal, nan=torch.inf, posinf=torch.inf)

    dq = bound(ds_error, ds, k, inputs.scale)
    dk = bound(ds_error.transpose(-1, -2), ds.transpose(-1, -2), q, inputs.scale)
    dv = bound(p_error.transpose(-1, -2), ref.p.transpose(-1, -2), do, 1.0)
    return dq, sum_groups(dk, inputs.groups), sum_groups(dv, inputs.groups)


def gradient_norm_bounds(bounds: ErrorBounds, declaration: Declaration) -> tuple[float, float, float]:
    """Bounds on the Frobenius norms of the errors of dQ, dK and dV.

    `gradient_bounds` adds up errors of all keys as if all had one sign, and a backward pass that forgets the scale is
    within that. Here errors of different keys are independent, so that their squares add up (Higham and Mary, A New
    Approach to Probabilistic Rounding Error Analysis, 2019), each counted at its largest. What all keys of a row have
    in common adds up as it is: the error of delta; in it those of O's columns do too, since ties give them one sign.

    Args:
        bounds: of the batch.
        declaration: what bounds the errors of P and of O.
    """
    inputs, ref, formats = bounds.inputs, bounds.ref, bounds.inputs.formats
    u, u32 = formats.operands.unit_roundoff, FP32.unit_roundoff
    q, k, v, do = (one.double() for one in (inputs.q, inputs.expanded_k(), inputs.expanded_v(), inputs.do))
    dp = do @ v.transpose(-1, -2)
    centred = dp - ref.delta
    p_error = bounds.of_probabilities(declaration)
    row = p_error.square().sum(-1, keepdim=True)  # squared error of l
    o_error = (
        p_error.square() @ v.square() + row * ref.o.square()
    ).sqrt() + 2 * formats.output.unit_roundoff * ref.o.abs()
    size = (do.abs() * ref.o.abs()).sum(-1, keepdim=True)
    delta_error = (do.abs() * o_error).sum(-1, keepdim=True) + (u + inputs.q.shape[-1] * u32) * size
    dp_error = u * dp.abs() + inputs.q.shape[-1] * u32 * (do.abs() @ v.abs().transpose(-1, -2))
    p_square = p_error.square() + ref.p.square() * (row + u**2)
    alone = p_square * centred.square() + ref.p.square() * (dp_error.square() + (u * centred).square())
    together = ref.p * delta_error
    exact = ref.p * centred
    last = formats.output.unit_roundoff * inputs.groups

    def norm(square: Tensor, common: Tensor, gradient: Tensor) -> float:
        return float((square.sum() + common.square().sum() + (last * gradient).square().sum()).sqrt())

    def summed(x: Tensor) -> Tensor:
        return sum_groups(x, inputs.groups)

    scale = inputs.scale
    dq = norm(scale**2 * (alone @ k.square()), scale * delta_error * ref.pk, scale * (exact @ k))
    back = exact.transpose(-1, -2)
    common = summed(scale * (together.transpose(-1, -2) @ q.abs()))
    dk = norm(scale**2 * (alone.transpose(-1, -2) @ q.square()), common, summed(scale * (back @ q)))
    dv = norm(p_square.transpose(-1, -2) @ do.square(), torch.zeros(()), summed(ref.p.transpose(-1, -2) @ do))
    return dq, dk, dv
