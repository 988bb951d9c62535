"""Errors of the gradients, and how much of them is the error of delta (paper, equations 1 and 2)."""

from functools import partial

from tiebreak.cases.gradients import delta_error_of, ulps_of_rows
from tiebreak.cases.measures import CallMeasure, Observed, Value

_RELATIVE = {
    "dq_relative_error": "norm of the error of dQ over the norm of dQ",
    "dk_relative_error": "norm of the error of dK over the norm of dK",
    "dv_relative_error": "norm of the error of dV over the norm of dV",
}
_COSINES = {
    "equation_1_cosine": "cosine of the error of dQ to what the error of delta makes of it (paper, equation 1)",
    "equation_2_cosine": "cosine of the error of dW_Q to what the error of delta makes of it (paper, equation 2)",
}
_NAMES = ("dq", "dk", "dv")


def _ulps(at: int, observed: Observed) -> Value:
    errors = observed.gradient_differences
    if errors is None:
        return None
    exact = observed.batches[0].gradients
    return ulps_of_rows(errors.each[at].rows, exact.units[at], exact.gradients[at].shape[-1])


def _delta(observed: Observed) -> Value:
    gradients, batch = observed.outputs[0].gradients, observed.batches[0]
    if gradients is None or gradients.delta is not None:
        return None
    return delta_error_of(gradients.dq, batch.inputs, batch.ref, batch.gradients.gradients[0])


def _sink(observed: Observed) -> Value:
    gradients, exact = observed.outputs[0].gradients, observed.batches[0].gradients.sink
    if gradients is None or gradients.dsink is None or exact is None:
        return None
    return float((gradients.dsink.double() - exact).norm() / exact.norm())


def _error_of(name: str, observed: Observed) -> Value:
    return observed.gradient_errors.get(name)


MEASURES = (
    *(CallMeasure(name, about, worse="more", of=partial(_error_of, name)) for name, about in _RELATIVE.items()),
    *(CallMeasure(name, about, of=partial(_error_of, name)) for name, about in _COSINES.items()),
    *(
        CallMeasure(
            f"{name}_ulps",
            f"root mean square error of d{name[1].upper()}, in ulps of the largest element of its row",
            "ulp",
            worse="more",
            of=partial(_ulps, at),
        )
        for at, name in enumerate(_NAMES)
    ),
    CallMeasure(
        "delta_bias_in_dq",
        "mean error of delta as the error of dQ shows it (paper, equation 1), relative to mean |delta|",
        worse="farther",
        of=_delta,
    ),
    CallMeasure(
        "gradients_nonfinite",
        "elements of dQ, dK, dV that are NaN or Inf, the reference's are finite",
        worse="more",
        of=lambda observed: observed.gradient_faults.get("nonfinite"),
    ),
    CallMeasure(
        "dsink_relative_error",
        "norm of the error of dSink, of a learned sink, over the norm of dSink",
        worse="more",
        of=_sink,
    ),
    # No check and no limit: most kernels add up dQ by atomics.
    CallMeasure(
        "gradients_repeated",
        "share of elements of dQ, dK, dV that a second run gives to the bit: chance where atomics add them up",
        worse="less",
        of=lambda observed: observed.equal_gradients,
    ),
    CallMeasure(
        "gradient_error_over_bound",
        "largest error of dQ, dK and dV as a share of its rounding-error bound",
        worse="more",
        of=lambda observed: observed.gradient_faults.get("over_bound"),
    ),
)
