"""The paper's equations 1 and 2: how an error of delta becomes an error of dQ and of the query weights' gradient."""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head
from tiebreak.cases.gradient_bounds import GradientBounds
from tiebreak.cases.verdicts import MARGIN_ULPS, Interval, Verdict, interval, judge
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.reference import Reference, reference_gradients, sink_gradient

_AT_ONCE = 2**16  # elements of a piece: half a MB


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors taken as vectors; NaN if one is zero."""
    return float((a * b).sum() / (a.norm() * b.norm()))


class Faults(NamedTuple):
    """What is wrong with gradients, at worst."""

    nonfinite: int  # elements that are NaN or Inf where the reference's are finite
    over_bound: float  # the largest error as a share of its bound, of an element or of a norm


@dataclass(frozen=True)
class ErrorsOfOne:
    """What one gradient is off by, from a single look at tensors as large as K and V."""

    rows: Tensor  # norms of its rows, (..., N, 1)
    along: Tensor  # mean product with the reference's, by key head, (batch * key heads,)
    faults: Faults


@dataclass(frozen=True)
class GradientErrors:
    """What dQ, dK and dV are off by, fp64."""

    dq: Tensor  # the kernel's less the reference's
    each: tuple[ErrorsOfOne, ...]
    faults: Faults  # of all, dSink's among them


@dataclass(frozen=True)
class ExactGradients:
    """The fp64 gradients of a batch, and what follows from them: as large as K and V, and computed once."""

    gradients: tuple[Tensor, Tensor, Tensor]  # dQ, dK and dV
    fmt: Format  # that a kernel's are returned in
    sink: Tensor | None = None  # dSink, (heads,), where the inputs have a sink

    @classmethod
    def of(cls, inputs: AttentionInputs, ref: Reference) -> "ExactGradients":
        """Those of a batch."""
        return cls(reference_gradients(inputs, ref), inputs.formats.output, sink_gradient(inputs, ref))

    def errors(self, gradients: Gradients, bounds: GradientBounds, groups: int) -> GradientErrors:
        """Of dQ, dK and dV, of a call with so many query heads a key head."""
        outs, sharing = (gradients.dq, gradients.dk, gradients.dv), (groups, 1, 1)
        each = tuple(map(_errors, outs, self.gradients, bounds.elements, bounds.norms, sharing))
        faults = [sink_faults(gradients.dsink, self.sink, bounds.sink), *(one.faults for one in each)]
        worst = Faults(sum(one.nonfinite for one in faults), max(one.over_bound for one in faults))
        return GradientErrors(gradients.dq.double() - self.gradients[0], each, worst)

    @cached_property
    def norms(self) -> tuple[Tensor, ...]:
        """Of each."""
        return tuple(gradient.norm() for gradient in self.gradients)

    @cached_property
    def units(self) -> tuple[Tensor, ...]:
        """`row_units` of each."""
        return tuple(row_units(gradient, self.fmt) for gradient in self.gradients)

    @cached_property
    def squares(self) -> tuple[Tensor, ...]:
        """Their mean square, dQ's by head, (batch * heads,)."""
        return tuple(by_key_head(gradient.square(), 1) for gradient in self.gradients)


def _errors(out: Tensor, exact: Tensor, bound: Tensor, norm: float, groups: int) -> ErrorsOfOne:
    """In pieces that stay in a core's cache, whole key heads each."""
    key_heads = out.shape[0] * out.shape[1] // groups
    shape = (key_heads, out.numel() // key_heads // out.shape[-1], out.shape[-1])
    at_once = max(1, _AT_ONCE // (shape[1] * shape[2]))
    rows, along, nonfinite, squares, worst = [], [], 0, 0.0, 0.0
    pieces = (torch.split(tensor.reshape(shape), at_once) for tensor in (out, exact, bound))
    for ours, theirs, limit in zip(*pieces, strict=True):
        error = ours.to(torch.float64, copy=True).sub_(theirs)
        rows.append(torch.linalg.vector_norm(error, dim=-1))
        along.append((error * theirs).flatten(1).nanmean(1))
        size = rows[-1].norm().item()
        if not math.isfinite(size):
            nonfinite += int((torch.isfinite(theirs) & ~torch.isfinite(ours)).sum())
            size = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).norm().item()
        squares += size**2
        worst = max(worst, error.div_(limit).abs_().max().item())
    faults = Faults(nonfinite, max(worst, math.sqrt(squares) / norm if norm else 0.0))
    return ErrorsOfOne(torch.cat(rows).reshape(*out.shape[:-1], 1), torch.cat(along), faults)


def sink_faults(dsink: Tensor | None, exact: Tensor | None, bound: Tensor | None) -> Faults:
    """What is wrong with dSink, (heads,); None: a kernel tells none, or there is no sink."""
    if dsink is None or exact is None or bound is None:
        return Faults(0, 0.0)
    share = (dsink.double() - exact).abs() / bound
    return Faults(int((~torch.isfinite(dsink)).sum()), share.nan_to_num(nan=0.0, posinf=0.0).max().item())


def weight_gradient(dq: Tensor, x: Tensor) -> Tensor:
    """dW_Q = dQ^T X of every head, summed over the batch: two of (batch, heads, n, d) -> (heads, d, d)."""
    ours, theirs = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (dq, x))
    return ours.transpose(-1, -2) @ theirs


def equation_cosines(
    output: AttentionOutput, dq_error: Tensor, inputs: AttentionInputs, ref: Reference
) -> tuple[float, float]:
    """How much of dQ's and of dW_Q's error is the error of delta: cosines of each with what an equation makes of it.

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
    """An ulp of the largest element of each row of a gradient in a format, fp64, (..., N, 1); Inf in a row of zeros."""
    largest = exact.abs().amax(-1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - fmt.mantissa_bits)
    return unit.masked_fill(largest == 0, torch.inf)


def ulps_of_rows(rows: Tensor, units: Tensor, d: int) -> float:
    """Root mean square error of a gradient, each row of d elements in ulps of its largest, fp64, (..., N, 1) each.

    Elements of a gradient cancel, and an error in ulps of a small one says by how much it cancelled.
    """
    counted = int((units < torch.inf).sum()) * d  # a row of zeros has no ulp
    return ((rows / units).square_().sum() / counted).sqrt().item() if counted else torch.nan


def delta_error_of(dq: Tensor, inputs: AttentionInputs, ref: Reference, exact: Tensor) -> Interval:
    """Mean error of delta, relative to mean |delta|, read off dQ and the reference's (paper, equation 1).

    dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K: the part of dQ's error along P K is delta's error. What else
    the kernel rounds in its backward pass counts too, where it falls along P K.
    """
    along = ((exact - dq.double()) * ref.pk).sum(-1, keepdim=True) / (
        inputs.scale * ref.pk.square().sum(-1, keepdim=True)
    )
    size = ref.delta.abs().mean().item()
    estimate = interval(by_key_head(along, inputs.groups))
    return Interval(estimate.mean / size, estimate.half_width / size) if size else Interval(torch.nan, torch.inf)


def contains_bias(delta: Interval, fmt: Format) -> Verdict:
    """Whether gradients contain a bias of O: delta, a product of O, then errs by as much (`delta_error_of`).

    A bias of the margin, in ulps of O's format, is at least as many unit roundoffs of O's size. Biased: they do.
    """
    return judge(delta, MARGIN_ULPS * fmt.unit_roundoff)
