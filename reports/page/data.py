"""What the page's script shows, as JSON: every cell once for all platforms, every string once."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tiebreak.reports.records.order import cases_of
from tiebreak.reports.records.record import (
    NONFINITE,
    Estimate,
    FitRecord,
    HistogramRecord,
    Record,
    Run,
    number_of,
)
from tiebreak.reports.tables import marks
from tiebreak.reports.tables.changes import changes_text
from tiebreak.reports.tables.comparison import Row, compare
from tiebreak.reports.tables.plans import explanation_text
from tiebreak.reports.tables.rules import rules_text

_DIGITS = 5  # significant ones of a number on the page: the files have them all
_FITS = 3  # plans that are named of those that a kernel's bits were held against
_KERNEL, _CASE = "\x01", "\x02"  # in the place of names in a command: all commands of a run are alike then
_DRAWN = frozenset({"trace", "series"})  # evidence that the figures draw
_TEXTS: Mapping[str, Callable[[Any], str]] = {"changes": changes_text, "rules": rules_text}  # evidence put in words


def page_data(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """The cells of all runs as JSON that can stand inside a script element.

    Returns:
        One object: tables of strings, measures, checks' answers and cases; and a row for every cell, with what each
        platform says of it. A platform that says what an earlier one says has that one's number.
    """
    text = json.dumps(_Tables(runs).plain(labels), separators=(",", ":"), allow_nan=False)
    return text.replace("<", r"\u003c").replace(">", r"\u003e").replace("&", r"\u0026")


class _Table(dict[Any, int]):
    """Values with their numbers, each there once."""

    def number(self, value: Any) -> int:
        """The value's number; a new one for a new value."""
        return self.setdefault(value, len(self))


class _Tables:
    """The tables that rows refer to by number."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        self.strings, self.shapes, self.answers, self.asked = _Table(), _Table(), _Table(), _Table()
        self.headlines = {name: about.headline for run in reversed(runs) for name, about in run.experiments.items()}
        self.measures = {name: about for run in reversed(runs) for name, about in run.measures.items()}
        self.places = {name: place for place, name in enumerate(self.measures)}

    def plain(self, labels: Sequence[str]) -> dict[str, Any]:
        """Everything."""
        cases = cases_of(self.runs)
        order = {name: place for place, name in enumerate(cases)}
        rows = [self._row(row, order) for row in compare(self.runs, labels).rows]
        return {
            "platforms": [_platform(run, label) for run, label in zip(self.runs, labels, strict=True)],
            "pooled": sorted({name for run in self.runs for name in run.pooled}),
            "cases": [
                [name, x.about, x.source, x.group, int(x.failure), x.unclaimed or "", x.headline or ""]
                for name, x in cases.items()
            ],
            "measures": [
                [name, about.unit, about.about, int(about.column or name in self.headlines.values())]
                for name, about in self.measures.items()
            ],
            "strings": list(self.strings),
            "shapes": list(self.shapes),
            "answers": list(self.answers),
            "asked": list(self.asked),
            "rows": rows,
        }

    def _row(self, row: Row, order: dict[str, int]) -> list[Any]:
        first = row.record
        names = (first.backend, first.format, first.kernel, first.experiment)
        cells: list[Any] = []
        for number, record in enumerate(row.records):
            # Records that are equal as they are need no second writing down: most are.
            alike = row.records.index(record)
            if record is None:
                cells.append(None)
            elif alike < number:
                cells.append(alike if isinstance(cells[alike], list) else cells[alike])
            else:
                cell = self._record(record)
                cells.append(cells.index(cell) if cell in cells else cell)
        return [*map(self.strings.number, names), order[first.case], row.agreement.mark, ",".join(row.letters), cells]

    def _record(self, record: Record) -> list[Any]:
        string = self.strings.number
        command = record.command.replace(record.kernel, _KERNEL).replace(record.case, _CASE)
        texts = (
            record.outcome,
            record.verdict,
            marks.cell_text(record),
            record.plan,
            record.excused,
            record.skipped,
            command,
            record.digest,
        )
        numbers: list[float | None] = []
        shape: list[int] = []
        for name, value in record.measures.items():
            estimated = isinstance(value, Estimate)
            shape.append(~self.places[name] if estimated else self.places[name])
            numbers += [_short(number_of(value)), *([_short(value.half_width)] if isinstance(value, Estimate) else [])]
        asked = tuple(map(self._answer, record.answers, record.answers.values()))
        return [
            *(string(text or "") for text in texts),
            record.seed,
            record.heads,
            record.case_version,
            self._tone(record),
            self.asked.number(asked),
            self._evidence(record),
            self.shapes.number(tuple(shape)),
            *numbers,
        ]

    def _answer(self, check: str, answer: Any) -> int:
        string = self.strings.number
        met = {True: 1, False: 0, None: -1}[answer.met]
        return self.answers.number(
            (string(check), met, string(answer.asked), string(answer.why), string(answer.source or ""))
        )

    def _tone(self, record: Record) -> float | None:
        """The number that colours a cell: where it is shown, and has a verdict; what cancels or shrank has none."""
        headline = self.headlines.get(record.experiment)
        if headline is None or record.verdict in (None, NONFINITE) or record.shrank:
            return None
        return _short(record.number(headline))

    def _evidence(self, record: Record) -> dict[str, Any] | int:
        """The histogram, the plans whose bits the kernel's were held against, and what else a record carries."""
        carried: dict[str, Any] = {}
        for name, value in record.evidence.items():
            if isinstance(value, HistogramRecord):
                carried["histogram"] = [value.low, value.width, value.outside, value.counts]
            elif name == "fits":
                carried[name] = _fits(value)
            elif name in _TEXTS:
                carried.setdefault("more", []).append([name, _TEXTS[name](value)])
            elif name not in _DRAWN:
                carried.setdefault("more", []).append([name, value if isinstance(value, str) else json.dumps(value)])
        return carried or 0


def _platform(run: Run, label: str) -> dict[str, Any]:
    """What the page says of a platform beside its label."""
    facts = {name: str(value) for name, value in run.platform.items() if isinstance(value, str | int | float)}
    facts |= {f"backend {name}": assumption for name, assumption in run.platform.get("assumed", {}).items()}
    plans = {kernel: explanation_text(plan) for kernel, plan in run.explanations.items()}
    return {"label": label, "facts": facts, "explanations": plans}


def _fits(fits: Any) -> list[list[Any]]:
    """The plans with the most equal bits, with the share of them."""
    known = [(plan, fit.bits) for plan, fit in fits.items() if isinstance(fit, FitRecord) and fit.bits is not None]
    return [[plan, _short(bits)] for plan, bits in sorted(known, key=lambda pair: -pair[1])[:_FITS]]


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.{_DIGITS}g}")
