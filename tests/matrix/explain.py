"""Which known plan an undeclared kernel follows, over all of its cells."""

from collections.abc import Sequence
from dataclasses import dataclass

from tiebreak.cases.claims import predicted
from tiebreak.cases.verdicts import Interval
from tiebreak.reports.records import Estimate, Record


@dataclass(frozen=True)
class Explanation:
    """The plan that fits a kernel best."""

    kernel: str
    plan: str  # rule@plan
    cells: int  # cells that were compared
    misses: tuple[str, ...]  # cases in which it does not fit
    distance: float  # mean |difference of bias| in ulps

    @property
    def explained(self) -> bool:
        """Whether the plan fits in every cell."""
        return not self.misses

    @property
    def text(self) -> str:
        """One line for the report."""
        if self.explained:
            return f"follows {self.plan} in all {self.cells} cells compared (mean difference {self.distance:.4f} ulp)"
        some = ", ".join(self.misses[:3]) + (", ..." if len(self.misses) > 3 else "")
        return f"unexplained: {self.plan} is nearest but misses {len(self.misses)} of {self.cells} cells ({some})"


def explain(found: Sequence[Record]) -> list[Explanation]:
    """The best plan of every kernel whose records carry fits: fewest misses first, then the smallest distance."""
    kernels: dict[str, list[Record]] = {}
    for record in found:
        if record.fits:
            kernels.setdefault(record.kernel, []).append(record)
    return [_best(kernel, found) for kernel, found in kernels.items()]


def _best(kernel: str, found: Sequence[Record]) -> Explanation:
    plans = found[0].fits
    return min((_fit(kernel, plan, found) for plan in plans), key=lambda fit: (len(fit.misses), fit.distance))


def _fit(kernel: str, plan: str, found: Sequence[Record]) -> Explanation:
    misses = tuple(record.case for record in found if not _fits(record, record.fits[plan]))
    distances = [abs(mean) for record in found if (mean := record.fits[plan].mean) is not None]
    distance = sum(distances) / len(distances) if distances else float("inf")
    return Explanation(kernel, plan, len(found), misses, distance)


def _fits(record: Record, difference: Estimate) -> bool:
    """An interval that straddles the margin is no miss; a missing one is, unless the kernel's output is missing too."""
    if difference.mean is None or difference.half_width is None:
        return False
    return predicted(Interval(difference.mean, difference.half_width)) is not False
