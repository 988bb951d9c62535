"""Intervals and verdicts: is a bias beyond the margin, inside it, or not yet known?"""

import enum
import math
from dataclasses import dataclass
from statistics import NormalDist

from torch import Tensor

MARGIN_ULPS = 0.05  # a bias within this of 0 is none; ties that always round one way cost 1/(2k) ulp, five times this
CONFIDENCE = 0.999  # of a cell's verdict, over all looks at its data
_STEP, MOST_HEADS = 16, 2**20  # of the numbers of heads that a run may be told to draw: more would tell nothing
LIMIT = 1.1  # ratio of mean squared errors
WORSE = 4.0  # mean squared error of one head over another's on normal numbers that no other way of rounding explains
WAYS = 4.0  # how much larger than another's the mean squared error of one sound backward pass may be, as `WORSE`
GAIN = 1e-3  # gain error of dQ, dK and dV, and relative error of delta
#: Mean squared error of a number that is rounded to nearest once, in ulps: where the plan errs by less, exact elements
#: that the last bit of a sum turns into errors of an ulp would decide.
ROUNDED_ONCE = 1 / 12
LOOKS = 4  # a cell may look at its data this often: at n, 2n, 4n and 8n heads


def batches_of(look: int) -> range:
    """Return the indices of the batches that a look draws: as many as all looks before it."""
    return range(2**look // 2, 2**look)


class BiasVerdict(enum.Enum):
    """The conclusion from the data about a bias."""

    BIASED = "biased"  # the whole interval lies beyond the margin
    UNBIASED = "unbiased"  # the whole interval lies inside the margin
    UNDECIDED = "undecided"  # neither: more heads are needed
    NONFINITE = "nonfinite"  # NaN or Inf where the reference is finite: there is no bias to speak of


@dataclass(frozen=True)
class Interval:
    """A mean with its confidence interval."""

    mean: float
    half_width: float  # NaN or Inf where there are too few samples

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half_width

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half_width

    def is_beyond(self, margin: float) -> bool:
        """Return whether the whole interval is outside [-margin, margin]; False with NaN."""
        return self.low > margin or self.high < -margin

    def is_inside(self, margin: float) -> bool:
        """Return whether the whole interval is inside [-margin, margin]; False with NaN."""
        return self.low >= -margin and self.high <= margin


Value = Interval | float | None  # of a measure; None: there is no such number here


def quantile(samples: int, confidence: float = CONFIDENCE, looks: int = LOOKS) -> float:
    """Return the two-sided Student quantile for `samples` values, the error split evenly over `looks` (Bonferroni).

    The normal quantile is widened by Cornish and Fisher's expansion (Abramowitz and Stegun, 26.7.5); at 15 degrees of
    freedom, the fewest the command line lets through, it is 0.1 % short of the true quantile at this confidence.
    """
    z = NormalDist().inv_cdf(1.0 - (1.0 - confidence) / (2.0 * looks))
    freedom = samples - 1
    if freedom < 1:
        return math.inf
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def interval(samples: Tensor, confidence: float = CONFIDENCE, looks: int = LOOKS) -> Interval:
    """Return the mean and confidence interval of independent samples (one dimension); see `quantile`."""
    count, mean = samples.numel(), samples.mean().item()  # NaN of none
    if count < 2:
        return Interval(mean, math.inf)
    return Interval(mean, quantile(count, confidence, looks) * (samples.std().item() / math.sqrt(count)))


def heads_to_tell(mean: Interval, heads: int, limit: float = MARGIN_ULPS) -> int:
    """Return about how many heads to draw at first so that all looks together tell what those so far do not.

    The half width, which has to reach the limit, fails as 1 / sqrt(heads). At least twice as many as this time.
    """
    distance = abs(abs(mean.mean) - limit)
    needed = heads / 2 ** (LOOKS - 1) * max(2.0, (mean.half_width / distance) ** 2 if distance else math.inf)
    return _STEP * math.ceil(needed / _STEP) if needed < MOST_HEADS else MOST_HEADS  # NaN is not less


def judge(bias: Interval, margin: float = MARGIN_ULPS) -> BiasVerdict:
    """Return the verdict on a bias at the interval's confidence."""
    if bias.is_beyond(margin):
        return BiasVerdict.BIASED
    return BiasVerdict.UNBIASED if bias.is_inside(margin) else BiasVerdict.UNDECIDED
