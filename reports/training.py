"""Tables of short training runs: kernels down, snippets across, over the seeds of one run or several."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from tiebreak.reports.grids import aside, broken, grid_text
from tiebreak.reports.records import CRASHED, HELD, SKIPPED, TIMED_OUT, Record, TrainingRecord

_SAID = {True: "stable", False: "fails", None: ""}
_LEGEND = (
    "A short GPT-2 run for every cell, its first head scripted into the paper's failure state; what differs is the"
    " kernel.\n...@train sums l from P̄ before its cast, ...@train_l_rounded after. A cell in !..! fell."
)


@dataclass(frozen=True)
class TrainingGrid:
    """The training runs of one backend: every seed of a kernel in a snippet in one place."""

    backend: str
    cells: dict[tuple[str, str], list[Record]] = field(default_factory=dict)  # by kernel and case

    @property
    def kernels(self) -> list[str]:
        """In the order of their first records."""
        return list(dict.fromkeys(kernel for kernel, _ in self.cells))

    @property
    def cases(self) -> list[str]:
        """In the order of their labels."""
        return sorted(dict.fromkeys(case for _, case in self.cells), key=lambda case: self.heading(case).split(":"))

    def about(self, case: str) -> TrainingRecord | None:
        """What a record of the case says of it; None if none ran to its end."""
        return next((one.training for (_, name), found in self.cells.items() if name == case for one in found
                     if one.training), None)  # fmt: skip

    def heading(self, case: str) -> str:
        """Of the case's column: its label and measure."""
        about = self.about(case)
        return case if about is None else f"{about.label}: {about.headline}"

    def stable(self, kernel: str) -> bool | None:
        """What the paper says of a kernel."""
        return next((one.training.stable for (name, _), found in self.cells.items() if name == kernel for one in found
                     if one.training), None)  # fmt: skip

    def values(self, kernel: str, case: str) -> list[float]:
        """The headline of every seed that has a number, lowest first."""
        found = [one.training for one in self.cells.get((kernel, case), []) if one.training]
        return sorted(value for one in found if (value := one.measures.get(one.headline)) is not None)

    def text(self, kernel: str, case: str) -> str:
        """One place of the table: the headline, lowest to highest, and whether all of it held."""
        found = self.cells.get((kernel, case), [])
        if not found:
            return ""
        texts = list(dict.fromkeys(map(_text, sorted(found, key=_headline))))
        text = texts[0] if len(texts) == 1 else f"{texts[0]} to {texts[-1]}"
        return text if all(one.outcome in (HELD, SKIPPED) for one in found) else f"!{text}!"


def _headline(record: Record) -> float:
    value = record.training.measures.get(record.training.headline) if record.training else None
    return float("inf") if value is None else value


def _text(record: Record) -> str:
    if record.training is None:
        return {SKIPPED: "skip", TIMED_OUT: "time", CRASHED: "crash"}.get(record.outcome, record.outcome)
    return record.training.shown


def training_grids(records: Sequence[Record]) -> list[TrainingGrid]:
    """Training records by backend.

    Args:
        records: of one run or, seed by seed, of several.

    Returns:
        A grid a backend, in the order of the records; none without training records.
    """
    grids: dict[str, TrainingGrid] = {}
    for record in records:
        if record.trained:
            grid = grids.setdefault(record.backend, TrainingGrid(record.backend))
            grid.cells.setdefault((record.kernel, record.case), []).append(record)
    return list(grids.values())


def training_tables(records: Sequence[Record], tablefmt: str = "simple") -> str:
    """Tables of the training runs among the records, one a backend, with their legend; empty without any."""
    parts = []
    for grid in training_grids(records):
        seeds = sorted({one.seed for found in grid.cells.values() for one in found})
        said = f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
        parts += [aside(f"training, {grid.backend}, {said}", tablefmt), _table(grid, tablefmt)]
    if parts:
        parts.append(aside(training_legend(records), tablefmt))
    return "\n\n".join(parts)


def _table(grid: TrainingGrid, tablefmt: str) -> str:
    headings = [grid.heading(case) for case in grid.cases]
    headers = ["kernel", *(map(broken, headings) if tablefmt == "simple" else headings), "paper"]
    rows = [
        [kernel, *(grid.text(kernel, case) for case in grid.cases), _SAID[grid.stable(kernel)]]
        for kernel in grid.kernels
    ]
    return grid_text(rows, headers, tablefmt)


def training_legend(records: Sequence[Record]) -> str:
    """What the rows and columns of the tables stand for."""
    abouts = {one.case: one.training for one in records if one.training}
    lines = [f"{about.label}, {case}: {about.about}" for case, about in abouts.items()]
    return "\n".join([_LEGEND, *lines])
