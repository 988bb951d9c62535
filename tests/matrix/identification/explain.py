"""Which known plan an undeclared kernel follows, over all of its cells, by the share of equal bits."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tiebreak.cases.verdicts import MARGIN_ULPS
from tiebreak.kernels.algorithms import FLASH_ATTENTION, SPLIT_ATTENTION, STANDARD_ATTENTION
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.flash import ONE_TILE
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.kernel import Declaration, is_random, nameless
from tiebreak.kernels.plans import Accumulator, Cast, Steps
from tiebreak.matrix.identification.settling import RANDOM
from tiebreak.matrix.workbench import EQUAL
from tiebreak.reports.records import record as records
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Explanation, FitRecord, Record


@dataclass(frozen=True)
class Standing:
    """The agreement of one plan with a kernel, over its cells."""

    plan: str  # as --plan takes it
    fits: Mapping[str, FitRecord]  # by case

    @cached_property
    def bits(self) -> Mapping[str, float]:
        """The least share of equal bits."""
        return {case: fit.bits or 0.0 for case, fit in self.fits.items()}

    @property
    def mean(self) -> float:
        """The mean share of equal bits."""
        return math.fsum(self.bits.values()) / len(self.bits)  # in whatever order the cells ended

    @property
    def followed(self) -> bool:
        """True if the kernel follows the plan in every cell."""
        return min(self.bits.values()) >= records.FOLLOWED

    @property
    def behaves(self) -> bool:
        """True if it casts at random, with the kernel's bias in every cell, as far as one batch's heads show.

        The biases of two random streams differ by up to 0.04 ulp at 256 heads; a plan of another bias is 0.2 ulp away.
        """
        return is_random(parse_declaration(self.plan)) and all(
            fit.mean is not None
            and fit.half_width is not None
            and abs(fit.mean) <= MARGIN_ULPS
            and fit.half_width <= 2 * MARGIN_ULPS
            for fit in self.fits.values()
        )

    @property
    def distance(self) -> float:
        """The mean |difference of bias| in ulps."""
        far = (math.inf if fit.mean is None else abs(fit.mean) for fit in self.fits.values())
        return math.fsum(far) / len(self.fits)

    def equals(self, best: "Standing") -> bool:
        """Return whether nothing tells it from the best."""
        return self.followed and all(abs(share - self.bits[case]) <= EQUAL for case, share in best.bits.items())


def explain(run: Iterable[Record]) -> dict[str, Explanation]:
    """Return the best plan of every kernel whose records carry fits, by backend-kernel: the one with most equal bits.

    A plan is followed where 98 % of the elements of O agree with its emulation to the bit in every cell. Arithmetic
    that no plan specifies costs less: with PyTorch's SDPA, Hugging Face's and x-transformers' eager attention,
    FlexAttention and a loop like flash attention 1, all on a CPU, the order of fp32 sums and the exponential's last bit
    flip 0.02 % of the elements, and up to 0.2 % of a cell's, but 1.7 % of `equal_keys`, where O itself is often a tie.
    The 2 % that may differ, each by an ulp, move the bias by at most 0.02 ulp, less than half the margin of a verdict.

    If its plan was searched for, in a separate cell, the result of the search is the answer, unless random bits leave
    it without one.

    Two plans are not distinguished if their shares differ by at most 0.1 % in every cell. If plans differ only in
    tiles, the exponential's base or a device's products, the plainest represents all: the base alone moves two elements
    in a million.
    """
    records_that_tell = (record for record in run if _fits(record) or records.IDENTITY in record.evidence)
    kernels = grouped(records_that_tell, lambda record: f"{record.backend}-{record.kernel}")
    return {name: _explain(group) for name, group in kernels.items()}


def _fits(record: Record) -> Mapping[str, FitRecord]:
    fits: Mapping[str, FitRecord] = record.evidence.get("fits", {})
    return fits


def _explain(cells: Sequence[Record]) -> Explanation:
    """Return the result of a search, or else the known plan with most bits."""
    searched: Explanation | None = next(filter(None, (record.evidence.get(records.IDENTITY) for record in cells)), None)
    compared = [record for record in cells if _fits(record)]
    if searched is not None and (searched.state == records.FOLLOWS or not compared):
        return searched
    nearest = _nearest_known(compared)
    return nearest if searched is None or nearest.state == records.BEHAVES_LIKE else searched


def _nearest_known(cells: Sequence[Record]) -> Explanation:
    """Return the known plan with most bits, and whether the kernel follows it, behaves like it, or neither."""
    plans = [plan for plan in _fits(cells[0]) if all(plan in _fits(record) for record in cells)]
    standings = [Standing(plan, {record.case: _fits(record)[plan] for record in cells}) for plan in plans]
    best = max(standings, key=lambda standing: (standing.followed, standing.mean))
    state, named = records.UNEXPLAINED, [best]
    if best.followed:
        named = _first_of_families(standing for standing in standings if standing.equals(best))
        state = records.AMBIGUOUS if len(named) > 1 else records.FOLLOWS
    elif best.mean <= RANDOM and (alike := [standing for standing in standings if standing.behaves]):
        state, named = records.BEHAVES_LIKE, _first_of_families(sorted(alike, key=lambda standing: standing.distance))
    shares = sorted((share, case) for case, share in best.bits.items() if share < records.FOLLOWED)
    worst = {case: share for share, case in shares} if state == records.UNEXPLAINED else {}
    return Explanation(state, tuple(each.plan for each in named), len(named[0].bits), named[0].mean, worst)


def _first_of_families(standings: Iterable[Standing]) -> list[Standing]:
    """Return the plainest of each group that only tiles, the exponential's base or a device's products tell apart."""
    first: dict[Declaration, Standing] = {}
    for standing in standings:
        first.setdefault(_family(standing.plan), standing)
    return list(first.values())


def _family(plan: str) -> Declaration:
    """Return a plan in one tile, in base e, with exact products.

    In one tile no shift lags behind an earlier tile and no split is merged; one product is O's own cast.
    """
    declaration = nameless(parse_declaration(plan))
    exponential = replace(declaration.plan.exponential, base_two=False)
    whole = replace(declaration.plan.o_bar, every=0, steps=Steps.EVERY)
    rounding = replace(declaration.plan, exponential=exponential, o_bar=whole, accumulator=Accumulator.EXACT)
    rule = replace(declaration.shift_rule, lag=0.0)
    if declaration.algorithm in (SPLIT_ATTENTION, STANDARD_ATTENTION):
        rounding = replace(rounding, o_bar=Cast(FP32))
    if declaration.algorithm is SPLIT_ATTENTION:
        declaration = replace(declaration, algorithm=FLASH_ATTENTION)
    return replace(declaration, plan=rounding, shift_rule=rule, block=ONE_TILE)
