"""Claims: what a case says will happen to a kernel that declares a certain shift rule and plan.

Those about the suite's own cases are in `claims.csv`. A claim is made only where its source makes one: the paper (arXiv
2510.04212, v1 and v2), its published code, the commentary on it (kexue.fm, archive 11371), or this suite's own
measurements (docs/science.md). Everything else is measured, held to its plan's error bound and, on a device, to the
emulation's prediction.
"""

import csv
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tiebreak.cases.errors import Errors, difference
from tiebreak.cases.verdicts import MARGIN_ULPS, BiasVerdict, Interval, judge
from tiebreak.kernels.flash import BLOCK
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Declaration


def bias_text(measures: Errors) -> str:
    """Return the bias in words, or the count of NaN and Inf instead."""
    if measures.nonfinite:
        return f"{measures.nonfinite} elements NaN or Inf"
    return f"bias {measures.bias.mean:+.3f} +- {measures.bias.half_width:.3f} ulp"


_ACCURACY = frozenset({"bound", "range", "gradients"})  # checks that errors keep within what rounding allows
_FINITE = frozenset({"finite"})


@dataclass(frozen=True)
class Expectation:
    """A statement that can be expected to be true of a cell's measures."""

    name: str  # how reports call it
    passed: Callable[[Errors], bool | None]  # True, False, or None while the data do not decide it yet
    waives: frozenset[str] = frozenset()  # names of checks that need not pass: that they fail is what is expected
    text: Callable[[Errors], str] = bias_text  # the measured number, in words


def _has_verdict(
    verdict: BiasVerdict, sign: int = 0, of: Callable[[Errors], Interval] = lambda measures: measures.bias
) -> Callable[[Errors], bool | None]:
    """Expect that a mean, of the signed errors or of another measure, gets this verdict and has this sign."""

    def passed(measures: Errors) -> bool | None:
        estimate = of(measures)
        if measures.nonfinite or math.isnan(estimate.mean):  # NaN: nothing could be compared
            return False
        judgement = judge(estimate)
        if judgement is BiasVerdict.UNDECIDED:
            return None
        return judgement is verdict and (sign == 0 or estimate.mean * sign > 0)

    return passed


def _rows_err(name: str, verdict: BiasVerdict) -> Expectation:
    """Expect a verdict on row coherence by a bias' margin: the common part of a row's errors is a bias of that row."""

    def text(measures: Errors) -> str:
        excess = measures.coherence_excess
        return f"row coherence {excess.mean:+.3f} +- {excess.half_width:.3f} ulp from that of independent errors"

    return Expectation(name, _has_verdict(verdict, of=lambda measures: measures.coherence_excess), text=text)


UNBIASED = Expectation("unbiased", _has_verdict(BiasVerdict.UNBIASED))
BIASED = Expectation("biased", _has_verdict(BiasVerdict.BIASED))
BIASED_AWAY = Expectation("biased away from zero", _has_verdict(BiasVerdict.BIASED, +1))
BIASED_TOWARD = Expectation("biased toward zero", _has_verdict(BiasVerdict.BIASED, -1))
ROWS_ERR_TOGETHER = _rows_err("the errors of a row agree in sign", BiasVerdict.BIASED)
ROWS_ERR_APART = _rows_err("the errors of a row are independent", BiasVerdict.UNBIASED)
ACCURATE = Expectation("accurate", lambda measures: measures.nonfinite == 0)
# Harm that a rule does: such a cell is held to nothing else.
BREAKS_DOWN = Expectation(
    "NaN or Inf where the reference is finite", lambda measures: measures.nonfinite > 0, _ACCURACY | _FINITE
)
INACCURATE_OR_BREAKS_DOWN = Expectation(
    "beyond the plan's error bound, NaN or Inf",
    lambda measures: measures.nonfinite > 0 or measures.error_over_bound > 1.0,
    _ACCURACY | _FINITE,
)
FLUSHED_OR_ACCURATE = Expectation(
    "accurate, or subnormals flushed to zero",
    lambda measures: measures.error_over_bound <= 1.0 or measures.output_size == 0.0,
    _ACCURACY,
)


def _inaccurate(name: str, how: Callable[[Errors], bool]) -> Expectation:
    """Expect an error of a certain size, without a NaN."""
    return Expectation(name, lambda measures: measures.nonfinite == 0 and how(measures), _ACCURACY)


INACCURATE = _inaccurate("beyond the plan's error bound", lambda measures: measures.error_over_bound > 1.0)
OUTSIDE = _inaccurate("some of O outside the range of V", lambda measures: measures.outside_values > 1.0)


def shrinks(low: float, high: float) -> Expectation:
    """Expect that the output keeps only a share of its size, between `low` and `high`, without a NaN."""
    return _inaccurate(f"output shrinks to {low:g} .. {high:g}", lambda measures: low <= measures.gain <= high)


def within(times: float) -> Expectation:
    """Expect that the error is at most `times` the plan's rounding-error bound, without a NaN."""
    name = f"within {times:g} times the plan's error bound"
    return _inaccurate(name, lambda measures: measures.error_over_bound <= times)


