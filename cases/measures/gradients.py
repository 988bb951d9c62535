"""Errors of the gradients, and how much of them is the error of delta (paper, equations 1 and 2)."""

from functools import partial

from tiebreak.cases.measures import CallMeasure, Measure, Observed, Value

_ABOUT = {
    "dq_relative_error": "norm of the error of dQ over the norm of dQ",
    "dk_relative_error": "norm of the error of dK over the norm of dK",
    "dv_relative_error": "norm of the error of dV over the norm of dV",
    "equation_1_cosine": "cosine of the error of dQ to what the error of delta makes of it (paper, equation 1)",
    "equation_2_cosine": "cosine of the error of dW_Q to what the error of delta makes of it (paper, equation 2)",
}


def _one(name: str, seen: Observed) -> Value:
    return seen.gradient_errors.get(name)


MEASURES = tuple(
    CallMeasure(Measure(name, about, worse="more" if name.endswith("error") else None), partial(_one, name))
    for name, about in _ABOUT.items()
)
