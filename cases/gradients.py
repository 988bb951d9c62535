"""Gradients: bounds of their rounding errors, those errors, and how an error of delta becomes one of dQ and of dW_Q.

Bounds follow from the plan of the forward pass alone, by first-order analysis of the backward pass (FlashAttention-2,
algorithm 2), with every intermediate rounded to the format that products take, at most: where other people's backward
passes round is not declared. There dP = dO V^T, delta = rowsum(dO O) or rowsum(P dP), dS = P (dP - delta); here e_X is
the error of X, u the operands' unit roundoff and w their smallest subnormal, by which any cast may err where numbers
are too small for u (fp16 without loss scaling). Equations 1 and 2 are the paper's.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.cases.bounds import IN_P, ErrorBounds
from tiebreak.cases.errors import by_key_head
from tiebreak.cases.verdicts import MARGIN_ULPS, BiasVerdict, Interval, judge
from tiebreak.kernels.formats import FP32, Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients, sum_groups
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import Reference, reference_gradients, sink_gradient

_AT_ONCE = 2**16  # elements of a piece: half a MB


@dataclass(frozen=True)
class GradientBounds:
    """Bounds on the errors of dQ, dK and dV. Inf where rounding can do anything, never NaN."""

    elements: tuple[Tensor, Tensor, Tensor]  # of every element, fp64, in the shapes of q, k and v
    norms: tuple[float, float, float]  # of the Frobenius norms
    sink: Tensor | None = None  # of every element of dSink, fp64, (heads,), where the inputs have a sink


class _Casts(NamedTuple):
    """The relative errors of the casts, and an absolute one."""

    unit: float  # of operands
    least: float  # that an operand may lose below the subnormals
    last: float  # of the cast to the format of gradients, at each sum over grouped heads too
    accumulation: float  # of a sum over V's d in fp32


@dataclass(frozen=True)
class GradientErrorBounds:
    """Bounds for one batch. Parts that no plan changes are computed once, fp64."""

    forward: ErrorBounds
    exact: tuple[Tensor, Tensor, Tensor]  # the reference's dQ, dK and dV
    _bounds: dict[Hashable, GradientBounds] = field(default_factory=dict)
    _of_norms: dict[Hashable, tuple[float, float, float]] = field(default_factory=dict)

    def of(self, declaration: Declaration) -> GradientBounds:
        """Return the bounds on gradients under a declaration; computed once for all kernels that share them."""
        key = self.forward.shared_by(declaration)
        if key not in self._bounds:
            p_error = self.forward.of_probabilities(declaration)
            up_to_p = self.forward.shared_by(declaration, IN_P)
            if up_to_p not in self._of_norms:
                self._of_norms[up_to_p] = self._norms(declaration, p_error)
            elements, sink = self._elements(declaration, p_error)
            self._bounds[key] = GradientBounds(elements, self._of_norms[up_to_p], sink)
        return self._bounds[key]

    @cached_property
    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        """The absolute |K|, |Q| and |dO|, factors of errors of dS and of P."""
        inputs = self.forward.inputs
        k, q, do = (tensor.double().abs() for tensor in (inputs.expanded_k(), inputs.q, inputs.do))
        return k, q, do

    @cached_property
    def _dp(self) -> Tensor:
        """The product dP = dO V^T, (batch, heads, queries, keys)."""
        return self.forward.inputs.do.double() @ self.forward.inputs.expanded_v().double().mT

    @cached_property
    def _dp_size(self) -> Tensor:
        """|dO| |V|^T, likewise."""
        return self._factors[2] @ self.forward.values.mT

    @cached_property
    def _centred(self) -> Tensor:
        """|dP - delta|, likewise."""
        return (self._dp - self.forward.ref.delta).abs_()

    @cached_property
    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        """|dS| |K|, |dS|^T |Q| and P^T |dO|, before the heads of a group are added up."""
        p, (k, q, do) = self.forward.ref.p, self._factors
        ds = p * self._centred
        return ds @ k, ds.mT @ q, p.mT @ do

    @cached_property
    def _casts(self) -> _Casts:
        inputs = self.forward.inputs
        operands, last = inputs.formats.operands, inputs.formats.output.unit_roundoff * inputs.groups
        in_fp32 = inputs.v.shape[-1] * FP32.unit_roundoff
        return _Casts(operands.unit_roundoff, operands.smallest_subnormal, last, in_fp32)

    @cached_property
    def _lost(self) -> Tensor:
        """The loss of a cast of P or dS below the subnormals, of a key that a row sees."""
        return self._casts.least * (self.forward.ref.p > 0)

    @cached_property
    def _delta_rounding(self) -> Tensor:
        """The error of rowsum(dO O) other than that of O, a row."""
        size = (self._factors[2] * self.forward.ref.o.abs()).sum(-1, keepdim=True)
        return size.mul_(self._casts.unit + self._casts.accumulation).add_(self._casts.least)

    def _elements(
        self, declaration: Declaration, p_error: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Return bounds on every element, and on those of dSink.

        |e_dS| <= e_P (|dP - delta| + e_dP + e_delta) + P (e_dP + e_delta) + u P |dP - delta| + w
        |e_dQ| <= alpha (|e_dS| |K| + (u_out + n u32) P |dP - delta| |K|), dK and dV likewise.
        """
        inputs, ref, unit = self.forward.inputs, self.forward.ref, self._casts.unit
        l_error = p_error.sum(-1, keepdim=True) + self.forward.of_sink(declaration)
        p_error = p_error + ref.p * (l_error + unit) + self._lost
        dp_error = (unit + self._casts.accumulation) * self._dp_size + self._casts.least
        from_o = (self._factors[2] * self.forward.of(declaration)).sum(-1, keepdim=True) + self._delta_rounding
        from_p = (p_error * self._dp.abs() + ref.p * dp_error).sum(-1, keepdim=True)
        both = dp_error + from_o + from_p
        relative = unit + self.forward.of_slope(declaration)
        ds_error = p_error * (self._centred + both) + ref.p * (both + relative * self._centred) + self._lost
        queries, keys = ref.p.shape[-2:]

        def bound(error: Tensor, factor: Tensor, exact: Tensor, terms: int, scale: float) -> Tensor:
            total = torch.empty_like(exact)
            for e, f, x, part in zip(error, factor, exact, total, strict=True):  # which stay in a core's cache
                torch.matmul(e, f, out=part).add_(x, alpha=self._casts.last + terms * FP32.unit_roundoff).mul_(scale)
                # Inf * 0, where the scores' rounding can move any weight to any key.
                part.add_(inputs.formats.output.smallest_subnormal).nan_to_num_(nan=torch.inf, posinf=torch.inf)
            return total

        (k, q, do), (by_k, by_q, by_do) = self._factors, self._sums
        dq = bound(ds_error, k, by_k, keys, inputs.scale)
        dk = bound(ds_error.mT, q, by_q, queries, inputs.scale)
        dv = bound(p_error.mT, do, by_do, queries, 1.0)
        of_keys = inputs.gradients_as_stored(sum_groups(dk, inputs.groups), sum_groups(dv, inputs.groups))
        of_sink = None if inputs.sink is None else self._of_sink(declaration, l_error, from_o + from_p)
        return (dq, *of_keys), of_sink

    def _of_sink(self, declaration: Declaration, l_error: Tensor, delta_error: Tensor) -> Tensor:
        """Bound |e_dSink| by the sum over rows of e_P |delta| + (P + e_P) e_delta + (u_out + n u32) P |delta|."""
        inputs, ref = self.forward.inputs, self.forward.ref
        p, delta = 1.0 - ref.p.sum(-1, keepdim=True), ref.delta.abs()
        p_error = self.forward.of_sink(declaration) + p * l_error
        last = self._casts.last + ref.delta.numel() // inputs.q.shape[1] * FP32.unit_roundoff
        error = p_error * delta + (p + p_error) * delta_error + p * delta * last
        bound: Tensor = error.sum((0, 2, 3)) + inputs.formats.output.smallest_subnormal
        return bound.nan_to_num(nan=torch.inf)

    def _norms(self, declaration: Declaration, p_error: Tensor) -> tuple[float, float, float]:
        """Return bounds on the Frobenius norms.

        The bounds on elements add up the errors of all keys as if they had one sign, and so allow a backward pass that
        forgets the scale. Here errors of different keys are independent, so that their squares add up (Higham and Mary,
        A New Approach to Probabilistic Rounding Error Analysis, 2019), each counted at its largest. Errors that all
        keys of a row share add up as they are: that of delta, in which those of O's columns do too, since ties give
        them one sign.
        """
        inputs, ref, unit = self.forward.inputs, self.forward.ref, self._casts.unit
        of_sink = self.forward.of_sink(declaration)
        row = p_error.square().sum(-1, keepdim=True) + of_sink**2  # squared error of l
        relative = unit**2 + self.forward.of_slope(declaration) ** 2
        o_error = (p_error.square() @ self.forward.values.square() + row * ref.o.square()).sqrt()
        o_error = o_error + 2 * inputs.formats.output.unit_roundoff * ref.o.abs()
        delta_error = (self._factors[2] * o_error).sum(-1, keepdim=True) + self._delta_rounding
        dp_error = unit * self._dp.abs() + self._casts.accumulation * self._dp_size + self._casts.least
        p_square = p_error.square() + ref.p.square() * (row + unit**2) + self._lost.square()
        centred = self._centred.square()
        alone = p_square * centred + ref.p.square() * (dp_error.square() + relative * centred) + self._lost.square()

        def norm(square: Tensor, common: Tensor, exact: Tensor) -> float:
            least = inputs.formats.output.smallest_subnormal
            last = (self._casts.last * exact.norm()).square() + exact.numel() * least**2
            total = square.sum() + common.square().sum() + last
            return math.inf if total.isnan() else total.sqrt().item()

        # The sum of a product's elements, without the product.
        k, q, do = (factor.square().sum(-1) for factor in self._factors)
        scale, (dq, dk, dv) = inputs.scale, self.exact
        together = sum_groups((ref.p * delta_error).mT @ self._factors[1], inputs.groups)
        return (
            norm(scale**2 * alone * k[..., None, :], scale * delta_error * ref.pk, dq),
            norm(scale**2 * alone * q[..., None], together.mul_(scale), dk),
            norm(p_square * do[..., None], torch.zeros(()), dv),
        )


