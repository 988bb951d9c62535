"""Bounds of short training runs, derived by one rule from what many seeds measured; their table is in docs/training.md.

`RULES` states which variants drift, run away or are fixed in which snippet, on which side, and which variant the
statement must catch. No number is written there: a bound is a one-sided Student prediction limit for one more run,

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

from tiebreak.cases.gpt2.snippets import CLAIMS_FILE, SNIPPETS, Claims, SnippetClaim
from tiebreak.cases.gpt2.variants import variant_names

ALARMS = 1e-5  # of the runs of a cell may fall by chance
EMULATION = "emulation"  # the backend that bounds come from
SPREAD = Path(__file__).with_name("spread.csv")
LEAST = 8  # seeds of a bound: fewer say too little of what one more gives
_DIGITS = 3  # of a bound, rounded outwards

#: What makes a measure about normal, and the way back; of all others, as they are.
SCALES: Mapping[str, tuple[Callable[[float], float], Callable[[float], float]]] = {
    "wq_norm_growth": (math.log, math.exp),
    "loss_rise": (math.cbrt, lambda root: root**3),  # 0 in half of the runs whose loss only falls
}

Side = Literal["above", "below", "within"]  # within: as small as this, whichever its sign


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
        """How many bounds it has: a run can fall at each."""
        return 2 if self.side == "within" else 1

    def outward(self, value: float) -> float:
        """A value, or a mean, so that more of it is further out."""
        return {"above": -value, "below": value, "within": abs(value)}[self.side]

    def limit(self, edge: float) -> float:
        """The bound that lies this far out, as a number of the measure with few digits, rounded outwards."""
        value = self.outward(edge) if self.side == "above" else edge
        value = SCALES[self.measure][1](value) if self.measure in SCALES else value
        rounding = ROUND_FLOOR if self.side == "above" else ROUND_CEILING
        return float(Context(prec=_DIGITS, rounding=rounding).create_decimal_from_float(value))


def student(freedom: int, p: float) -> float:
    """Student's quantile: what is exceeded with a probability of p, under a half; ValueError: freedom below 1.

    By the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4), bisected.
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


def scaled(measure: str, value: float) -> float:
    """A measure on the scale on which its mean and standard deviation are taken."""
    return SCALES[measure][0](value) if measure in SCALES else value


def read_spreads(path: Path = SPREAD) -> Mapping[Ran, Spread]:
    """What a data file has."""
    with path.open(encoding="utf-8", newline="") as file:
        next(file)
        return {
            Ran(row["snippet"], int(row["version"]), row["backend"], row["variant"], row["measure"]): Spread(
                int(row["n"]), *(float(row[field.name]) for field in fields(Spread)[1:])
            )
            for row in csv.DictReader(file)
        }


def spread(measure: str, values: Sequence[float]) -> Spread:
    """The spread of two values or more; NaN where one of them is no number."""
    numbers = [scaled(measure, value) for value in values]
    mean = math.fsum(numbers) / len(numbers)
    sd = math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))
    return Spread(len(values), mean, sd, min(values), max(values))


