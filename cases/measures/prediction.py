"""How far the output is from what the declared plan predicts on the same inputs, emulated."""

from tiebreak.cases.errors import difference
from tiebreak.cases.measures import CallMeasure, Measure

MEASURES = (
    CallMeasure(
        Measure("predicted_bias", "bias of the emulation of the declared plan on the same inputs", "ulp"),
        lambda seen: None if seen.predicted is None else seen.predicted.bias,
    ),
    CallMeasure(
        Measure("prediction_difference", "bias less the predicted one, paired head by head", "ulp", worse="farther"),
        lambda seen: None if seen.predicted is None else difference(seen.errors, seen.predicted),
    ),
    CallMeasure(
        Measure("equal_bits", "share of elements of O that agree with the prediction to the bit", worse="less"),
        lambda seen: seen.equal_bits,
    ),
)
