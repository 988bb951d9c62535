"""Bounds of short training runs, derived by one rule from what many seeds measured; their table is in docs/training.md.

A snippet states which variants drift, run away or are fixed, on which side, and which variant the statement must catch.
No number is written there: a bound is a one-sided Student prediction limit for one more run,

    mean +- t(n - 1, 1 - p) * sd * sqrt(1 + 1/n),

of n, mean and sd in `spread.csv`, with p = 1e-5 shared among the bounds of a cell (Bonferroni). Growth factors are
taken as logarithms; what can't be negative and is skewed, as its cube root, which is nearer to normal (Wilson and
Hilferty, The Distribution of Chi-Square, 1931). Several variants share the widest. A variant whose limit meets that of
what the statement must catch, from the other side, is not claimed of; nor is one with too few seeds.
"""

import csv
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from pathlib import Path
from typing import Literal, NamedTuple

from tiebreak.cases.gpt2.variants import variant_names

ALARMS = 1e-5  # of the runs of a cell may fall by chance
EMULATION = "emulation"  # the backend that bounds come from
FILE = Path(__file__).with_name("spread.csv")
LEAST = 8  # seeds of a bound: fewer say too little of what one more gives
_DIGITS = 3  # of a bound, rounded outwards


@dataclass(frozen=True)
class Scale:
    """What makes a measure about normal."""

    of: Callable[[float], float]  # the number that is
    back: Callable[[float], float]  # from that number to the measure


AS_IT_IS = Scale(float, float)
SCALES: Mapping[str, Scale] = {
    "wq_norm_growth": Scale(math.log, math.exp),
    "loss_rise": Scale(math.cbrt, lambda root: root**3),  # 0 in half of the runs whose loss only falls
}

Side = Literal["above", "below", "within"]  # within: as small as this, whichever its sign


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
        """As reports print it."""
        low = "" if self.low == -math.inf else f"{self.low:g} < "
        high = "" if self.high == math.inf else f" < {self.high:g}"
        return f"{low}{self.measure}{high}"


class Ran(NamedTuple):
    """What a distribution is of."""

    snippet: str  # its name
    version: int  # of its recipe
    backend: str  # that it ran on
    variant: str  # by full name
    measure: str  # a name of SnippetResult.measures


@dataclass(frozen=True)
class Spread:
    """A measure over the seeds of a run."""

    n: int  # seeds
    mean: float  # of the measure on its scale
    sd: float  # likewise
    lowest: float  # of the measure itself
    highest: float  # of the measure itself

    def margin(self, p: float) -> float:
        """How far from the mean one more run lies with a probability of p, to one side."""
        return student(self.n - 1, p) * self.sd * math.sqrt(1 + 1 / self.n)


@dataclass(frozen=True)
class BoundRule:
    """What is said of some variants; the numbers come from runs."""

    variants: tuple[str, ...]  # by full name
    measure: str  # a name of SnippetResult.measures
    source: str  # who says it
    side: Side  # where the measure lies
    against: str  # the variant it must catch, by full name

    @property
    def bounds(self) -> int:
        """How many: a run can fall at each."""
        return 2 if self.side == "within" else 1

    def outward(self, value: float) -> float:
        """A value, or a mean, so that more of it is further out."""
        return {"above": -value, "below": value, "within": abs(value)}[self.side]


@dataclass(frozen=True)
class Weighed:
    """A statement about one variant, with the runs it rests on."""

    statement: BoundRule
    variant: str  # by full name
    own: Spread | None  # of the variant; None: not run at two seeds
    other: Spread | None  # of what the statement must catch
    bound: float | None  # of the measure; within: to both sides; None: it does not separate

    @property
    def distance(self) -> float:
        """From the bound to the mean of what it must catch, in standard deviations of that one."""
        assert self.bound is not None
        assert self.other is not None
        bound = scale_of(self.statement.measure).of(self.bound)
        gap = self.statement.outward(self.other.mean) - self.statement.outward(bound)
        return gap / self.other.sd if self.other.sd else math.inf


def student(freedom: int, p: float) -> float:
    """Student's quantile: what is exceeded with a probability of p, under a half.

    By the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), bisected.

    Raises:
        ValueError: no degree of freedom is left.
    """
    if freedom < 1:
        raise ValueError(f"freedom = {freedom}: a spread takes two seeds or more")
    low, high = 0.0, math.pi / 2
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if _beyond(freedom, middle) > p else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _beyond(freedom: int, angle: float) -> float:
    """The probability of more than t = sqrt(freedom) tan(angle)."""
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = freedom % 2 == 1
    term = total = (cosine if freedom > 1 else 0.0) if odd else 1.0
    for k in range(2 if odd else 1, freedom - 1, 2):
        term *= cosine**2 * k / (k + 1)
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return (1 - inside) / 2


def scale_of(measure: str) -> Scale:
    """The scale on which a measure's mean and standard deviation are taken."""
    return SCALES.get(measure, AS_IT_IS)


