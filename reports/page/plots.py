"""Figures as files, by matplotlib (the extra `plots`), which is loaded when one is asked for."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiebreak.reports.errors import UsageError
from tiebreak.reports.page.figures import Figure
from tiebreak.reports.page.svg import COLOURS, THEORY
from tiebreak.reports.records.record import NONFINITE, Record, Run
from tiebreak.reports.tables.training import TrainingGrid

FORMATS = ("svg", "png")
_STYLES = ("-", "--", ":", "-.")
_LONGEST = 60  # characters of a name
_ROUNDED = "_l_rounded"  # ends the names of kernels that sum l from rounded P-bar
_SCALE = 0.35  # ulp at which the colours of a heat map end


def save(figures: Sequence[Figure], runs: Sequence[Run], labels: Sequence[str], folder: Path) -> list[Path]:
    """Draw every figure, and a heat map for every platform, backend and format, as SVG and PNG.

    Args:
        figures: line figures.
        runs: the runs to draw heat maps of.
        labels: of their platforms.
        folder: where to; made if need be.

    Returns:
        The files.

    Raises:
        UsageError: matplotlib is not installed, or a file can't be written.
    """
    canvas_of = _canvas("--figures")
    drawn: dict[str, Any] = {}
    for figure in figures:
        drawn[figure.name] = canvas = canvas_of(figsize=(6, 4), layout="constrained")
        _lines(canvas.subplots(), figure)
    for run, label in zip(runs, labels, strict=True):
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in run.records:
            if headline := run.experiments[record.experiment].headline:
                groups.setdefault((record.backend, record.format, headline), []).append(record)
        for (backend, fmt, headline), records in groups.items():
            # A number, not a name out of the records: those may hold anything, a slash for one.
            drawn[f"heat-{len(drawn) - len(figures) + 1}"] = canvas = canvas_of(layout="constrained")
            _heat(canvas, records, headline, f"{label}: {backend}, {fmt}")
            about = run.measures.get(headline)
            unit = f", {about.unit}" if about is not None and about.unit else ""
            canvas.colorbar(canvas.axes[0].images[0], ax=canvas.axes[0], label=_plain(headline + unit))
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [(canvas, folder / f"{name}.{kind}") for name, canvas in drawn.items() for kind in FORMATS]
        for canvas, path in paths:
            canvas.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from error
    return [path for _, path in paths]


def save_training(grids: Sequence[TrainingGrid], path: Path) -> None:
    """Draw the training runs: a row a kernel, a column a snippet, a mark for every seed.

    Kernels that differ in the sum of l alone share a row.

    Args:
        grids: one a backend.
        path: of the file; its ending says the kind.

    Raises:
        UsageError: matplotlib is not installed, the ending is unknown, or the file can't be written.
    """
    canvas_of = _canvas("--figure")
    rows = [len(_rows(grid)) for grid in grids]
    width = 2.5 + 1.6 * max(len(grid.cases) for grid in grids)
    canvas = canvas_of(figsize=(width, 0.6 + sum(0.9 + 0.24 * count for count in rows)), layout="constrained")
    parts = canvas.subfigures(len(grids), 1, squeeze=False, height_ratios=[4 + count for count in rows])
    for part, grid in zip(parts[:, 0], grids, strict=True):
        part.suptitle(_plain(grid.backend), fontsize="medium")
        panels = part.subplots(1, len(grid.cases), squeeze=False, sharey=True)
        for axes, case in zip(panels[0], grid.cases, strict=True):
            _marks(axes, grid, case)
    marks = dict(zip(*reversed(canvas.axes[0].get_legend_handles_labels()), strict=True))
    canvas.legend(marks.values(), marks, loc="outside lower center", ncols=len(marks), fontsize="small")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        canvas.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"--figure {path}: {error}") from error


def _rows(grid: TrainingGrid) -> list[str]:
    """Kernels without what says how l is summed, in the grid's order."""
    return list(dict.fromkeys(kernel.removesuffix(_ROUNDED) for kernel in grid.kernels))


@dataclass(frozen=True)
class _Kind:
    """How the marks of some kernels are drawn."""

    label: str
    shift: float  # up or down from the row's middle
    style: Mapping[str, Any]  # of matplotlib's plot


