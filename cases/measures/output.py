"""What else is measured of O: against a prediction and the range of V, and what the errors of a row have in common.

Attention is a weighted mean of the values that a row sees, whatever its scores are. A bound that follows from errors of
the scores is of no use where scores are so large that their rounding can move any weight to any key; the range of V
does not look at them.
"""

from tiebreak.cases.errors import coherence, difference, independent_coherence
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
    CallMeasure(
        "outside_values",
        "largest distance of O from the range of V, as a share of what the plan's rounding allows",
        worse="more",
        of=lambda observed: observed.errors.outside_values,
    ),
    CallMeasure(
        "row_coherence",
        "mean over rows of the absolute mean signed error of a row: what delta, a sum over it, feels",
        "ulp",
        worse="more",
        of=lambda observed: coherence(observed.row_errors).nanmean().item(),
    ),
    CallMeasure(
        "row_coherence_independent",
        "what row_coherence would be if a row's errors, of that size, were independent",
        "ulp",
        of=lambda observed: independent_coherence(observed.row_errors).nanmean().item(),
    ),
)
