"""Confidence intervals of shares."""

import math
from statistics import NormalDist

CONFIDENCE = 0.95


def wilson(count: int, of: int, confidence: float = CONFIDENCE) -> tuple[float, float]:
    """Wilson's score interval of a share: all rates from which the count lies no further than the confidence allows.

    It keeps its width where the count is 0 or all, and so can be read at 20 runs (Wilson, JASA 22, 1927; Newcombe,
    Statistics in Medicine 17, 1998, method 3).

    Args:
        count: how many were seen.
        of: among how many, at least 1.
        confidence: two-sided.

    Returns:
        The lowest and the highest rate, in [0, 1].

    Raises:
        ValueError: a count that is not among them.
    """
    if not 0 <= count <= of or of < 1:
        raise ValueError(f"{count} of {of} is no share")
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    middle = count + z * z / 2
    half = z * math.sqrt(count * (of - count) / of + z * z / 4)
    return max(0.0, (middle - half) / (of + z * z)), min(1.0, (middle + half) / (of + z * z))
