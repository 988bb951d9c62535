"""`python -m tiebreak.studies.alarms`: Count false alarms of the default matrix over many seeds.

What runs here is the suite's own, its kernels on its emulation and on this CPU, or kernels that are known to be sound:
those of tests/defects/loops.py. So each cell that does not pass is a false alarm, or a claim that does not hold.
"""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy.special import gammaincinv

from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.cli import positive
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import SKIPPED
from tiebreak.reports.tables.run import counted
from tiebreak.studies.study import Study

_SURE = 0.95  # of the bound on the rate


@dataclass(frozen=True)
class Seed:
    """A default run at one seed."""

    seed: int
    backends: str  # as asked for
    cases: str | None  # likewise
    kernel: tuple[str, ...] = ()  # targets of sound kernels; none: the suite's own
    heads: int = 256

    @property
    def selection(self) -> Selection:
        """What is run, as the command line of a run names it."""
        return Selection(backends=self.backends, cases=self.cases, kernel=self.kernel)


@dataclass(frozen=True)
class Outcomes:
    """What one seed gave."""

    counts: dict[str, int]  # cells by outcome
    alarms: list[str]  # cells that did not pass, with why


def run_seed(task: Seed) -> Outcomes:
    """Run every cell of a default run at one seed."""
    bench, counts, alarms = Workbench(Settings(seed=task.seed, heads=task.heads)), Counter[str](), []
    for cell in cells(task.selection)[0]:
        record = run_cell(cell, bench)
        counts[record.outcome] += 1
        if not record.passes and record.outcome != SKIPPED:
            alarms.append(f"{record.outcome} {record.id}: {'; '.join(record.reasons)}")
    return Outcomes(dict(counts), alarms)


STUDY = Study("alarms", run_seed, seconds=1200.0)


def at_most(alarms: int, cells: int) -> float:
    """Return an upper bound on the rate of alarms, one-sided, at 95 % confidence.

    The binomial's tail is taken as Poisson's, which it is for rates this small.

    Args:
        alarms: that were seen.
        cells: in which they could have been.
    """
    return float(gammaincinv(alarms + 1, _SURE)) / cells


def summary(results: Mapping[Seed, Outcomes]) -> str:
    """Return the count, its bound, and every alarm."""
    counts = sum((Counter(each.counts) for each in results.values()), Counter[str]())
    ran = counts.total() - counts[SKIPPED]
    alarms = [f"seed {task.seed}: {text}" for task, each in results.items() for text in each.alarms]
    parts = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    asked = f"{counted(len(results), 'seed')}, {counted(ran, 'cell')} ({parts})"
    bound = f", with {_SURE:.0%} confidence fewer than one in {1 / at_most(len(alarms), ran):,.0f} cells" if ran else ""
    return "\n".join([f"{asked}: {counted(len(alarms), 'alarm')}{bound}", *alarms])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0 without an alarm, 1 with one, 2 for bad usage, 130 after Ctrl-C."""
    parser = STUDY.parser(__doc__)
    parser.add_argument("--seeds", type=positive, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--first", type=positive, default=1, metavar="N", help="the first of them (default: 1)")
    parser.add_argument("--backend", default="emulation,cpu", metavar="NAMES", help="default: emulation,cpu")
    parser.add_argument("--cases", metavar="NAMES", help="default: all")
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="TARGET", help="a sound kernel; may be repeated"
    )
    parser.add_argument("--heads", type=positive, default=256, metavar="N", help="default: 256")
    options = parser.parse_args(arguments)
    first, asked = options.first, (options.backend, options.cases, tuple(options.kernel), options.heads)
    try:
        cells(Seed(first, *asked).selection)
    except UsageError as error:
        parser.error(str(error))
    results = STUDY.results((Seed(seed, *asked) for seed in range(first, first + options.seeds)), options)
    print(summary(results))
    return int(any(each.alarms for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
