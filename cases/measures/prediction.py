"""How far the output is from what the declared plan predicts on the same inputs, emulated."""

from tiebreak.cases.errors import difference
from tiebreak.cases.measures import CallMeasure

MEASURES = (
    CallMeasure(
        "predicted_bias",
        "bias of the emulation of the declared plan on the same inputs",
        "ulp",
        of=lambda observed: None if observed.predicted is None else observed.predicted.bias,
    ),
    CallMeasure(
        "rounded_bias",
        "bias of a correctly rounded O on the same heads, of a user's kernel that is biased on a failure input",
        "ulp",
        of=lambda observed: None if observed.rounded is None else observed.rounded.bias,
    ),
    CallMeasure(
        "prediction_difference",
        "bias less the predicted one, paired head by head",
        "ulp",
        worse="farther",
        of=lambda observed: None if observed.predicted is None else difference(observed.errors, observed.predicted),
    ),
    CallMeasure(
        "equal_bits",
        "share of elements of O that agree with the prediction to the bit",
        worse="less",
        of=lambda observed: observed.equal_bits,
    ),
)
