"""Which known plan an undeclared kernel follows, over all of its cells."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tiebreak.cases.claims import predicted
from tiebreak.cases.verdicts import Interval
from tiebreak.matrix.candidates import ONE_TILE
from tiebreak.reports.records import Estimate, Record


@dataclass(frozen=True)
class Explanation:
    """The plan that fits a kernel best."""

    backend: str
    kernel: str
    plan: str  # rule@plan, in one tile if so
    cells: int  # cells that were compared
    misses: tuple[str, ...]  # cases in which it does not fit
    unsettled: tuple[str, ...]  # cases whose heads do not tell
    distance: float  # mean |difference of bias| in ulps
    others: tuple[str, ...] = ()  # plans that fit in every cell too, tiles aside

    @property
    def explained(self) -> bool:
        """Whether the plan fits in every cell; a cell that does not tell is no pass."""
        return not self.misses and not self.unsettled

    @property
    def text(self) -> str:
        """One line for the report."""
        if self.misses:
            nearest = f"{self.plan} is nearest but misses {len(self.misses)} of {self.cells} cells"
            return f"unexplained: no known plan fits; {nearest} ({_some(self.misses)})"
        if self.unsettled:
            nearest = f"{self.plan} is nearest but {len(self.unsettled)} of {self.cells} cells do not tell"
            return f"unexplained: too few heads; {nearest} ({_some(self.unsettled)}): it takes more"
        cells = "the 1 cell" if self.cells == 1 else f"all {self.cells} cells"
        others = f"; fit too: {_some(self.others)}" if self.others else ""
        return f"follows {self.plan} in {cells} compared (mean difference {self.distance:.4f} ulp{others})"


def explain(found: Sequence[Record]) -> list[Explanation]:
    """The best plan of every kernel whose records carry fits.

    Fewest misses first, then fewest cells that do not tell, then the smallest distance.
    """
    kernels: dict[tuple[str, str], list[Record]] = {}
    for record in found:
        if "fits" in record.evidence:
            kernels.setdefault((record.backend, record.kernel), []).append(record)
    return [_best(records) for records in kernels.values()]


def _best(found: Sequence[Record]) -> Explanation:
    best, *rest = sorted((_fit(plan, found) for plan in _plans(found)), key=_rank)
    others = dict.fromkeys(_untiled(fit.plan) for fit in rest if fit.explained)
    return replace(best, others=tuple(name for name in others if name != _untiled(best.plan)))


def _plans(found: Sequence[Record]) -> list[str]:
    """The plans that every cell was compared with: those that leave O in fp32 are for fp32 alone."""
    return [plan for plan in _fits(found[0]) if all(plan in _fits(record) for record in found)]


def _fits(record: Record) -> Mapping[str, Estimate]:
    fits: Mapping[str, Estimate] = record.evidence["fits"]
    return fits


def _untiled(plan: str) -> str:
    return plan.removesuffix(ONE_TILE)


def _rank(fit: Explanation) -> tuple[int, int, float]:
    return len(fit.misses), len(fit.unsettled), fit.distance


def _fit(plan: str, found: Sequence[Record]) -> Explanation:
    fits = [(record.case, _fits(record)[plan]) for record in found]
    told = [(case, _follows(difference)) for case, difference in fits]
    distances = [abs(difference.mean) for _, difference in fits if difference.mean is not None]
    return Explanation(
        found[0].backend,
        found[0].kernel,
        plan,
        len(found),
        misses=tuple(case for case, follows in told if follows is False),
        unsettled=tuple(case for case, follows in told if follows is None),
        distance=sum(distances) / len(distances) if distances else float("inf"),
    )


def _follows(difference: Estimate) -> bool | None:
    """True, False, or None where the heads do not tell. NaN on either side is no fit."""
    if difference.mean is None:
        return False
    half_width = float("inf") if difference.half_width is None else difference.half_width
    return predicted(Interval(difference.mean, half_width))


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
