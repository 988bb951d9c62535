"""The paper's equations 1 and 2: how an error of delta becomes an error of dQ and of the query weights' gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

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


@dataclass(frozen=True)
class ExactGradients:
    """The fp64 gradients with their norms, which are as large as K and V, for all kernels."""

    gradients: tuple[Tensor, Tensor, Tensor]  # dQ, dK and dV
    norms: tuple[Tensor, Tensor, Tensor]  # of each
    units: tuple[Tensor, Tensor, Tensor]  # of each, `row_units`
    sink: Tensor | None = None  # dSink, (heads,), where the inputs have a sink

    @classmethod
    def of(cls, inputs: AttentionInputs, ref: Reference) -> "ExactGradients":
        """Those of a batch."""
        dq, dk, dv = reference_gradients(inputs, ref)
        fmt = inputs.formats.output
        units = row_units(dq, fmt), row_units(dk, fmt), row_units(dv, fmt)
        return cls((dq, dk, dv), (dq.norm(), dk.norm(), dv.norm()), units, sink_gradient(inputs, ref))

    def errors(self, gradients: Gradients, bounds: GradientBounds, groups: int) -> "GradientErrors":
        """Of dQ, dK and dV, of a call with so many query heads a key head."""
        outs, sharing = (gradients.dq, gradients.dk, gradients.dv), (groups, 1, 1)
        dq, dk, dv = map(_errors, outs, self.gradients, bounds.elements, sharing)
        return GradientErrors(gradients.dq.double() - self.gradients[0], (dq, dk, dv))

    @cached_property
    def squares(self) -> tuple[Tensor, Tensor, Tensor]:
        """Their mean square, dQ's by head, (batch * heads,)."""
        dq, dk, dv = (by_key_head(gradient.square(), 1) for gradient in self.gradients)
        return dq, dk, dv


@dataclass(frozen=True)
class ErrorsOfOne:
    """What one gradient is off by, from a single look at tensors as large as K and V."""

    rows: Tensor  # norms of its rows, (..., N, 1)
    along: Tensor  # mean product with the reference's, by key head, (batch * key heads,)
    finite: float  # norm of what is finite
    over_bound: float  # the largest of what is finite, as a share of its bound


@dataclass(frozen=True)
class GradientErrors:
    """What dQ, dK and dV are off by, fp64."""

    dq: Tensor  # the kernel's less the reference's
    each: tuple[ErrorsOfOne, ErrorsOfOne, ErrorsOfOne]


def _errors(out: Tensor, exact: Tensor, bound: Tensor, groups: int) -> ErrorsOfOne:
    """In pieces that stay in a core's cache, whole key heads each."""
    key_heads = out.shape[0] * out.shape[1] // groups
    shape = (key_heads, out.numel() // key_heads // out.shape[-1], out.shape[-1])
    at_once = max(1, _AT_ONCE // (shape[1] * shape[2]))
    rows, along, squares, worst = [], [], 0.0, 0.0
    pieces = (torch.split(tensor.reshape(shape), at_once) for tensor in (out, exact, bound))
    for ours, theirs, limit in zip(*pieces, strict=True):
        error = ours.to(torch.float64, copy=True).sub_(theirs)
        rows.append(torch.linalg.vector_norm(error, dim=-1))
        size = rows[-1].norm().item()
        product = (error * theirs).flatten(1)
        if not math.isfinite(size):
            along.append(product.nanmean(1))
            size = error.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).norm().item()
        else:
            along.append(product.mean(1))
        squares += size**2
        worst = max(worst, error.div_(limit).abs_().max().item())
    return ErrorsOfOne(torch.cat(rows).reshape(*out.shape[:-1], 1), torch.cat(along), math.sqrt(squares), worst)


def weight_gradient(dq: Tensor, x: Tensor) -> Tensor:
    """dW_Q = dQ^T X of every head, summed over the batch: two of (batch, heads, n, d) -> (heads, d, d)."""
    ours, theirs = (tensor.transpose(0, 1).flatten(1, 2) for tensor in (dq, x))
    return ours.transpose(-1, -2) @ theirs


def gradient_measures(
    output: AttentionOutput,
    inputs: AttentionInputs,
    ref: Reference,
    exact: ExactGradients,
    errors: GradientErrors,
) -> dict[str, float]:
    """Errors of the gradients, and how much of dQ's and dW_Q's error is the error of delta.

    Equation 1: dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K; equation 2 is its sum over tokens against X. X is
    taken as Q, that is W_Q = 1. hp is the fp64 reference.

    Args:
        output: of the kernel, with gradients.
        inputs: what it was given.
        ref: the fp64 reference.
        exact: its gradients.
        errors: of the output's gradients against them.

    Returns:
        Relative errors of dQ, dK and dV, and the cosines of the two errors with what the equations say.
    """
    gradients = output.gradients
    assert gradients is not None, "the kernel was run without its backward pass"
    delta = gradients.delta
    if delta is None:
        delta = (inputs.do.double() * output.o.double()).sum(-1, keepdim=True)
    predicted = inputs.scale * (delta.double() - ref.delta) * ref.pk
    error = -errors.dq
    dq_error, dk_error, dv_error = (
        float(errors_of.rows.norm() / norm) for errors_of, norm in zip(errors.each, exact.norms, strict=True)
    )
    x = inputs.q.double()
    return {
        "dq_relative_error": dq_error,
        "dk_relative_error": dk_error,
        "dv_relative_error": dv_error,
        "equation_1_cosine": cosine(error, predicted),
        "equation_2_cosine": cosine(weight_gradient(error, x), weight_gradient(predicted, x)),
    }


def row_units(exact: Tensor, fmt: Format) -> Tensor:
    """An ulp of the largest element of each row of a gradient, fp64, (..., N, 1); Inf in a row of zeros.

    Args:
        exact: the reference's dQ, dK or dV, (..., N, d).
        fmt: the format that the gradient is returned in.
    """
    largest = exact.abs().amax(-1, keepdim=True)
    unit = torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 1 - fmt.mantissa_bits)
    return unit.masked_fill(largest == 0, torch.inf)


