"""Errors of the gradients, and how much of them is the error of delta (paper, equations 1 and 2)."""

from functools import partial

from tiebreak.cases.gradients import delta_error_of, ulps_of_rows
from tiebreak.cases.measures import CallMeasure, Observed, Value

_NAMES = {"dq": "dQ", "dk": "dK", "dv": "dV"}
_EQUATIONS = (("equation_1", "dQ"), ("equation_2", "dW_Q"))


def _relative_error(at: int, observed: Observed) -> Value:
    errors = observed.gradient_errors
    return None if errors is None else float(errors.each[at].rows.norm() / observed.batches[0].gradients.norms[at])


def _equation(at: int, observed: Observed) -> Value:
    cosines = observed.equation_cosines
    return None if cosines is None else cosines[at]


def _ulps(at: int, observed: Observed) -> Value:
    errors, exact = observed.gradient_errors, observed.batches[0].gradients
    if errors is None:
        return None
    return ulps_of_rows(errors.each[at].rows, exact.units[at], exact.gradients[at].shape[-1])


def _delta(observed: Observed) -> Value:
    gradients, batch = observed.outputs[0].gradients, observed.batches[0]
    if gradients is None or gradients.delta is not None:
        return None
    return delta_error_of(gradients.dq, batch.inputs, batch.ref, batch.gradients.gradients[0])


def _fault(name: str, observed: Observed) -> Value:
    faults = observed.gradient_faults
    return None if faults is None else float(getattr(faults, name))


def _sink(observed: Observed) -> Value:
    gradients, exact = observed.outputs[0].gradients, observed.batches[0].gradients.sink
    if gradients is None or gradients.dsink is None or exact is None:
        return None
    return float((gradients.dsink.double() - exact).norm() / exact.norm())


MEASURES = (
    *(
        CallMeasure(
            f"{name}_relative_error",
            f"norm of the error of {gradient} over the norm of {gradient}",
            worse="more",
            of=partial(_relative_error, at),
        )
        for at, (name, gradient) in enumerate(_NAMES.items())
    ),
    *(
        CallMeasure(
            f"{equation}_cosine",
            f"cosine of the error of {gradient} to what the error of delta makes of it (paper, equation {at + 1})",
            of=partial(_equation, at),
        )
        for at, (equation, gradient) in enumerate(_EQUATIONS)
    ),
    *(
        CallMeasure(
            f"{name}_ulps",
            f"root mean square error of {gradient}, in ulps of the largest element of its row",
            "ulp",
            worse="more",
            of=partial(_ulps, at),
        )
        for at, (name, gradient) in enumerate(_NAMES.items())
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
        of=partial(_fault, "nonfinite"),
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
        of=partial(_fault, "over_bound"),
    ),
)
