"""Tables of short training runs: kernels down, snippets across, over the seeds of one run or several."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import (
    CRASHED,
    FELL,
    HELD,
    INCONCLUSIVE,
    MEASURED,
    SKIPPED,
    TIMED_OUT,
    CaseRecord,
    Record,
    Run,
)
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.marks import EXCUSED, mark_of, marked, plain_text

_UNKNOWN = CaseRecord(about="")
_WORST_FIRST = (FELL, CRASHED, TIMED_OUT, INCONCLUSIVE, EXCUSED, MEASURED, HELD, SKIPPED)


@dataclass(frozen=True)
class TrainingGrid:
    """The training runs of one backend: every seed of a kernel in a snippet in one place."""

    kind: str  # of experiment
    backend: str
    described: Mapping[str, CaseRecord]  # what the snippets are
    cells: Mapping[tuple[str, str], Sequence[Record]]  # by kernel and case

    @property
    def kernels(self) -> list[str]:
        """In the order of their first records."""
        return list(dict.fromkeys(kernel for kernel, _ in self.cells))

    @property
    def cases(self) -> list[str]:
        """In the order of their labels."""
        return sorted(dict.fromkeys(case for _, case in self.cells), key=lambda case: self.heading(case).split(":"))

    def headline(self, case: str) -> str | None:
        """Return the measure that is shown of a case."""
        return self.described.get(case, _UNKNOWN).headline

    def heading(self, case: str) -> str:
        """Of the case's column: its label and measure."""
        about = self.described.get(case, _UNKNOWN)
        return case if about.label is None else f"{about.label}: {about.headline}"

    def paper(self, kernel: str) -> str:
        """Return what the paper says of training with a kernel; empty where it says nothing."""
        ran = [record for (name, _), records in self.cells.items() if name == kernel for record in records]
        return next((str(record.evidence["paper"]) for record in ran if "paper" in record.evidence), "")

    def values(self, kernel: str, case: str) -> list[float]:
        """Return the headline of every seed that has a number, lowest first."""
        numbers = (self._value(record) for record in self.cells.get((kernel, case), []))
        return sorted(value for value in numbers if value is not None)

    def _value(self, record: Record) -> float | None:
        headline = self.headline(record.case)
        return None if headline is None else record.number(headline)

    def text(self, kernel: str, case: str) -> str:
        """Return one place of the table: the headline, lowest to highest, with the mark of the worst of it."""
        records = self.cells.get((kernel, case), [])
        if not records:
            return ""
        texts = list(dict.fromkeys(map(plain_text, sorted(records, key=self._order))))
        text = texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
        marks = [mark_of(record) for record in records]
        return marked(text, min(marks, key=_WORST_FIRST.index))

    def _order(self, record: Record) -> float:
        value = self._value(record)
        return float("inf") if value is None else value


def training_grids(runs: Sequence[Run]) -> list[TrainingGrid]:
    """Training runs, or what other experiments pool their seeds, of one run or several of different seeds.

    Returns:
        A grid a kind of experiment and backend, in the order of the records.
    """
    described = {name: about for run in reversed(runs) for name, about in run.cases.items()}
    trained = (record for run in runs for record in run.records if record.experiment in run.pooled)
    return [
        TrainingGrid(*key, described, grouped(records, lambda record: (record.kernel, record.case)))
        for key, records in grouped(trained, lambda record: (record.experiment, record.backend)).items()
    ]


def training_tables(runs: Sequence[Run]) -> list[Part]:
    """Return tables of the runs' training runs, one a backend, with their legend; none without any."""
    grids: list[Part] = [_table(grid) for grid in training_grids(runs)]
    return [*grids, training_legend(runs)] if grids else []


def _table(grid: TrainingGrid) -> Grid:
    seeds = sorted({record.seed for records in grid.cells.values() for record in records})
    named = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
    headers = ["kernel", *map(grid.heading, grid.cases), "paper"]
    rows = [[kernel, *(grid.text(kernel, case) for case in grid.cases), grid.paper(kernel)] for kernel in grid.kernels]
    return Grid(headers, rows, f"{grid.kind}, {grid.backend}, {named}")


def training_legend(runs: Sequence[Run]) -> str:
    """Return what the rows and columns of the tables stand for."""
    legends = [kind.legend for run in runs for kind in run.experiments.values() if kind.pooled]
    lines = list(dict.fromkeys(legend for legend in legends if legend))
    for grid in training_grids(runs):
        lines += [f"{about.label}, {case}: {about.about}" for case in grid.cases
                  if (about := grid.described.get(case, _UNKNOWN)).label is not None]  # fmt: skip
    return "\n".join(dict.fromkeys(lines))