_UNROUNDED_L = _Kind("l from P̄ before its cast", -0.15, {"color": COLOURS[0], "marker": "o", "linestyle": ""})
_ROUNDED_L = _Kind("l from rounded P̄", 0.15, {**_UNROUNDED_L.style, "color": COLOURS[1], "fillstyle": "none"})
_OWN = _Kind("the device's or a user's own", 0.0, {**_UNROUNDED_L.style, "color": THEORY, "marker": "D"})


def _kind(kernel: str) -> _Kind:
    if "@train" not in kernel:
        return _OWN
    return _ROUNDED_L if kernel.endswith(_ROUNDED) else _UNROUNDED_L


def _marks(axes: Any, grid: TrainingGrid, case: str) -> None:
    rows = _rows(grid)
    for kernel in grid.kernels:
        values, kind = grid.values(kernel, case), _kind(kernel)
        place = rows.index(kernel.removesuffix(_ROUNDED)) + kind.shift
        axes.plot(values, [place] * len(values), **kind.style, label=kind.label)
    axes.axvline(0, color="#666666", linewidth=0.8)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_yticks(range(len(rows)), labels=[_plain(row.removesuffix("@train")) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.tick_params(labelsize="small")
    axes.locator_params(axis="x", nbins=4)
    axes.ticklabel_format(axis="x", style="sci", scilimits=(-2, 3))
    axes.xaxis.offsetText.set_fontsize("small")
    axes.set_title(_plain(grid.heading(case).replace(": ", "\n")), fontsize="small")


def _canvas(flag: str) -> Any:
    """Matplotlib's class of a figure.

    Raises:
        UsageError: it is not installed.
    """
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UsageError(f"{flag} needs matplotlib: pip install 'tiebreak[plots]'") from error
    return Canvas


def _plain(text: str) -> str:
    """A name that fits on an axis; a dollar sign would open a formula."""
    return (text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…").replace("$", r"\$")


def _lines(axes: Any, figure: Figure) -> None:
    for number, series in enumerate(figure.series):
        colour = THEORY if series.dashed else COLOURS[number % len(COLOURS)]
        style = "--" if series.dashed else _STYLES[number % len(_STYLES)]
        axes.plot(*zip(*series.points, strict=True), style, color=colour, label=_plain(series.label))
        if series.marked:
            axes.plot(*zip(*series.marked, strict=True), "o", color=colour)
        for place, low, high in series.bars:
            axes.plot((place, place), (low, high), color=colour, linewidth=1)
    axes.axhline(0, color="#666666", linewidth=0.8)
    if figure.x_ticks:
        axes.set_xticks([place for place, _ in figure.x_ticks], labels=[label for _, label in figure.x_ticks])
    axes.set(title=_plain(figure.title), xlabel=figure.x_label, ylabel=figure.y_label)
    axes.legend(fontsize="small")


def _heat(canvas: Any, records: Sequence[Record], headline: str, title: str) -> None:
    kernels = list(dict.fromkeys(record.kernel for record in records))
    cases = list(dict.fromkeys(record.case for record in records))
    longest = max(map(len, map(_plain, kernels + cases)))
    canvas.set_size_inches(2 + longest / 10 + 0.5 * len(kernels), 1 + longest / 10 + 0.22 * len(cases))
    values = [[math.nan] * len(kernels) for _ in cases]
    axes = canvas.subplots()
    for record in records:
        # Without a verdict the case cancels: its bias is of any size.
        told = record.verdict not in (None, NONFINITE)
        bias = record.number(headline) if told else None
        row, column = cases.index(record.case), kernels.index(record.kernel)
        values[row][column] = math.nan if bias is None else bias
        text = "–" if bias is None else f"{bias:+.2f}"
        dark = bias is not None and abs(bias) > 0.6 * _SCALE
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    axes.imshow(values, cmap="PuOr_r", vmin=-_SCALE, vmax=_SCALE, aspect="auto")
    axes.set_xticks(range(len(kernels)), labels=[_plain(kernel) for kernel in kernels], rotation=90)
    axes.set_yticks(range(len(cases)), labels=[_plain(case) for case in cases])
    axes.set_title(_plain(title), fontsize="medium")
