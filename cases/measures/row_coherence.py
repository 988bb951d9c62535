"""How far the errors of a row agree in sign: what delta, a sum over the row, feels even where heads average out."""

import math

from tiebreak.cases.measures import CallMeasure, Measure, Observed


def row_coherence(seen: Observed) -> float:
    """Mean over rows of the absolute mean signed error of a row, in ulps."""
    return seen.row_errors.nanmean(-1).abs().nanmean().item()


def independent(seen: Observed) -> float:
    """What the same would be if the errors of a row, of the size they have, were independent of each other, in ulps.

    The mean of n independent errors is about normal, of standard deviation rms / sqrt(n), and the mean of the absolute
    value of a normal number is sqrt(2/pi) of its standard deviation.
    """
    error = seen.row_errors
    counted = (~error.isnan()).sum(-1)
    size = error.square().nanmean(-1).sqrt()
    return (math.sqrt(2 / math.pi) * size / counted.sqrt()).nanmean().item()


MEASURES = (
    CallMeasure(
        Measure("row_coherence", "mean over rows of the absolute mean signed error of a row", "ulp", worse="more"),
        row_coherence,
    ),
    CallMeasure(
        Measure("row_coherence_independent", "the same if a row's errors, of that size, were independent", "ulp"),
        independent,
    ),
)
