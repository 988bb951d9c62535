"""What is claimed about short training runs: bounds of their measures for some variants.

No number is written by hand. `claims.csv` has the bounds that follow from many seeds, by one rule; the study that runs
them writes it (`tests/studies/bounds.py` has the rule and what is said of whom). Their table is in docs/training.md.
"""

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("claims.csv")


@dataclass(frozen=True)
class SnippetClaim:
    """Bounds of one measure, for some variants."""

    variants: frozenset[str]  # by full name; none: whatever trains
    measure: str  # a name of SnippetResult.measures
    source: str  # who claims it
    low: float = -math.inf  # the measure must be above
    high: float = math.inf  # the measure must be below
    waives: frozenset[str] = frozenset()  # names of checks that need not be met: that they are not is what is claimed

    def held(self, measures: Mapping[str, float]) -> bool:
        """Whether the measure lies between the bounds; NaN does not."""
        return self.low < measures[self.measure] < self.high

    @property
    def text(self) -> str:
        """The claim in words, as reports print it."""
        low = "" if self.low == -math.inf else f"{self.low:g} < "
        high = "" if self.high == math.inf else f" < {self.high:g}"
        return f"{low}{self.measure}{high}"


Claims = Mapping[tuple[str, int], tuple[SnippetClaim, ...]]  # by a snippet's name and the version of its recipe


def read_claims(path: Path = FILE) -> Claims:
    """What a data file has."""
    claims: dict[tuple[str, int], tuple[SnippetClaim, ...]] = {}
    with path.open(encoding="utf-8", newline="") as file:
        next(file)  # where the spreads were measured
        for row in csv.DictReader(file):
            of, variants = (row["snippet"], int(row["version"])), frozenset(row["variants"].split())
            bounds = float(row["low"]), float(row["high"])
            claims[of] = (*claims.get(of, ()), SnippetClaim(variants, row["measure"], row["source"], *bounds))
    return claims


#: The committed ones.
FROZEN = read_claims()