def ulps_of_rows(rows: Tensor, units: Tensor, d: int) -> float:
    """Root mean square error of a gradient, each row in ulps of its largest element.

    Elements of a gradient cancel, and an error in ulps of a small one says by how much it cancelled.

    Args:
        rows: norms of the rows of the error of dQ, dK or dV, fp64, (batch, heads, N, 1).
        units: `row_units` of the reference's.
        d: elements of a row.
    """
    # A row of zeros has no ulp and does not count.
    counted = int((units < torch.inf).sum()) * d
    return ((rows / units).square_().sum() / counted).sqrt().item() if counted else torch.nan


def delta_error_of(dq: Tensor, inputs: AttentionInputs, ref: Reference, exact: Tensor) -> Interval:
    """Mean error of delta, relative to mean |delta|, read off the error of dQ (paper, equation 1).

    dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K: the part of dQ's error along P K is delta's error. What else
    the kernel rounds in its backward pass counts too, where it falls along P K.

    Args:
        dq: the kernel's, (batch, heads, queries, d).
        inputs: what it was given.
        ref: the fp64 reference.
        exact: the reference's dQ.
    """
    along = ((exact - dq.double()) * ref.pk).sum(-1, keepdim=True) / (
        inputs.scale * ref.pk.square().sum(-1, keepdim=True)
    )
    size = ref.delta.abs().mean().item()
    estimate = interval(by_key_head(along, inputs.groups))
    return Interval(estimate.mean / size, estimate.half_width / size) if size else Interval(torch.nan, torch.inf)


def contains_bias(delta: Interval, fmt: Format) -> Verdict:
    """Whether gradients contain a bias of O: delta, a product of O, then errs by as much.

    Args:
        delta: its error as a share, `delta_error_of`.
        fmt: of O. A bias of the margin, in ulps, is at least as many unit roundoffs of O's size.

    Returns:
        Biased: they contain it; unbiased: they don't.
    """
    return judge(delta, MARGIN_ULPS * fmt.unit_roundoff)


def gradient_faults(
    gradients: Sequence[Tensor], errors: GradientErrors, exact: Sequence[Tensor], bounds: GradientBounds
) -> dict[str, float]:
    """What is wrong with gradients, at worst.

    Args:
        gradients: dQ, dK and dV of a kernel.
        errors: of them.
        exact: the reference's.
        bounds: of their errors.

    Returns:
        `nonfinite`, elements that are NaN or Inf where the reference's are finite, and `over_bound`, the largest error
        as a share of its bound, of an element or of a norm.
    """
    lost, worst = 0, 0.0
    for ours, theirs, errors_of, norm in zip(gradients, exact, errors.each, bounds.norms, strict=True):
        size = errors_of.rows.norm().item()
        if not math.isfinite(size):
            lost += int((torch.isfinite(theirs) & ~torch.isfinite(ours)).sum())
            size = errors_of.finite
        worst = max(worst, errors_of.over_bound, size / norm if norm else 0.0)
    return {"nonfinite": float(lost), "over_bound": worst}


def sink_faults(dsink: Tensor | None, exact: Tensor | None, bound: Tensor | None) -> dict[str, float]:
    """What is wrong with dSink, as `gradient_faults` has it.

    Args:
        dsink: of a kernel, (heads,); None where it tells none.
        exact: the reference's; None without a sink.
        bound: of its errors; None likewise.
    """
    if dsink is None or exact is None or bound is None:
        return {"nonfinite": 0.0, "over_bound": 0.0}
    lost = float((~torch.isfinite(dsink)).sum())
    share = (dsink.double() - exact).abs() / bound
    return {"nonfinite": lost, "over_bound": share.nan_to_num(nan=0.0, posinf=0.0).max().item()}
