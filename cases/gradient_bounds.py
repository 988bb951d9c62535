"""Rounding-error bounds for dQ, dK and dV, from the plan of the forward pass alone.

First-order analysis of the backward pass (FlashAttention-2, algorithm 2), with every intermediate rounded to the format
that products take, at most: where other people's backward passes round is not declared. There dP = dO V^T,
delta = rowsum(dO O) or rowsum(P dP), dS = P (dP - delta); here e_X is the error of X, u the operands' unit roundoff.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.cases.bounds import ErrorBounds
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.inputs import sum_groups
from tiebreak.kernels.kernel import Declaration


@dataclass(frozen=True)
class GradientBounds:
    """Bounds on the errors of dQ, dK and dV. Inf where rounding can do anything, never NaN."""

    elements: tuple[Tensor, Tensor, Tensor]  # of every element, fp64, in the shapes of q, k and v
    norms: tuple[float, float, float]  # of the Frobenius norms


@dataclass(frozen=True)
class GradientErrorBounds:
    """Bounds for one batch. What no plan changes is computed once."""

    forward: ErrorBounds
    _found: dict[Hashable, GradientBounds] = field(default_factory=dict)

    def of(self, declaration: Declaration) -> GradientBounds:
        """What bounds the gradients under a declaration; computed once for all kernels that share it."""
        key = self.forward.shared_by(declaration)
        if key not in self._found:
            self._found[key] = GradientBounds(self._elements(declaration), self._norms(declaration))
        return self._found[key]

    @cached_property
    def _operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and dO in fp64, k and v for every query head."""
        inputs = self.forward.inputs
        return inputs.q.double(), inputs.expanded_k().double(), inputs.expanded_v().double(), inputs.do.double()

    @cached_property
    def _dp(self) -> tuple[Tensor, Tensor]:
        """dP, and what it is the sum of, all positive: (batch, heads, queries, keys)."""
        _, _, v, do = self._operands
        return do @ v.transpose(-1, -2), do.abs() @ v.abs().transpose(-1, -2)

    @property
    def _unit(self) -> float:
        return self.forward.inputs.formats.operands.unit_roundoff

    @property
    def _last(self) -> float:
        """Of the cast to the format that gradients are returned in, at each sum over grouped heads too."""
        return self.forward.inputs.formats.output.unit_roundoff * self.forward.inputs.groups

    @cached_property
    def _accumulation(self) -> float:
        """Of a sum over d in fp32."""
        return self.forward.inputs.q.shape[-1] * FP32.unit_roundoff

    @cached_property
    def _delta_rounding(self) -> Tensor:
        """What rowsum(dO O) errs by beside the error of O, a row."""
        size = (self._operands[3].abs() * self.forward.ref.o.abs()).sum(-1, keepdim=True)
        return size.mul_(self._unit + self._accumulation)

    def _elements(self, declaration: Declaration) -> tuple[Tensor, Tensor, Tensor]:
        """Bounds on every element.

        |e_dS| <= e_P (|dP - delta| + e_dP + e_delta) + P (e_dP + e_delta) + u P |dP - delta|
        |e_dQ| <= alpha (|e_dS| |K| + (u_out + n u32) P |dP - delta| |K|), dK and dV likewise.
        """
        inputs, ref, unit = self.forward.inputs, self.forward.ref, self._unit
        q, k, _, do = self._operands
        dp, sizes = self._dp
        p_error = self.forward.of_probabilities(declaration)
        p_error = p_error + ref.p * (p_error.sum(-1, keepdim=True) + unit)
        dp_error = (unit + self._accumulation) * sizes
        from_o = (do.abs() * self.forward.of(declaration)).sum(-1, keepdim=True) + self._delta_rounding
        from_p = (p_error * dp.abs() + ref.p * dp_error).sum(-1, keepdim=True)
        both, centred = dp_error + from_o + from_p, (dp - ref.delta).abs()
        ds = ref.p * centred
        ds_error = p_error * (centred + both) + ref.p * both + unit * ds

        def bound(error: Tensor, exact: Tensor, factor: Tensor, scale: float) -> Tensor:
            relative = self._last + exact.shape[-1] * FP32.unit_roundoff
            total = scale * (error @ factor.abs() + relative * (exact @ factor.abs()))
            smallest = inputs.formats.output.smallest_subnormal
            # Inf * 0, where the scores' rounding can move any weight to any key.
            return torch.nan_to_num(total + smallest, nan=torch.inf, posinf=torch.inf)

        dq = bound(ds_error, ds, k, inputs.scale)
        dk = bound(ds_error.transpose(-1, -2), ds.transpose(-1, -2), q, inputs.scale)
        dv = bound(p_error.transpose(-1, -2), ref.p.transpose(-1, -2), do, 1.0)
        return dq, sum_groups(dk, inputs.groups), sum_groups(dv, inputs.groups)

    def _norms(self, declaration: Declaration) -> tuple[float, float, float]:
        """Bounds on the Frobenius norms.

        Those of the elements add up errors of all keys as if all had one sign, and a backward pass that forgets the
        scale is within that. Here errors of different keys are independent, so that their squares add up (Higham and
        Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), each counted at its largest. What all keys
        of a row have in common adds up as it is: the error of delta; in it those of O's columns do too, since ties give
        them one sign.
        """
        inputs, ref, unit = self.forward.inputs, self.forward.ref, self._unit
        q, k, v, do = self._operands
        dp, sizes = self._dp
        centred = dp - ref.delta
        p_error = self.forward.of_probabilities(declaration)
        row = p_error.square().sum(-1, keepdim=True)  # squared error of l
        o_error = (p_error.square() @ v.square() + row * ref.o.square()).sqrt()
        o_error = o_error + 2 * inputs.formats.output.unit_roundoff * ref.o.abs()
        delta_error = (do.abs() * o_error).sum(-1, keepdim=True) + self._delta_rounding
        dp_error = unit * dp.abs() + self._accumulation * sizes
        p_square = p_error.square() + ref.p.square() * (row + unit**2)
        alone = p_square * centred.square() + ref.p.square() * (dp_error.square() + (unit * centred).square())

        def norm(square: Tensor, common: Tensor, gradient: Tensor) -> float:
            total = square.sum() + common.square().sum() + (self._last * gradient).square().sum()
            return math.inf if total.isnan() else total.sqrt().item()

        def summed(x: Tensor) -> Tensor:
            return sum_groups(x, inputs.groups)

        scale, back = inputs.scale, (ref.p * centred).transpose(-1, -2)
        dq = norm(scale**2 * (alone @ k.square()), scale * delta_error * ref.pk, scale * (ref.p * centred @ k))
        common = summed(scale * ((ref.p * delta_error).transpose(-1, -2) @ q.abs()))
        dk = norm(scale**2 * (alone.transpose(-1, -2) @ q.square()), common, summed(scale * (back @ q)))
        dv = norm(p_square.transpose(-1, -2) @ do.square(), torch.zeros(()), summed(ref.p.transpose(-1, -2) @ do))
        return dq, dk, dv
