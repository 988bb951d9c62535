"""Which known plan an undeclared kernel follows, over all of its cells, by the share of equal bits."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiebreak.cases.verdicts import MARGIN_ULPS
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import ONE_TILE
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix.attribution import drawn
from tiebreak.matrix.candidates import nameless
from tiebreak.reports.records.record import FitRecord, Record

FOLLOWED = 0.98  # share of equal bits, in every cell, from which on a plan is followed
EQUAL = 1e-3  # difference of shares, in every cell, up to which plans are not told apart
_RANDOM = 0.9  # a kernel of which no plan has more bits may have random bits of its own


@dataclass(frozen=True)
class Standing:
    """What one plan has in common with a kernel, over its cells."""

    plan: str  # as --plan takes it
    bits: Mapping[str, float]  # by case, the share of elements of O that agree to the bit
    behaves: bool  # whether its bias is the kernel's in every cell
    distance: float  # mean |difference of bias| in ulps

    @property
    def mean(self) -> float:
        """Of all cells; each counts alike."""
        return sum(self.bits.values()) / len(self.bits)

    @property
    def followed(self) -> bool:
        """Whether enough bits agree in every cell."""
        return min(self.bits.values()) >= FOLLOWED


@dataclass(frozen=True)
class Explanation:
    """The plan that explains a kernel best."""

    backend: str
    kernel: str
    best: Standing
    equals: tuple[str, ...] = ()  # plans that can't be told from it on these cases, itself first
    random: bool = False  # whether it agrees with the kernel in bias alone, the random bits of O being its own

    @property
    def explained(self) -> bool:
        """Whether a plan is followed, or behaved like."""
        return self.best.followed or self.random

    @property
    def text(self) -> str:
        """One line for the report."""
        shares, count = self.best.bits, len(self.best.bits)
        cells = f"{count} cell{'' if count == 1 else 's'}"
        if self.random:
            return f"behaves like {' or '.join(self.equals)} in {cells} (its random bits are its own)"
        if self.best.followed:
            agreed = f"({_percent(self.best.mean)} of bits in {cells})"
            if len(self.equals) > 1:
                return f"can't tell apart: {', '.join(self.equals)} on these cases {agreed}"
            return f"follows {self.best.plan} {agreed}"
        nearest = f"nearest is {self.best.plan} with {_percent(self.best.mean)} of bits in {cells}"
        worst = sorted((case for case, share in shares.items() if share < FOLLOWED), key=lambda case: shares[case])
        told = ", ".join(f"{case} {_percent(shares[case])}" for case in worst[:3])
        return f"unexplained: no known plan agrees; {nearest} ({told}{', ...' if len(worst) > 3 else ''})"


def explain(found: Sequence[Record]) -> list[Explanation]:
    """The best plan of every kernel whose records carry fits: the one with the most equal bits.

    A plan is followed where 98 % of the elements of O agree with its emulation to the bit in every cell. What a plan
    leaves open costs less: with PyTorch's SDPA, Hugging Face's and x-transformers' eager attention, FlexAttention and
    a loop like flash attention 1, all on a CPU, fp32's order of summation and the exponential's last bit flip 0.02 %
    of the elements and up to 0.2 % of a cell's, but for `equal_keys`, where O itself is often a tie, with 1.7 %. And
    the 2 % that may differ, each by an ulp, move the bias by 0.02 ulp at most, less than half the margin of a verdict.

    By the same measure two plans are not told apart whose shares differ by no more than 0.1 % in any cell. Where tiles
    or the exponential's base are all that they differ in, the plainest of them speaks for all: the base alone moves two
    elements in a million.
    """
    kernels: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        if _fits(record):
            kernels.setdefault((record.backend, record.kernel), []).append(record)
    return [_best(records) for records in kernels.values()]


def _fits(record: Record) -> Mapping[str, FitRecord]:
    fits: Mapping[str, FitRecord] = record.evidence.get("fits", {})
    return fits


def _best(found: Sequence[Record]) -> Explanation:
    plans = [plan for plan in _fits(found[0]) if all(plan in _fits(record) for record in found)]
    standings = [_standing(plan, found) for plan in plans]
    best = max(standings, key=lambda one: (one.followed, one.mean))
    explanation = Explanation(found[0].backend, found[0].kernel, best)
    if best.followed:
        equal = _families(one for one in standings if _equal(one, best))
        return replace(explanation, best=equal[0], equals=tuple(one.plan for one in equal))
    alike = [one for one in standings if one.behaves and drawn(parse_declaration(one.plan))]
    if best.mean <= _RANDOM and alike:
        nearest = _families(sorted(alike, key=lambda one: one.distance))
        return replace(explanation, best=nearest[0], equals=tuple(one.plan for one in nearest), random=True)
    return explanation


def _equal(one: Standing, best: Standing) -> bool:
    return one.followed and all(abs(share - one.bits[case]) <= EQUAL for case, share in best.bits.items())


def _families(standings: Iterable[Standing]) -> list[Standing]:
    """The first of each family: candidates come with the plainest first."""
    first: dict[Declaration, Standing] = {}
    for one in standings:
        first.setdefault(_family(one.plan), one)
    return list(first.values())


def _family(plan: str) -> Declaration:
    """What tiles, or the exponential's base, alone tell apart: in one tile a shift has nothing to lag behind."""
    found = nameless(parse_declaration(plan))
    exponential, rule = replace(found.plan.exponential, base_two=False), replace(found.shift_rule, lag=0.0)
    return replace(found, plan=replace(found.plan, exponential=exponential), shift_rule=rule, block=ONE_TILE)


def _standing(plan: str, found: Sequence[Record]) -> Standing:
    fits = [_fits(record)[plan] for record in found]
    distances = [math.inf if fit.mean is None else abs(fit.mean) for fit in fits]
    return Standing(
        plan,
        {record.case: _fits(record)[plan].bits or 0.0 for record in found},
        behaves=all(_behaves(fit) for fit in fits),
        distance=sum(distances) / len(distances),
    )


def _behaves(fit: FitRecord) -> bool:
    """Whether the difference of bias lies within the margin, as far as the heads of one batch tell.

    Two random streams leave it open by 0.04 ulp at 256 heads; a plan of another bias is 0.2 ulp away.
    """
    if fit.mean is None or fit.half_width is None:
        return False
    return abs(fit.mean) <= MARGIN_ULPS and fit.half_width <= 2 * MARGIN_ULPS


def _percent(share: float) -> str:
    """Rounded down: 100 % is all of them."""
    return f"{math.floor(round(1e4 * share, 6)) / 100:.2f} %"
