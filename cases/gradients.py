"""The paper's equations 1 and 2: how an error of delta becomes an error of dQ and of the query weights' gradient."""

from torch import Tensor

from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.reference import Reference, reference_gradients


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two tensors taken as vectors; NaN if one is zero."""
    return float((a * b).sum() / (a.norm() * b.norm()))


def relative_error(out: Tensor, ref: Tensor) -> float:
    """Norm of the difference over the norm of the reference."""
    return float((out.double() - ref).norm() / ref.norm())


def weight_gradient(dq: Tensor, x: Tensor) -> Tensor:
    """dW_Q = dQ^T X of every head, summed over the batch: two of (batch, heads, n, d) -> (heads, d, d)."""
    return (dq.transpose(-1, -2) @ x).sum(0)


def gradient_measures(
    output: AttentionOutput, inputs: AttentionInputs, ref: Reference, exact: tuple[Tensor, Tensor, Tensor] | None = None
) -> dict[str, float]:
    """Errors of the gradients, and how much of dQ's and dW_Q's error is the error of delta.

    Equation 1: dQ_hp - dQ_lp = alpha diag(delta_lp - delta_hp) P K; equation 2 is its sum over tokens against X. X is
    taken as Q, that is W_Q = 1. hp is the fp64 reference.

    Args:
        output: of the kernel, with gradients.
        inputs: what it was given.
        ref: the fp64 reference.
        exact: its gradients, if at hand.

    Returns:
        Relative errors of dQ, dK and dV, and the cosines of the two errors with what the equations say.
    """
    gradients = output.gradients
    assert gradients is not None, "the kernel was run without its backward pass"
    dq, dk, dv = exact or reference_gradients(inputs, ref)
    delta = gradients.delta
    if delta is None:
        delta = (inputs.do.double() * output.o.double()).sum(-1, keepdim=True)
    predicted = inputs.scale * (delta.double() - ref.delta) * ref.pk
    error = dq - gradients.dq.double()
    x = inputs.q.double()
    return {
        "dq_relative_error": relative_error(gradients.dq, dq),
        "dk_relative_error": relative_error(gradients.dk, dk),
        "dv_relative_error": relative_error(gradients.dv, dv),
        "equation_1_cosine": cosine(error, predicted),
        "equation_2_cosine": cosine(weight_gradient(error, x), weight_gradient(predicted, x)),
    }