def cosine(a: Tensor, b: Tensor) -> float:
    """Return the cosine of two tensors taken as vectors; NaN if one is zero."""
    return float((a * b).sum() / (a.norm() * b.norm()))


class Faults(NamedTuple):
    """The worst errors of gradients."""

    nonfinite: int  # elements that are NaN or Inf where the reference's are finite
    over_bound: float  # the largest error as a share of its bound, of an element or of a norm


@dataclass(frozen=True)
class ErrorsOfOne:
    """The errors of one gradient, from a single pass over tensors as large as K and V."""

    rows: Tensor  # norms of its rows, (..., N, 1)
    along: Tensor  # mean product with the reference's, by key head, (batch * key heads,)
    faults: Faults


@dataclass(frozen=True)
class GradientErrors:
    """The errors of dQ, dK and dV, fp64."""

    dq: Tensor  # the kernel's less the reference's
    each: tuple[ErrorsOfOne, ...]
    faults: Faults  # of all, dSink's among them


@dataclass(frozen=True)
class ExactGradients:
    """The fp64 gradients of a batch, and derived tensors: as large as K and V, and computed once."""

    gradients: tuple[Tensor, Tensor, Tensor]  # dQ, dK and dV
    fmt: Format  # that a kernel's are returned in
    sink: Tensor | None = None  # dSink, (heads,), where the inputs have a sink

    @classmethod
    def of(cls, inputs: AttentionInputs, ref: Reference) -> "ExactGradients":
        """Return the gradients of a batch."""
        return cls(reference_gradients(inputs, ref), inputs.formats.output, sink_gradient(inputs, ref))

    def errors(self, gradients: Gradients, bounds: GradientBounds, groups: int) -> GradientErrors:
        """Return the errors of dQ, dK and dV, of a call with `groups` query heads a key head."""
        outs, sharing = (gradients.dq, gradients.dk, gradients.dv), (groups, 1, 1)
        each = tuple(map(_errors, outs, self.gradients, bounds.elements, bounds.norms, sharing))
        faults = [sink_faults(gradients.dsink, self.sink, bounds.sink), *(one.faults for one in each)]
        worst = Faults(sum(one.nonfinite for one in faults), max(one.over_bound for one in faults))
        return GradientErrors(gradients.dq.double() - self.gradients[0], each, worst)

    @cached_property
    def norms(self) -> tuple[Tensor, ...]:
        """The norm of each gradient."""
        return tuple(gradient.norm() for gradient in self.gradients)

    @cached_property
    def units(self) -> tuple[Tensor, ...]:
        """The `row_units` of each gradient."""
        return tuple(row_units(gradient, self.fmt) for gradient in self.gradients)

    @cached_property
    def squares(self) -> tuple[Tensor, ...]:
        """The mean squares, dQ's by head, (batch * heads,)."""
        return tuple(by_key_head(gradient.square(), 1) for gradient in self.gradients)


