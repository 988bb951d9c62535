"""The paper's equations 1 and 2: how an error of delta becomes an error of dQ and of the query weights' gradient."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head
from tiebreak.cases.gradient_bounds import GradientBounds
from tiebreak.cases.verdicts import MARGIN_ULPS, Interval, Verdict, interval, judge
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.reference import Reference, reference_gradients

_AT_ONCE = 2**17  # elements of a piece: 1 MB


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors taken as vectors; NaN if one is zero."""
    return float((a * b).sum() / (a.norm() * b.norm()))


@dataclass(frozen=True)
class ExactGradients:
    """The fp64 gradients with their norms, which are as large as K and V, for all kernels."""

    gradients: tuple[Tensor, Tensor, Tensor]  # dQ, dK and dV
    norms: tuple[Tensor, Tensor, Tensor]  # of each
    units: tuple[Tensor, Tensor, Tensor]  # of each, `row_units`

    @classmethod
    def of(cls, inputs: AttentionInputs, ref: Reference) -> "ExactGradients":
        """Those of a batch."""
        dq, dk, dv = reference_gradients(inputs, ref)
        fmt = inputs.formats.output
        units = row_units(dq, fmt), row_units(dk, fmt), row_units(dv, fmt)
        return cls((dq, dk, dv), (dq.norm(), dk.norm(), dv.norm()), units)

    def errors(self, gradients: Gradients) -> "GradientErrors":
        """Of dQ, dK and dV."""
        # In place: a fresh large tensor costs as much as what is computed into it.
        dq, dk, dv = (
            out.to(torch.float64, copy=True).sub_(exact)
            for out, exact in zip((gradients.dq, gradients.dk, gradients.dv), self.gradients, strict=True)
        )
        return GradientErrors.of((dq, dk, dv))


@dataclass(frozen=True)
class GradientErrors:
    """What dQ, dK and dV are off by, fp64, and the norms of its rows, from which all but the largest follows."""

    elements: tuple[Tensor, Tensor, Tensor]  # the kernel's less the reference's
    rows: tuple[Tensor, Tensor, Tensor]  # (..., N, 1)

    @classmethod
    def of(cls, elements: tuple[Tensor, Tensor, Tensor]) -> "GradientErrors":
        """Those of some errors."""
        dq, dk, dv = (torch.linalg.vector_norm(each, dim=-1, keepdim=True) for each in elements)
        return cls(elements, (dq, dk, dv))


def weight_gradient(dq: Tensor, x: Tensor) -> Tensor:
    """dW_Q = dQ^T X of every head, summed over the batch: two of (batch, heads, n, d) -> (heads, d, d)."""
    return (dq.transpose(-1, -2) @ x).sum(0)


def gradient_measures(
    output: AttentionOutput,
    inputs: AttentionInputs,
    ref: Reference,
    exact: ExactGradients | None = None,
    errors: GradientErrors | None = None,
) -> dict[str, float]:
    """Errors of the gradients, and how much of dQ's and dW_Q's error is the error of delta.

    Equation 1: dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K; equation 2 is its sum over tokens against X. X is
    taken as Q, that is W_Q = 1. hp is the fp64 reference.

    Args:
        output: of the kernel, with gradients.
        inputs: what it was given.
        ref: the fp64 reference.
        exact: its gradients, if at hand.
        errors: of the output's gradients against them, if at hand.

    Returns:
        Relative errors of dQ, dK and dV, and the cosines of the two errors with what the equations say.
    """
    gradients = output.gradients
    assert gradients is not None, "the kernel was run without its backward pass"
    exact = exact or ExactGradients.of(inputs, ref)
    delta = gradients.delta
    if delta is None:
        delta = (inputs.do.double() * output.o.double()).sum(-1, keepdim=True)
    predicted = inputs.scale * (delta.double() - ref.delta) * ref.pk
    errors = errors or exact.errors(gradients)
    error = -errors.elements[0]
    dq_error, dk_error, dv_error = (
        float(rows.norm() / norm) for rows, norm in zip(errors.rows, exact.norms, strict=True)
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
    for at, (ours, theirs) in enumerate(zip(gradients, exact, strict=True)):
        error, size, norm = errors.elements[at], errors.rows[at].norm().item(), bounds.norms[at]
        if not math.isfinite(size):
            lost += int((torch.isfinite(theirs) & ~torch.isfinite(ours)).sum())
            error = error.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
            size = error.norm().item()
        worst = max(worst, _largest_share(error, bounds.elements[at]), size / norm if norm else 0.0)
    return {"nonfinite": float(lost), "over_bound": worst}


def _largest_share(error: Tensor, bound: Tensor) -> float:
    """The largest |error| / bound, from pieces that stay in a core's cache."""
    pieces = (torch.split(tensor.reshape(-1), _AT_ONCE) for tensor in (error, bound))
    return float(max((part / limit).abs_().max().item() for part, limit in zip(*pieces, strict=True)))
