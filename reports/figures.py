"""What the figures of a page show, as plain data: drawn into the page as SVG, or to files by matplotlib."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from tiebreak.reports.records import Record, Run

_TIED = re.compile(r"tied_maxima\[k=(\d+)\]")
_EACH = 2  # kernels of each kind in a figure: more lines than four can't be told apart
_WELL_KNOWN = ("flash@paper", "stabilized@paper")  # the paper's own, which come first where they were run


@dataclass(frozen=True)
class Series:
    """One line of a figure."""

    label: str
    points: tuple[tuple[float, float], ...]
    marked: tuple[tuple[float, float], ...] = ()  # drawn as dots on the line
    dashed: bool = False  # a theory, not a measurement


@dataclass(frozen=True)
class Figure:
    """One figure."""

    name: str  # of its file
    title: str
    note: str  # what to see in it
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()  # places and labels; none: even steps


def figures(runs: Sequence[Run], labels: Sequence[str]) -> list[Figure]:
    """The figures that the runs have data for.

    The kernels are the paper's own, then the most biased of those whose P-bar reaches 1, where ties break, and the
    least biased of the others, under emulation, where the trace is known. They come from the first run that traced any.

    Args:
        runs: the runs.
        labels: of their platforms.

    Returns:
        Up to three figures: error trace, histogram of signed errors, bias against the number of maxima.
    """
    for run, label in zip(runs, labels, strict=True):
        chosen = _chosen(run.records)
        if chosen:
            found = [_trace(chosen), _histogram(chosen), _fall(run.records, chosen)]
            return [_from(figure, label) for figure in found if figure is not None]
    return []


def _from(figure: Figure, label: str) -> Figure:
    return Figure(**{**vars(figure), "note": f"{figure.note} From {label}."})


def _chosen(records: Sequence[Record]) -> list[Record]:
    stepping = [record for record in records if record.trace and record.trace.at_one]
    smooth = [record for record in records if record.trace and not record.trace.at_one]
    stepping.sort(key=lambda record: (record.kernel not in _WELL_KNOWN, -_size(record)))
    smooth.sort(key=lambda record: (record.kernel not in _WELL_KNOWN, _size(record)))
    return [*_different(stepping), *_different(smooth)]


def _different(records: Sequence[Record]) -> list[Record]:
    """The first few that don't lie on top of each other: kernels that share a plan share their trace."""
    found = {record.trace: record for record in reversed(records)}
    return [record for record in records if found[record.trace] is record][:_EACH]


def _size(record: Record) -> float:
    """|bias|; without one a kernel is the last to be called fair."""
    mean = record.measures.bias.mean if record.measures else None
    return math.inf if mean is None else abs(mean)


def _trace(chosen: Sequence[Record]) -> Figure:
    series = []
    for record in chosen:
        assert record.trace is not None
        points = tuple((float(key), error) for key, error in enumerate(record.trace.error) if error is not None)
        at_one = set(record.trace.at_one)
        series.append(Series(record.kernel, points, tuple(point for point in points if int(point[0]) in at_one)))
    return Figure(
        name="trace",
        title="Error of Ō as its sum over the keys proceeds",
        note="Dots: keys whose P̄ is 1. Where two of them meet, their sum is a tie, and the error steps.",
        x_label="key",
        y_label="error of Ō",
        series=tuple(series),
    )


def _histogram(chosen: Sequence[Record]) -> Figure | None:
    series = []
    for record in chosen:
        if (found := record.histogram) is None or not (total := sum(found.counts) + found.outside):
            continue
        steps = []
        for number, count in enumerate(found.counts):
            left = found.low + number * found.width
            steps += [(left, count / total), (left + found.width, count / total)]
        series.append(Series(record.kernel, tuple(steps)))
    if not series:
        return None
    return Figure(
        name="histogram",
        title="Signed errors of O",
        note="Share of elements in each bin. A fair kernel is even around 0; + is away from zero.",
        x_label="signed error, ulps",
        y_label="share",
        series=tuple(series),
    )


def _fall(records: Sequence[Record], chosen: Sequence[Record]) -> Figure | None:
    points: dict[tuple[str, str], dict[int, float]] = {(one.backend, one.kernel): {} for one in chosen}
    for record in records:
        match = _TIED.fullmatch(record.case)
        line = points.get((record.backend, record.kernel))
        if match and line is not None and record.measures and record.measures.bias.mean is not None:
            line[int(match.group(1))] = record.measures.bias.mean
    maxima = sorted({k for line in points.values() for k in line if k > 0})
    if len(maxima) < 2:
        return None
    lines = {
        kernel: tuple((math.log2(k), bias) for k, bias in sorted(found.items()) if k > 0)
        for (_, kernel), found in points.items()
    }
    series = [Series(kernel, line, marked=line) for kernel, line in lines.items()]
    theory = Series("1/(2k): every tie to one side", tuple((math.log2(k), 0.5 / k) for k in maxima), dashed=True)
    return Figure(
        name="maxima",
        title="Bias against the number k of equal maxima",
        note="A tie that always breaks to one side costs half an ulp of one product in k.",
        x_label="k",
        y_label="bias of O, ulps",
        series=(*series, theory),
        x_ticks=tuple((math.log2(k), str(k)) for k in maxima),
    )
