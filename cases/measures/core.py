"""The errors of O against the fp64 reference, in ulps, and of delta."""

from tiebreak.cases.measures import CallMeasure, Measure

MEASURES = (
    CallMeasure(
        Measure(
            "bias",
            "mean signed error of O; + is away from zero",
            "ulp",
            worse="farther",
            limit=0.02,
            column=True,
            term="systematic rounding error",
        ),
        lambda observed: observed.errors.bias,
    ),
    CallMeasure(
        Measure("rms_ulps", "root mean square error of O", "ulp", worse="more", column=True, term="RMS error"),
        lambda observed: observed.errors.rms_ulps,
    ),
    CallMeasure(
        Measure(
            "max_ulps",
            "largest error of O",
            "ulp",
            worse="more",
            limit=1.0,
            share=0.1,
            column=True,
            term="maximum ulp error",
        ),
        lambda observed: observed.errors.max_ulps,
    ),
    CallMeasure(
        Measure(
            "error_over_bound",
            "largest error of O as a share of its plan's rounding-error bound",
            worse="more",
            term="forward error bound",
        ),
        lambda observed: observed.errors.error_over_bound,
    ),
    CallMeasure(
        Measure("gain", "sum |O| / sum |reference|: below 1 the output shrinks", column=True),
        lambda observed: observed.errors.gain,
    ),
    CallMeasure(
        Measure(
            "delta_bias",
            "mean of delta_lp - delta_hp, relative to mean |delta_hp|; delta is rowsum(dO * O)",
            worse="farther",
            column=True,
        ),
        lambda observed: observed.errors.delta_bias,
    ),
    CallMeasure(
        Measure("left_out", "elements of O left out of the errors: the reference is 0, or the sum has cancelled"),
        lambda observed: observed.errors.left_out,
    ),
    CallMeasure(
        Measure(
            "nonfinite",
            "elements of O that are NaN or Inf where the reference is finite",
            worse="more",
            limit=0.0,
            per="elements",
            portable=True,
            column=True,
        ),
        lambda observed: observed.errors.nonfinite,
    ),
    CallMeasure(
        Measure(
            "missed",
            "elements of O that are finite where the reference is NaN or Inf",
            worse="more",
            limit=0.0,
            per="elements",
            portable=True,
            term="lost NaN",
        ),
        lambda observed: observed.errors.missed,
    ),
    CallMeasure(Measure("elements", "elements of O"), lambda observed: observed.errors.elements),
)
