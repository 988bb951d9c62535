"""Figures as files, by matplotlib (the extra `plots`), which is loaded when one is asked for."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiebreak.reports.errors import UsageError
from tiebreak.reports.figures import Figure
from tiebreak.reports.records import Record, Run
from tiebreak.reports.svg import COLOURS, THEORY

FORMATS = ("svg", "png")
_STYLES = ("-", "--", ":", "-.")
_LONGEST = 60  # characters of a name
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
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise UsageError("--figures needs matplotlib: pip install 'tiebreak[plots]'") from error
    drawn: dict[str, Canvas] = {}
    for figure in figures:
        drawn[figure.name] = canvas = Canvas(figsize=(6, 4), layout="constrained")
        _lines(canvas.subplots(), figure)
    for run, label in zip(runs, labels, strict=True):
        for backend, fmt in dict.fromkeys((record.backend, record.format) for record in run.records):
            records = [record for record in run.records if (record.backend, record.format) == (backend, fmt)]
            # A number, not a name out of the records: those may hold anything, a slash for one.
            drawn[f"heat-{len(drawn) - len(figures) + 1}"] = canvas = Canvas(layout="constrained")
            _heat(canvas, records, f"{label}: {backend}, {fmt}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        paths = [(canvas, folder / f"{name}.{kind}") for name, canvas in drawn.items() for kind in FORMATS]
        for canvas, path in paths:
            canvas.savefig(path, dpi=150)
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}") from error
    return [path for _, path in paths]


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
    axes.axhline(0, color="#666666", linewidth=0.8)
    if figure.x_ticks:
        axes.set_xticks([place for place, _ in figure.x_ticks], labels=[label for _, label in figure.x_ticks])
    axes.set(title=_plain(figure.title), xlabel=figure.x_label, ylabel=figure.y_label)
    axes.legend(fontsize="small")


def _heat(canvas: Any, records: Sequence[Record], title: str) -> None:
    kernels = list(dict.fromkeys(record.kernel for record in records))
    cases = list(dict.fromkeys(record.case for record in records))
    longest = max(map(len, map(_plain, kernels + cases)))
    canvas.set_size_inches(2 + longest / 10 + 0.5 * len(kernels), 1 + longest / 10 + 0.22 * len(cases))
    values = [[math.nan] * len(kernels) for _ in cases]
    axes = canvas.subplots()
    for record in records:
        # Without a verdict the case cancels: its bias is of any size.
        told = record.verdict is not None and record.measures is not None and not record.measures.nonfinite
        bias = record.measures.bias.mean if told and record.measures else None
        row, column = cases.index(record.case), kernels.index(record.kernel)
        values[row][column] = math.nan if bias is None else bias
        text = "–" if bias is None else f"{bias:+.2f}"
        dark = bias is not None and abs(bias) > 0.6 * _SCALE
        axes.text(column, row, text, ha="center", va="center", fontsize=6, color="white" if dark else "black")
    image = axes.imshow(values, cmap="PuOr_r", vmin=-_SCALE, vmax=_SCALE, aspect="auto")
    axes.set_xticks(range(len(kernels)), labels=[_plain(kernel) for kernel in kernels], rotation=90)
    axes.set_yticks(range(len(cases)), labels=[_plain(case) for case in cases])
    axes.set_title(_plain(title), fontsize="medium")
    canvas.colorbar(image, ax=axes, label="bias of O, ulps")
