"""The errors of O against the fp64 reference, in ulps, and of delta."""

from collections.abc import Mapping
from typing import Any

from tiebreak.cases.measures import CallMeasure
from tiebreak.cases.verdicts import MARGIN_ULPS


def _of_errors(name: str, about: str, **described: Any) -> CallMeasure:
    """What `Errors` has by this name."""
    return CallMeasure(name, about, **described, of=lambda observed: getattr(observed.errors, name))


_FAULT: Mapping[str, Any] = {"worse": "more", "limit": 0.0, "per": "elements", "portable": True}

MEASURES = (
    _of_errors(
        "bias",
        "mean signed error of O; + is away from zero",
        unit="ulp",
        worse="farther",
        limit=0.02,
        margin=MARGIN_ULPS,
        column=True,
    ),
    _of_errors("rms_ulps", "root mean square error of O", unit="ulp", worse="more", column=True),
    _of_errors("max_ulps", "largest error of O", unit="ulp", worse="more", limit=1.0, share=0.1, column=True),
    _of_errors("error_over_bound", "largest error of O as a share of its plan's rounding-error bound", worse="more"),
    _of_errors("gain", "sum |O| / sum |reference|: below 1 the output shrinks", column=True),
    _of_errors(
        "delta_bias",
        "mean of delta_lp - delta_hp, relative to mean |delta_hp|; delta is rowsum(dO * O)",
        worse="farther",
        column=True,
    ),
    _of_errors("left_out", "elements of O left out of the errors: the reference is 0, or the sum has cancelled"),
    _of_errors("nonfinite", "elements of O that are NaN or Inf where the reference is finite", **_FAULT, column=True),
    _of_errors("missed", "elements of O that are finite where the reference is NaN or Inf", **_FAULT),
    _of_errors("elements", "elements of O"),
)
