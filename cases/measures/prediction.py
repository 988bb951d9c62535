"""How far the output is from what the declared plan predicts on the same inputs, emulated."""

from tiebreak.cases.errors import difference
from tiebreak.cases.measures import CallMeasure, Measure

MEASURES = (
    CallMeasure(
        Measure("predicted_bias", "bias of the emulation of the declared plan on the same inputs", "ulp"),
        lambda observed: None if observed.predicted is None else observed.predicted.bias,
    ),
    CallMeasure(
        Measure(
            "prediction_difference",
            "bias less the predicted one, paired head by head",
            "ulp",
            worse="farther",
            term="paired difference",
        ),
        lambda observed: None if observed.predicted is None else difference(observed.errors, observed.predicted),
    ),
    CallMeasure(
        Measure(
            "equal_bits",
            "share of elements of O that agree with the prediction to the bit",
            worse="less",
            term="bitwise agreement",
        ),
        lambda observed: observed.equal_bits,
    ),
)