def write_spreads(spreads: Mapping[Ran, Spread], commit: str, path: Path = SPREAD) -> None:
    """Make a data file, a row a distribution, behind a line with the commit they were measured at."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# measured at {commit}\n")
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow([*Ran._fields, *(field.name for field in fields(Spread))])
        for ran, found in sorted(spreads.items()):
            figures = (f"{value:.6g}" for value in (found.mean, found.sd, found.lowest, found.highest))
            lines.writerow([*ran, found.n, *figures])


#: The committed runs.
SPREADS = read_spreads()


def bounded(
    snippet: str, version: int, rules: Iterable[BoundRule], spreads: Mapping[Ran, Spread] = SPREADS
) -> tuple[SnippetClaim, ...]:
    """The claims that rules amount to, each about those of its variants that separate from what it must catch."""
    rules = tuple(rules)
    shares = Counter(variant for each in rules for variant in each.variants for _ in range(each.bounds))
    claims = []
    for each in rules:
        names = (*each.variants, each.against)
        of = {name: spreads.get(Ran(snippet, version, EMULATION, name, each.measure)) for name in names}
        caught = of[each.against]
        edges = {}  # by variant: how far out its runs come, and how far in those of what the rule must catch
        for name in each.variants:
            own, p = of[name], ALARMS / shares[name]
            if own is None or caught is None or min(own.n, caught.n) < LEAST:
                continue
            out, reached = each.outward(own.mean) + own.margin(p), each.outward(caught.mean) - caught.margin(p)
            if out < reached:
                edges[name] = out, reached
        if not edges:
            continue
        bound = each.limit(max(out for out, _ in edges.values()))
        place = each.outward(scaled(each.measure, bound))
        if apart := frozenset(name for name, (_, reached) in edges.items() if place < reached):
            low = {"above": bound, "below": -math.inf, "within": -bound}[each.side]
            high = math.inf if each.side == "above" else bound
            claims.append(SnippetClaim(apart, each.measure, each.source, low, high))
    return tuple(claims)


def rule(
    side: Side, variants: str, measure: str, source: str, *, against: str, rounded: bool | None = None
) -> BoundRule:
    """A rule about variants by their short names, space-separated; `rounded` is as `variant_names` takes it."""
    names = (name for short in variants.split() for name in variant_names(short, rounded=rounded))
    return BoundRule(tuple(names), measure, source, side, against)


# What the paper says is stable. With l from unrounded P-bar it is not always: see docs/training.md.
_FIXED = "stabilized o_fp32 standard"
_SECTION_3_2 = "standard_in_layer_2 delta_from_dp o_recomputed o_fp32_in_worst_head"  # said to be stable, beside _FIXED
_MITIGATED = "flash_qk_norm flash_qk_clip flash_gated"
_PAPER = "arXiv 2510.04212, section 3; margins of this suite"
_SUITE = "this suite"
_ERROR, _GROWTH, _RISE = "delta_error_mean", "wq_norm_growth", "row_max_rise"
# What statements must catch.
_FLASH, _FAIR = "flash@train_l_rounded", "fair@train_l_rounded"
_FLASH_UNROUNDED, _FAIR_UNROUNDED, _FUSED = "flash@train", "fair@train", "flash_fused@train"
_BASE_2, _CONTRACTED = "flash_base_2@train", "flash_contracted@train"
#: What is said of a snippet's runs, by its name.
RULES: Mapping[str, tuple[BoundRule, ...]] = {
    "train_drift": (
        rule("above", "flash", _ERROR, _PAPER, against=_FAIR_UNROUNDED),
        rule("within", _FIXED, _ERROR, _PAPER, against=_FLASH, rounded=True),
        # Its O errs as flash's does.
        rule("above", "standard", "output_delta_error_mean", _SUITE, against="o_fp32@train_l_rounded"),
        # Beyond the paper.
        rule("above", "flash_fused", _ERROR, _SUITE, against=_FAIR_UNROUNDED),
        rule("above", "dithered_fused", _ERROR, _SUITE, against=_FAIR_UNROUNDED, rounded=True),
        rule("below", "stabilized stabilized_fused", _ERROR, _SUITE, against=_FAIR_UNROUNDED, rounded=False),
        rule("within", "dithered dithered_fused", _ERROR, _SUITE, against=_FLASH, rounded=False),
        rule("within", "dithered stochastic_fused", _ERROR, _SUITE, against=_FLASH, rounded=True),
        rule("within", "fair", _ERROR, _SUITE, against=_FUSED),
        # What acts on logits and sinks leaves the rounding as it is.
        rule("above", _MITIGATED, _ERROR, _SUITE, against=_FAIR_UNROUNDED),
    ),
    "train_runaway": (
        rule("above", "flash", _GROWTH, _PAPER, against=_FAIR),
        rule("below", _FIXED, _GROWTH, _PAPER, against=_FLASH, rounded=True),
        rule("above", "flash_fused", _GROWTH, _SUITE, against=_FAIR),
        rule("above", "dithered_fused", _GROWTH, _SUITE, against=_FAIR, rounded=True),
        rule("below", "dithered_fused", _GROWTH, _SUITE, against=_FUSED, rounded=False),
        rule("below", "dithered", _GROWTH, _SUITE, against=_FLASH),
        rule("below", "stochastic_fused fair", _GROWTH, _SUITE, against=_FUSED),
        rule("above", "flash_in_layer_2", _GROWTH, _PAPER, against=_FAIR),
        rule("above", "flash_tiled", _GROWTH, _PAPER, against=_FAIR),
        rule("below", _SECTION_3_2, _GROWTH, _PAPER, against=_FLASH),
        # The paper says that it is stable: see docs/training.md.
        rule("above", "pv_fp32", _GROWTH, _SUITE, against=_FAIR),
        # QK-norm's gains grow instead of W_Q; QK-clip caps the logits and W_Q grows; the gate shuts the head.
        rule("above", "flash_qk_norm", _RISE, _SUITE, against=_FAIR),
        rule("above", "flash_qk_clip", _GROWTH, _SUITE, against=_FAIR),
        rule("below", "flash_qk_clip", _RISE, _SUITE, against=_FLASH),
        rule("below", "flash_gated", _GROWTH, _SUITE, against=_FLASH),
    ),
    "train_lm": (
        rule("above", "flash", _RISE, _PAPER, against=_FAIR),
        rule("below", _FIXED, _RISE, _PAPER, against=_FLASH, rounded=True),
        rule("below", "dithered stochastic_fused fair", _RISE, _SUITE, against=_FLASH),
    ),
    "train_amplified": (
        rule("above", "flash", "loss_rise", _PAPER, against=_FAIR, rounded=True),
        rule("below", _FIXED, "loss_rise", _PAPER, against=_FLASH, rounded=True),
        rule("below", "dithered stochastic_fused fair", "loss_rise", _SUITE, against=_FLASH, rounded=True),
    ),
    "train_gap_11": (
        rule("above", "flash", _ERROR, _SUITE, against=_FAIR_UNROUNDED, rounded=False),
        rule("below", "stabilized", _ERROR, _SUITE, against=_FAIR_UNROUNDED, rounded=False),
        rule("within", "fair", _ERROR, _SUITE, against=_FLASH_UNROUNDED),
    ),
    "train_one_sink": (
        rule("below", "flash stabilized", _ERROR, _SUITE, against=_FAIR),
        rule("within", "fair", _ERROR, _SUITE, against=_FLASH, rounded=True),
    ),
    "train_no_tail": (
        rule("above", "flash_contracted", _ERROR, _SUITE, against=_BASE_2, rounded=False),
        rule("within", "flash_base_2", _ERROR, _SUITE, against=_CONTRACTED),
        # l sums what the cast has made 1 again.
        rule("within", "flash_contracted", _ERROR, _SUITE, against=_CONTRACTED, rounded=True),
    ),
}


def claims(spreads: Mapping[Ran, Spread]) -> Claims:
    """The claims about every snippet, of its recipe as it is now."""
    return {
        (name, SNIPPETS[name].version): bounded(name, SNIPPETS[name].version, rules, spreads)
        for name, rules in RULES.items()
    }


def write_claims(claims: Claims, commit: str, path: Path = CLAIMS_FILE) -> None:
    """Make a data file, a row a claim, behind a line with the commit at which the spreads were measured."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"# of spreads measured at {commit}\n")
        lines = csv.writer(file, lineterminator="\n")
        lines.writerow(("snippet", "version", "variants", "measure", "source", "low", "high"))
        for of, each in claims.items():
            lines.writerows(
                [*of, " ".join(sorted(one.variants)), one.measure, one.source, one.low, one.high] for one in each
            )