def _errors(out: Tensor, exact: Tensor, bound: Tensor, norm: float, groups: int) -> ErrorsOfOne:
    """Return the errors in pieces that stay in a core's cache, whole key heads each."""
    key_heads = out.shape[0] * out.shape[1] // groups
    shape = (key_heads, out.numel() // key_heads // out.shape[-1], out.shape[-1])
    at_once = max(1, _AT_ONCE // (shape[1] * shape[2]))
    rows, along, nonfinite, squares, worst = [], [], 0, 0.0, 0.0
    pieces = (torch.split(tensor.reshape(shape), at_once) for tensor in (out, exact, bound))
    for ours, theirs, limit in zip(*pieces, strict=True):
        error = ours.to(torch.float64, copy=True).sub_(theirs)
        rows.append(torch.linalg.vector_norm(error, dim=-1))
        along.append(torch.linalg.vecdot(error.flatten(1), theirs.flatten(1)) / theirs[0].numel())
        size = rows[-1].norm().item()
        if not math.isfinite(size):
            along[-1] = (error * theirs).flatten(1).nanmean(1)
            nonfinite += int((torch.isfinite(theirs) & ~torch.isfinite(ours)).sum())
            size = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).norm().item()
        squares += size**2
        worst = max(worst, *(abs(end.item()) for end in error.div_(limit).aminmax()))
    faults = Faults(nonfinite, max(worst, math.sqrt(squares) / norm if norm else 0.0))
    return ErrorsOfOne(torch.cat(rows).reshape(*out.shape[:-1], 1), torch.cat(along), faults)


def sink_faults(dsink: Tensor | None, exact: Tensor | None, bound: Tensor | None) -> Faults:
    """Return the errors of dSink, (heads,); None: a kernel returns none, or there is no sink."""
    if dsink is None or exact is None or bound is None:
        return Faults(0, 0.0)
    share = (dsink.double() - exact).abs() / bound
    return Faults(int((~torch.isfinite(dsink)).sum()), share.nan_to_num(nan=0.0, posinf=0.0).max().item())


def weight_gradient(dq: Tensor, x: Tensor) -> Tensor:
    """Return dW_Q = dQ^T X of every head, summed over the batch, from two of (batch, heads, n, d): (heads, d, d)."""
    ours, theirs = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (dq, x))
    return ours.transpose(-1, -2) @ theirs