def breaks_down_in(most: float) -> Expectation:
    """Expect NaN or Inf in some of the output, but in at most a share `most`; none decides nothing yet."""
    return Expectation(
        f"NaN or Inf in at most {most:.0%} of the output",
        lambda measures: measures.nonfinite <= most * measures.elements if measures.nonfinite else None,
        _FINITE,
    )


@dataclass(frozen=True)
class Claim:
    """An expectation, and the kernels that it is about."""

    expectation: Expectation
    rules: frozenset[str]  # shift rules it is about; empty: all
    plans: frozenset[str]  # plans it is about, by name; empty: all
    formats: frozenset[str]  # formats it is about, by name
    source: str  # author and place of the claim
    tiled: bool | None = None  # whether of kernels whose tiles cut the scripted rows alone, of the others alone, or all

    def concerns(self, declaration: Declaration | None, fmt: Format) -> bool:
        """Return whether it is about a kernel of this declaration, None if it declares nothing, in this format."""
        if fmt.name not in self.formats:
            return False
        if declaration is None:
            return not self.rules and not self.plans and self.tiled is None
        if self.tiled is not None and self.tiled != (declaration.block.keys < BLOCK.keys):
            return False
        return (not self.rules or declaration.claimed_as in self.rules) and (
            not self.plans or declaration.plan.name in self.plans
        )


def claim(
    expectation: Expectation,
    source: str,
    rules: str = "",
    plans: str = "",
    formats: str = "bf16",
    *,
    tiled: bool | None = None,
) -> Claim:
    """Return a claim about the shift rules, plans and formats named, space-separated; about all where none are named.

    The default format is bf16, which the papers are about. In fp16 some claims differ (docs/science.md).
    """
    about, at, among = (frozenset(words.split()) for words in (rules, plans, formats))
    return Claim(expectation, about, at, among, source, tiled)


_NAMED = {
    each.name: each
    for each in (
        *(UNBIASED, BIASED, BIASED_AWAY, BIASED_TOWARD, ROWS_ERR_TOGETHER, ROWS_ERR_APART),
        *(ACCURATE, FLUSHED_OR_ACCURATE, INACCURATE, INACCURATE_OR_BREAKS_DOWN, BREAKS_DOWN, OUTSIDE),
    )
}
_WITH_NUMBERS: Mapping[str, Callable[..., Expectation]] = {
    r"output shrinks to (.+) \.\. (.+)": shrinks,
    r"within (.+) times the plan's error bound": within,
    r"NaN or Inf in at most (.+)% of the output": lambda percent: breaks_down_in(percent / 100),
}


def expectation(name: str) -> Expectation:
    """Return the expectation of this name, numbers in it included; KeyError: there is none."""
    for pattern, made in _WITH_NUMBERS.items():
        if match := re.fullmatch(pattern, name):
            return made(*map(float, match.groups()))
    return _NAMED[name]


@cache
def written_claims() -> tuple[tuple[tuple[str, ...], Claim], ...]:
    """Return the claims of `claims.csv`, each after the names of its cases; one may end in `*`.

    A line that begins with # describes those after it. Rules, plans, formats and cases are separated by spaces; no rule
    or plan means all. `tiled` is yes or no, as `Claim.tiled`; empty: all kernels.
    """
    with Path(__file__).with_name("claims.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    tiled = {"": None, "yes": True, "no": False}
    claims = []
    for row in rows:
        about = (row[column] for column in ("source", "rules", "plans", "formats"))
        made = claim(expectation(row["expectation"]), *about, tiled=tiled[row["tiled"]])
        claims.append((tuple(row["cases"].split()), made))
    return tuple(claims)


def claims_about(case: str) -> tuple[Claim, ...]:
    """Return the claims of `claims.csv` about a case, by its name: the first that concerns a kernel applies to it."""
    return tuple(
        claim
        for names, claim in written_claims()
        if any(case.startswith(name[:-1]) if name.endswith("*") else case == name for name in names)
    )


def predicted(difference: Interval) -> bool | None:
    """Return whether a bias is as the emulation predicts: their paired difference is within the margin, or None."""
    verdict = judge(difference, MARGIN_ULPS)
    return None if verdict is BiasVerdict.UNDECIDED else verdict is BiasVerdict.UNBIASED


def comes_of_ties(bias: Interval, rounded: Interval) -> bool:
    """Return whether a bias is there because O itself ties, so that every deterministic cast of O has it.

    A correctly rounded O on the same heads, of bias `rounded`, then errs to the same side, by as much up to the margin.
    """
    same_side = bias.mean * rounded.mean > 0
    return judge(rounded) is BiasVerdict.BIASED and same_side and abs(bias.mean) - abs(rounded.mean) <= MARGIN_ULPS


def no_worse(ours: Errors, theirs: Errors) -> bool | None:
    """Return whether one output is no more biased than another on the same heads, beyond the margin, or None."""
    if ours.nonfinite > theirs.nonfinite:
        return False
    verdict, apart = judge(ours.bias), difference(ours, theirs)
    if verdict is BiasVerdict.UNBIASED or apart.is_inside(MARGIN_ULPS):
        return True
    if verdict is not BiasVerdict.BIASED or not apart.is_beyond(MARGIN_ULPS):
        return None
    return abs(ours.bias.mean) < abs(theirs.bias.mean)
