"""Rounding-error bounds for dQ, dK and dV, from the plan of the forward pass alone.

First-order analysis of the backward pass (FlashAttention-2, algorithm 2), with every intermediate rounded to the format
that products take, at most: where other people's backward passes round is not declared. There dP = dO V^T,
delta = rowsum(dO O) or rowsum(P dP), dS = P (dP - delta); here e_X is the error of X, u the operands' unit roundoff and
w their smallest subnormal, by which any cast may err where numbers are too small for u (fp16 without loss scaling).
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.cases.bounds import IN_P, ErrorBounds
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import sum_groups
from tiebreak.kernels.kernel import Declaration


@dataclass(frozen=True)
class GradientBounds:
    """Bounds on the errors of dQ, dK and dV. Inf where rounding can do anything, never NaN."""

    elements: tuple[Tensor, Tensor, Tensor]  # of every element, fp64, in the shapes of q, k and v
    norms: tuple[float, float, float]  # of the Frobenius norms
    sink: Tensor | None = None  # of every element of dSink, fp64, (heads,), where the inputs have a sink


class _Casts(NamedTuple):
    """Relative errors, and an absolute one."""

    unit: float  # of operands
    least: float  # that an operand may lose below the subnormals
    last: float  # of the cast to the format of gradients, at each sum over grouped heads too
    accumulation: float  # of a sum over V's d in fp32


@dataclass(frozen=True)
class GradientErrorBounds:
    """Bounds for one batch. What no plan changes is computed once, fp64."""

    forward: ErrorBounds
    exact: tuple[Tensor, Tensor, Tensor]  # the reference's dQ, dK and dV
    _bounds: dict[Hashable, GradientBounds] = field(default_factory=dict)
    _of_norms: dict[Hashable, tuple[float, float, float]] = field(default_factory=dict)

    def of(self, declaration: Declaration) -> GradientBounds:
        """What bounds the gradients under a declaration; computed once for all kernels that share it."""
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
        """|K|, |Q| and |dO|, which errors of dS and of P are multiplied by."""
        inputs = self.forward.inputs
        k, q, do = (tensor.double().abs() for tensor in (inputs.expanded_k(), inputs.q, inputs.do))
        return k, q, do

    @cached_property
    def _dp(self) -> Tensor:
        """dP = dO V^T, (batch, heads, queries, keys)."""
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
        """What a cast of P or dS may lose of a key that a row sees, as it falls below the subnormals."""
        return self._casts.least * (self.forward.ref.p > 0)

    @cached_property
    def _delta_rounding(self) -> Tensor:
        """What rowsum(dO O) errs by beside the error of O, a row."""
        size = (self._factors[2] * self.forward.ref.o.abs()).sum(-1, keepdim=True)
        return size.mul_(self._casts.unit + self._casts.accumulation).add_(self._casts.least)

    def _elements(
        self, declaration: Declaration, p_error: Tensor
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None]:
        """Bounds on every element, and on those of dSink.

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
        of_keys = inputs.of_held(sum_groups(dk, inputs.groups), sum_groups(dv, inputs.groups))
        of_sink = None if inputs.sink is None else self._of_sink(declaration, l_error, from_o + from_p)
        return (dq, *of_keys), of_sink

    def _of_sink(self, declaration: Declaration, l_error: Tensor, delta_error: Tensor) -> Tensor:
        """|e_dSink| <= sum over rows of e_P |delta| + (P + e_P) e_delta + (u_out + n u32) P |delta|, P of the sink."""
        inputs, ref = self.forward.inputs, self.forward.ref
        p, delta = 1.0 - ref.p.sum(-1, keepdim=True), ref.delta.abs()
        p_error = self.forward.of_sink(declaration) + p * l_error
        last = self._casts.last + ref.delta.numel() // inputs.q.shape[1] * FP32.unit_roundoff
        error = p_error * delta + (p + p_error) * delta_error + p * delta * last
        bound: Tensor = error.sum((0, 2, 3)) + inputs.formats.output.smallest_subnormal
        return bound.nan_to_num(nan=torch.inf)

    def _norms(self, declaration: Declaration, p_error: Tensor) -> tuple[float, float, float]:
        """Bounds on the Frobenius norms.

        Those of the elements add up errors of all keys as if all had one sign, and a backward pass that forgets the
        scale is within that. Here errors of different keys are independent, so that their squares add up (Higham and
        Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), each counted at its largest. What all keys
        of a row have in common adds up as it is: the error of delta; in it those of O's columns do too, since ties give
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
