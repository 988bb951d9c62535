"""Whether O lies within V: attention is a weighted mean of the values that a row sees, whatever its scores are.

A bound that follows from errors of the scores is of no use where scores are so large that their rounding can move any
weight to any key; this one does not look at them.
"""

from tiebreak.cases.measures import CallMeasure

MEASURES = (
    CallMeasure(
        "outside_values",
        "largest distance of O from the range of V, as a share of what the plan's rounding allows",
        worse="more",
        of=lambda observed: observed.errors.outside_values,
    ),
)
