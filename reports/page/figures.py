"""The data of a page's figures."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from pathlib import Path
from typing import NamedTuple

from tiebreak.reports.page.mechanism import HistogramSide
from tiebreak.reports.page.svg import Figure, Series, as_file, draw
from tiebreak.reports.records import store
from tiebreak.reports.records.order import cases_of
from tiebreak.reports.records.record import CaseRecord, HistogramRecord, Record, Run, SeriesFigure, TraceRecord
from tiebreak.reports.tables.training import TrainingGrid

_EACH = 2  # kernels of each kind in a figure: more lines than four can't be told apart
_ROUNDED = "_l_rounded"  # ends the names of kernels that sum l from rounded P-bar
# Places of a kernel's marks in a row of height 1: the two sums of l apart.
_SUMS = {"l from P̄ before its cast": 0.17, "l from rounded P̄": -0.17, "the device's or a user's own": 0.0}
_WELL_KNOWN = ("flash@paper", "stabilized@paper")  # the paper's own, which come first where they were run


def figures(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """Return the figures that the runs have data for, five at most.

    The kernels are the paper's own, then the most biased of those whose P-bar reaches 1, where ties break, and the
    least biased of the others, under emulation, where the trace is known. They come from the first run with traces.
    Training runs come from all runs, and are those that err most and least.
    """
    results: list[Figure] = []
    for run, label in zip(runs, labels, strict=True):
        if chosen := list(chain(*_traced(run))):
            drawings = (_trace(chosen), _histogram(chosen), _fall(run, chosen))
            results = [replace(each, note=f"{each.note} From {label}.") for each in drawings if each is not None]
            break
    return [*results, *_trained(runs, labels)]


class _Trained(NamedTuple):
    """A training run to draw."""

    size: float  # |headline|
    kernel: str
    case: str
    backend: str
    platform: int  # its number on the page
    line: tuple[tuple[float, float], ...]  # readings by step, added up where the figure asks for it


def _trained(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[Figure]:
    """Yield a figure a series that the files want drawn: of every file, whatever its kernels are called.

    If the training runs were in several places, each is labelled with its own.
    """
    cases = cases_of(runs)
    for figure in dict.fromkeys(about.figure for about in cases.values() if about.figure is not None):
        chosen = _worst_and_best(list(_runs_of(figure, runs, cases)), cases)
        if not chosen:
            continue
        where = "; ".join(labels[number - 1] for number in sorted({each.platform for each in chosen}))
        several = len({(each.backend, each.platform) for each in chosen}) > 1
        places = (f" ({each.backend}, platform {each.platform})" if several else "" for each in chosen)
        series = tuple(Series(each.kernel + place, each.line) for each, place in zip(chosen, places, strict=True))
        yield Figure(figure.title, f"{figure.note} From {where}.", "step", figure.y_label, series)


def _runs_of(figure: SeriesFigure, runs: Sequence[Run], cases: Mapping[str, CaseRecord]) -> Iterator[_Trained]:
    """Yield the training runs of all cases that have this figure."""
    for number, run in enumerate(runs, start=1):
        for record in run.records:
            about, series = cases[record.case], record.evidence.get("series")
            if about.figure != figure or series is None:
                continue
            size, values = record.number(about.headline or ""), series.values.get(figure.series, ())
            heights = accumulate(value or 0.0 for value in values) if figure.summed else values
            line = tuple((float(step), y) for step, y in zip(series.steps, heights, strict=False) if y is not None)
            if size is not None and line:
                yield _Trained(abs(size), record.kernel, record.case, record.backend, number, line)


def _worst_and_best(trained: Sequence[_Trained], cases: Mapping[str, CaseRecord]) -> list[_Trained]:
    """Return the runs of the first case that err most and least, without those that coincide."""
    first = min((each.case for each in trained), key=lambda case: cases[case].label or case, default="")
    worst: dict[str, _Trained] = {}  # of each kernel, wherever it ran: other kernels tell more than other platforms
    for each in sorted(trained, key=lambda run: -run.size):
        if each.case == first:
            worst.setdefault(each.kernel, each)
    different = list({each.line: each for each in reversed(worst.values())}.values())[::-1]
    return different if len(different) <= 2 * _EACH else [*different[:_EACH], *different[-_EACH:]]


def mechanism(runs: Sequence[Run]) -> tuple[HistogramSide, HistogramSide] | None:
    """Return a kernel of a run whose ties are broken to one side and one whose are not; None: there are none."""
    for run in runs:
        stepping, smooth = (
            [
                HistogramSide(record.kernel, record.evidence["histogram"], bias)
                for record in records
                if "histogram" in record.evidence and (bias := run.number(record, "headline")) is not None
            ]
            for records in _traced(run)
        )
        if stepping and smooth:
            return stepping[0], smooth[0]
    return None


def _traced(run: Run) -> tuple[list[Record], list[Record]]:
    """Return the kernels to draw: those whose P-bar reaches 1, where ties break, and the others."""
    traced = [(record, record.evidence["trace"]) for record in run.records if "trace" in record.evidence]
    traced.sort(key=lambda pair: (pair[0].kernel not in _WELL_KNOWN, _size(run, pair[0])))
    stepping = [pair for pair in traced if pair[1].at_one]
    stepping.sort(key=lambda pair: (pair[0].kernel not in _WELL_KNOWN, -_size(run, pair[0])))
    return _different(stepping), _different([pair for pair in traced if not pair[1].at_one])


def _different(traced: Sequence[tuple[Record, TraceRecord]]) -> list[Record]:
    """Return the first few that don't lie on top of each other: kernels that share a plan share their trace."""
    last = {trace: record for record, trace in reversed(traced)}
    return [record for record, trace in traced if last[trace] is record][:_EACH]