def spread(measure: str, values: Sequence[float]) -> Spread:
    """The spread of two values or more; NaN where one of them is no number."""
    scaled = [scale_of(measure).of(value) for value in values]
    mean = math.fsum(scaled) / len(scaled)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in scaled) / (len(scaled) - 1))
    return Spread(len(values), mean, sd, min(values), max(values))


def read_spreads(path: Path = FILE) -> Mapping[Ran, Spread]:
    """What a data file has."""
    with path.open(encoding="utf-8", newline="") as file:
        next(file)
        return {
            Ran(row["snippet"], int(row["version"]), row["backend"], row["variant"], row["measure"]): Spread(
                int(row["n"]), *(float(row[field.name]) for field in fields(Spread)[1:])
            )
            for row in csv.DictReader(file)
        }


def write_spreads(spreads: Mapping[Ran, Spread], commit: str, path: Path = FILE) -> None:
    """Make a data file, a row a distribution, behind a line with the commit they were measured at."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# measured at {commit}\n")
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*Ran._fields, *(field.name for field in fields(Spread))])
        for ran, spread in sorted(spreads.items()):
            figures = (f"{value:.6g}" for value in (spread.mean, spread.sd, spread.lowest, spread.highest))
            lines.writerow([*ran, spread.n, *figures])


#: The committed runs.
SPREADS = read_spreads()


def weighed(
    snippet: str, version: int, statements: Iterable[BoundRule], spreads: Mapping[Ran, Spread] = SPREADS
) -> tuple[Weighed, ...]:
    """Every statement about every variant, with its bound if it separates."""
    rules = tuple(statements)
    shares = Counter(variant for rule in rules for variant in rule.variants for _ in range(rule.bounds))

    def spread(variant: str, measure: str) -> Spread | None:
        return spreads.get(Ran(snippet, version, EMULATION, variant, measure))

    def weigh(statement: BoundRule) -> list[Weighed]:
        measure = statement.measure
        rows = [(name, spread(name, measure), spread(statement.against, measure)) for name in statement.variants]
        edges = {
            name: edge
            for name, own, other in rows
            if own is not None and other is not None and min(own.n, other.n) >= LEAST
            for edge in [_edges(statement, own, other, ALARMS / shares[name])]
            if edge[0] < edge[1]
        }
        bound = _bound(statement, [own for own, _ in edges.values()]) if edges else math.nan
        reach = statement.outward(scale_of(measure).of(bound)) if edges else math.nan
        apart = {name for name, (_, other) in edges.items() if reach < other}
        return [Weighed(statement, name, own, other, bound if name in apart else None) for name, own, other in rows]

    return tuple(row for statement in rules for row in weigh(statement))


def _edges(statement: BoundRule, own: Spread, other: Spread, p: float) -> tuple[float, float]:
    """How far out a variant comes, and how far in what the statement must catch does."""
    return statement.outward(own.mean) + own.margin(p), statement.outward(other.mean) - other.margin(p)


def _bound(statement: BoundRule, edges: Iterable[float]) -> float:
    """The furthest of the edges, as a number of the measure with few digits."""
    furthest = statement.outward(max(edges)) if statement.side == "above" else max(edges)
    value = scale_of(statement.measure).back(furthest)
    rounding = ROUND_FLOOR if statement.side == "above" else ROUND_CEILING
    return float(Context(prec=_DIGITS, rounding=rounding).create_decimal_from_float(value))


def bounded(
    snippet: str, version: int, statements: Iterable[BoundRule], spreads: Mapping[Ran, Spread] = SPREADS
) -> tuple[SnippetClaim, ...]:
    """The claims that statements amount to: those that do not separate are left out."""
    bounds_by_rule: dict[BoundRule, dict[str, float]] = {}
    for row in weighed(snippet, version, statements, spreads):
        if row.bound is not None:
            bounds_by_rule.setdefault(row.statement, {})[row.variant] = row.bound
    return tuple(_claim(statement, bounds) for statement, bounds in bounds_by_rule.items())


def _claim(statement: BoundRule, bounds: Mapping[str, float]) -> SnippetClaim:
    (bound,) = set(bounds.values())
    low = {"above": bound, "below": -math.inf, "within": -bound}[statement.side]
    high = {"above": math.inf, "below": bound, "within": bound}[statement.side]
    return SnippetClaim(frozenset(bounds), statement.measure, statement.source, low, high)


def rule(
    side: Side, variants: str, measure: str, source: str, *, against: str, rounded: bool | None = None
) -> BoundRule:
    """A statement about variants by their short names, space-separated.

    Args:
        side: where the measure lies.
        variants: short names; with l from rounded P-bar, unrounded, or both.
        measure: a name of SnippetResult.measures.
        source: of the statement.
        against: the variant that it must catch, by full name.
        rounded: which l; None: both.
    """
    names = (name for short in variants.split() for name in variant_names(short, rounded=rounded))
    return BoundRule(tuple(names), measure, source, side, against)
