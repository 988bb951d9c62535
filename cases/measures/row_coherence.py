"""How far the errors of a row agree in sign: what delta, a sum over the row, feels even where heads average out."""

from tiebreak.cases.errors import coherence, independent_coherence
from tiebreak.cases.measures import CallMeasure

MEASURES = (
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
