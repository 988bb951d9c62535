"""Errors of the gradients, and how much of them is the error of delta (paper, equations 1 and 2)."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tiebreak.cases.gradients import GradientErrors, delta_errors_of, ulps_of_rows
from tiebreak.cases.measures import CallMeasure, Observed, Value
from tiebreak.cases.verdicts import Interval, interval

_NAMES = (("dq", "dQ"), ("dk", "dK"), ("dv", "dV"))


def _measure(
    name: str, about: str, of: Callable[[Observed, GradientErrors], Value], unit: str = "", **described: Any
) -> CallMeasure:
    """A measure of the errors of gradients; None where there are none."""

    def measured(observed: Observed) -> Value:
        return None if observed.gradient_errors is None else of(observed, observed.gradient_errors)

    return CallMeasure(name, about, unit, **described, of=measured)


def _relative_error(observed: Observed, errors: GradientErrors, at: int) -> Value:
    return float(errors.each[at].rows.norm() / observed.batches[0].gradients.norms[at])


def _equation(observed: Observed, _: GradientErrors, at: int) -> Value:
    return None if observed.equation_cosines is None else observed.equation_cosines[at]


def _ulps(observed: Observed, errors: GradientErrors, at: int) -> Value:
    exact = observed.batches[0].gradients
    return ulps_of_rows(errors.each[at].rows, exact.units[at], exact.gradients[at].shape[-1])


def _delta(observed: Observed, _: GradientErrors) -> Value:
    gradients, batch = observed.outputs[0].gradients, observed.batches[0]
    if gradients is None or gradients.delta is not None:
        return None
    first = delta_errors_of(gradients.dq, batch.inputs, batch.ref, batch.gradients.gradients[0])
    samples = torch.cat([first, *(more.delta for more in observed.more_gradients)])
    return interval(samples) if samples.isfinite().all() else Interval(torch.nan, torch.inf)


def _sink(observed: Observed, _: GradientErrors) -> Value:
    gradients, exact = observed.outputs[0].gradients, observed.batches[0].gradients.sink
    if gradients is None or gradients.dsink is None or exact is None:
        return None
    return float((gradients.dsink.double() - exact).norm() / exact.norm())


MEASURES = (
    *(
        _measure(
            f"{name}_relative_error",
            f"norm of the error of {gradient} over the norm of {gradient}",
            partial(_relative_error, at=at),
            worse="more",
        )
        for at, (name, gradient) in enumerate(_NAMES)
    ),
    *(
        _measure(
            f"equation_{at + 1}_cosine",
            f"cosine of the error of {gradient} to what the error of delta makes of it (paper, equation {at + 1})",
            partial(_equation, at=at),
        )
        for at, gradient in enumerate(("dQ", "dW_Q"))
    ),
    *(
        _measure(
            f"{name}_ulps",
            f"root mean square error of {gradient}, in ulps of the largest element of its row",
            partial(_ulps, at=at),
            "ulp",
            worse="more",
        )
        for at, (name, gradient) in enumerate(_NAMES)
    ),
    _measure(
        "delta_bias_in_dq",
        "mean error of delta as the error of dQ shows it (paper, equation 1), relative to mean |delta|",
        _delta,
        worse="farther",
    ),
    _measure(
        "gradients_nonfinite",
        "elements of dQ, dK, dV that are NaN or Inf, the reference's are finite",
        lambda _, errors: float(errors.faults.nonfinite),
        worse="more",
    ),
    _measure(
        "dsink_relative_error",
        "norm of the error of dSink, of a learned sink, over the norm of dSink",
        _sink,
        worse="more",
    ),
    # No check and no limit: most kernels add up dQ by atomics.
    CallMeasure(
        "gradients_repeated",
        "share of elements of dQ, dK, dV that a second run gives to the bit: chance where atomics add them up",
        worse="less",
        of=lambda observed: observed.equal_gradients,
    ),
    _measure(
        "gradient_error_over_bound",
        "largest error of dQ, dK and dV as a share of its rounding-error bound",
        lambda _, errors: errors.faults.over_bound,
        worse="more",
    ),
)