def equation_cosines(
    output: AttentionOutput, dq_error: Tensor, inputs: AttentionInputs, ref: Reference
) -> tuple[float, float]:
    """Return cosines of the errors of dQ and of dW_Q with those that the paper's equations predict from delta's.

    Equation 1: dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K; equation 2 is its sum over tokens against X. X is
    taken as Q, that is W_Q = 1. hp is the fp64 reference; `dq_error` is dQ less the reference's.
    """
    delta = None if output.gradients is None else output.gradients.delta
    if delta is None:
        delta = (inputs.do.double() * output.o.double()).sum(-1, keepdim=True)
    predicted, x = inputs.scale * (delta.double() - ref.delta) * ref.pk, inputs.q.double()
    error = -dq_error
    return cosine(error, predicted), cosine(weight_gradient(error, x), weight_gradient(predicted, x))


def row_units(exact: Tensor, fmt: Format) -> Tensor:
    """Return an ulp of the largest element of each row of a gradient, fp64, (..., N, 1); Inf in a row of zeros."""
    largest = exact.abs().amax(-1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - fmt.mantissa_bits)
    return unit.masked_fill(largest == 0, torch.inf)


def ulps_of_rows(rows: Tensor, units: Tensor, d: int) -> float:
    """Return the rms error of a gradient, each row of d elements in ulps of its largest, fp64, (..., N, 1).

    Elements of a gradient cancel, so an error in ulps of a small element would show how much it cancelled.
    """
    counted = int((units < torch.inf).sum()) * d  # a row of zeros has no ulp
    return ((rows / units).square_().sum() / counted).sqrt().item() if counted else torch.nan


def delta_errors_of(dq: Tensor, inputs: AttentionInputs, ref: Reference, exact: Tensor) -> Tensor:
    """Return the mean error of delta by key head, relative to mean |delta| of all, read off dQ (paper, equation 1).

    dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K: the part of dQ's error along P K is delta's error. Other
    roundings of the backward pass count too, as far as they are along P K.
    """
    along = ((exact - dq.double()) * ref.pk).sum(-1, keepdim=True) / (
        inputs.scale * ref.pk.square().sum(-1, keepdim=True)
    )
    return by_key_head(along, inputs.groups) / ref.delta.abs().mean()


def contains_bias(delta: Interval, fmt: Format) -> BiasVerdict:
    """Return whether gradients contain a bias of O: delta, a product of O, then errs by as much (`delta_errors_of`).

    A bias of the margin, in ulps, is at least as many unit roundoffs of O's size. Biased: they contain it.
    """
    return judge(delta, MARGIN_ULPS * fmt.unit_roundoff)