def _size(run: Run, record: Record) -> float:
    """Return |bias|; a kernel without one is the last to be called fair."""
    mean = run.number(record, "headline")
    return math.inf if mean is None else abs(mean)


def _trace(chosen: Sequence[Record]) -> Figure:
    series = []
    for record in chosen:
        trace: TraceRecord = record.evidence["trace"]
        points = tuple((float(key), error) for key, error in enumerate(trace.error) if error is not None)
        at_one = set(trace.at_one)
        series.append(Series(record.kernel, points, tuple(point for point in points if int(point[0]) in at_one)))
    note = "Dots: keys whose P̄ is 1. Where two of them meet, their sum is a tie, and the error steps."
    return Figure("Error of Ō as its sum over the keys proceeds", note, "key", "error of Ō", tuple(series))


def _histogram(chosen: Sequence[Record]) -> Figure | None:
    series = []
    for record in chosen:
        histogram: HistogramRecord | None = record.evidence.get("histogram")
        if histogram is None or not (total := sum(histogram.counts) + histogram.outside):
            continue
        steps = []
        for number, count in enumerate(histogram.counts):
            left = histogram.low + number * histogram.width
            steps += [(left, count / total), (left + histogram.width, count / total)]
        series.append(Series(record.kernel, tuple(steps)))
    note = "Share of elements in each bin. A fair kernel is even around 0; + is away from zero."
    return Figure("Signed errors of O", note, "signed error, ulps", "share", tuple(series)) if series else None


def _fall(run: Run, chosen: Sequence[Record]) -> Figure | None:
    """Return a figure of bias over the cases of the family that the traced case belongs to."""
    family = next((about.family for record in chosen if (about := run.cases.get(record.case)) and about.family), None)
    places = {name: about.at for name, about in run.cases.items() if family and about.family == family}
    lines: dict[tuple[str, str], dict[float, float]] = {(each.backend, each.kernel): {} for each in chosen}
    for record in run.records:
        place, bias = places.get(record.case) or 0, run.number(record, "headline")
        if (record.backend, record.kernel) in lines and place > 0 and bias is not None:
            lines[record.backend, record.kernel][place] = bias
    maxima = sorted({k for line in lines.values() for k in line})
    if len(maxima) < 2:
        return None
    drawn = {kernel: tuple((math.log2(k), line[k]) for k in sorted(line)) for (_, kernel), line in lines.items()}
    series = [Series(kernel, line, marked=line) for kernel, line in drawn.items()]
    theory = Series("1/(2k): every tie to one side", tuple((math.log2(k), 0.5 / k) for k in maxima), dashed=True)
    note = "A tie that always breaks to one side costs half an ulp of one product in k."
    marks = tuple((math.log2(k), f"{k:g}") for k in maxima)
    return Figure(f"Bias against the {family} k", note, "k", "bias of O, ulps", (*series, theory), marks)


def save_training(grids: Sequence[TrainingGrid], path: Path) -> None:
    """Draw training runs to an SVG file: a figure a backend and snippet, a row a kernel, a mark for every seed."""
    charts = (_seeds(grid, case) for grid in grids for case in grid.cases)
    store.write_text(as_file(*(draw(figure) for figure in charts if figure.rows)), path)


def _seeds(grid: TrainingGrid, case: str) -> Figure:
    """Draw one snippet: the kernels that have a number there."""
    values = {kernel: numbers for kernel in grid.kernels if (numbers := grid.values(kernel, case))}
    rows = list(dict.fromkeys(kernel.removesuffix(_ROUNDED) for kernel in values))
    before, rounded, users = _SUMS
    marks: dict[str, list[tuple[float, float]]] = {label: [] for label in _SUMS}
    for kernel, numbers in values.items():
        row = -float(rows.index(kernel.removesuffix(_ROUNDED)))
        label = users if "@train" not in kernel else rounded if kernel.endswith(_ROUNDED) else before
        marks[label] += [(value, row + _SUMS[label]) for value in numbers]
    series = tuple(Series(label, (), tuple(points)) for label, points in marks.items() if points)
    title, names = f"{grid.backend}, {grid.heading(case)}", tuple(row.removesuffix("@train") for row in rows)
    return Figure(title, "", grid.described[case].headline or "", "kernel", series, rows=names)
