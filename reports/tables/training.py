"""Tables of short training runs: kernels down, snippets across, over the seeds of one run or several."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import record as records
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import CaseRecord, Record, Run
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.texts import EXCUSED, mark_of, marked, plain_text

_WORST_FIRST = (records.FAILED, records.CRASHED, records.TIMED_OUT, records.UNDECIDED, EXCUSED, records.MEASURED,
                records.PASSED, records.SKIPPED)  # fmt: skip


@dataclass(frozen=True)
class TrainingGrid:
    """The training runs of one kind and backend: every seed of a kernel in a snippet in one place."""

    kind: str  # of experiment
    backend: str
    described: Mapping[str, CaseRecord]  # what the snippets are
    cells: Mapping[tuple[str, str], Sequence[Record]]  # by kernel and case

    @property
    def kernels(self) -> list[str]:
        """The kernels in the order of their first records."""
        return list(dict.fromkeys(kernel for kernel, _ in self.cells))

    @property
    def cases(self) -> list[str]:
        """The cases in the order of their labels."""
        return sorted(dict.fromkeys(case for _, case in self.cells), key=lambda case: self.heading(case).split(":"))

    def heading(self, case: str) -> str:
        """Return the heading of the case's column: its label and measure."""
        about = self.described[case]
        return case if about.label is None else f"{about.label}: {about.headline}"

    def values(self, kernel: str, case: str) -> list[float]:
        """Return the headline of every seed that has a number, lowest first."""
        return sorted(value for each in self.cells.get((kernel, case), []) if (value := self._value(each)) < math.inf)

    def _value(self, record: Record) -> float:
        number = record.number(self.described[record.case].headline or "")
        return math.inf if number is None else number

    def table(self) -> Grid:
        """Return the table: the headline, lowest to highest, with the mark of the worst of it; what the paper says."""
        ran = [record for records in self.cells.values() for record in records]
        paper = {record.kernel: record.evidence["paper"] for record in ran if "paper" in record.evidence}
        seeds = sorted({record.seed for record in ran})
        texts = {place: self._text(cells) for place, cells in self.cells.items()}
        rows = [
            [name, *(texts.get((name, case), "") for case in self.cases), paper.get(name, "")] for name in self.kernels
        ]
        named = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
        headers = ["kernel", *map(self.heading, self.cases), "paper"]
        return Grid(headers, rows, f"{self.kind}, {self.backend}, {named}")

    def _text(self, cells: Sequence[Record]) -> str:
        texts = list(dict.fromkeys(map(plain_text, sorted(cells, key=self._value))))
        text = texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
        return marked(text, min(map(mark_of, cells), key=_WORST_FIRST.index))


def pooled(runs: Mapping[Path, Run]) -> list[Run]:
    """Return the training runs alone of several seeds, by file; UsageError: of several platforms, or there are none."""
    first, *_ = runs.values()
    for path, run in runs.items():
        for name in ("cpu", "level"):  # ranges of a mixture would be those of platforms, not of seeds
            if (here := first.platform[name]) != (other := run.platform[name]):
                there = f"{other!r}, {here!r} in {next(iter(runs))}"
                raise UsageError(f"{path}: platform.{name} is {there}; compare puts them side by side")
    training_runs = [replace(run, records=tuple(record for record in run.records if record.experiment in run.pooled))
           for run in runs.values()]  # fmt: skip
    if not any(run.records for run in training_runs):
        raise UsageError(f"{next(iter(runs))}: no training runs in there, and compare puts calls side by side")
    return training_runs


def training_grids(runs: Sequence[Run]) -> list[TrainingGrid]:
    """Return the training runs of one run or of several seeds, a grid a kind of experiment and backend."""
    described = {name: about for run in reversed(runs) for name, about in run.cases.items()}
    trained = (record for run in runs for record in run.records if record.experiment in run.pooled)
    return [
        TrainingGrid(*key, described, grouped(records, lambda record: (record.kernel, record.case)))
        for key, records in grouped(trained, lambda record: (record.experiment, record.backend)).items()
    ]


def training_tables(runs: Sequence[Run]) -> list[Part]:
    """Return tables of the runs' training runs, one a backend, with their legend; none without any."""
    grids: list[Part] = [grid.table() for grid in training_grids(runs)]
    return [*grids, training_legend(runs)] if grids else []


def training_legend(runs: Sequence[Run]) -> str:
    """Return the legend of the tables' rows and columns."""
    lines = [kind.legend for run in runs for kind in run.experiments.values() if kind.pooled and kind.legend]
    for grid in training_grids(runs):
        cases = ((case, grid.described[case]) for case in grid.cases)
        lines += [f"{about.label}, {case}: {about.about}" for case, about in cases if about.label is not None]
    return "\n".join(dict.fromkeys(lines))
