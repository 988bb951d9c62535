"""Figures as SVG files: those of a page, a heat map for every platform and format, training runs over seeds."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

from tiebreak.reports.errors import UsageError
from tiebreak.reports.page.figures import Figure
from tiebreak.reports.page.svg import COLOURS, GRID, INK, THEORY, as_file, draw, element, span, ticks
from tiebreak.reports.records import store
from tiebreak.reports.records.record import NONFINITE, Record, Run
from tiebreak.reports.tables.training import TrainingGrid

_LONGEST = 60  # characters of a name
_LETTER, _ROW = 7.5, 20  # width of a letter, height of a row
_CELL = 46  # width of a cell of a heat map
_PANEL, _GAP = 150, 22  # width of a snippet's panel, and what lies between two
_ROUNDED = "_l_rounded"  # ends the names of kernels that sum l from rounded P-bar
_SCALE = 0.35  # ulp at which the colours of a heat map end
_AWAY, _TOWARD = COLOURS[0], "#542788"  # colours of a bias, by its sign
_SHIFT = 3.5  # by which the two sums of l stand apart in a row


def save(figures: Sequence[Figure], runs: Sequence[Run], labels: Sequence[str], folder: Path) -> list[Path]:
    """Draw every figure, and a heat map for every platform, backend and format.

    Args:
        figures: line figures.
        runs: the runs to draw heat maps of.
        labels: of their platforms.
        folder: where to; made if need be.

    Returns:
        The files.

    Raises:
        UnwritableFolderError: a file can't be written.
    """
    drawings = {figure.name: draw(figure) for figure in figures}
    for run, label in zip(runs, labels, strict=True):
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in run.records:
            if headline := run.experiments[record.experiment].headline:
                groups.setdefault((record.backend, record.format, headline), []).append(record)
        for (backend, fmt, headline), records in groups.items():
            about = run.measures.get(headline)
            unit = f", {about.unit}" if about is not None and about.unit else ""
            # A number, not a name out of the records: those may hold anything, a slash for one.
            name = f"heat-{len(drawings) - len(figures) + 1}"
            drawings[name] = _heat_map(records, headline, f"{label}: {backend}, {fmt}: {headline}{unit}")
    paths = {folder / f"{name}.svg": drawing for name, drawing in drawings.items()}
    for path, drawing in paths.items():
        store.write_text(as_file(drawing), path)
    return list(paths)


def save_training(grids: Sequence[TrainingGrid], path: Path) -> None:
    """Draw the training runs: a row a kernel, a column a snippet, a mark for every seed.

    Kernels that differ in the sum of l alone share a row.

    Args:
        grids: one a backend.
        path: of the file, which ends in .svg.

    Raises:
        UsageError: another ending.
        UnwritableFolderError: the file can't be written.
    """
    if path.suffix != ".svg":
        raise UsageError(f"--figure {path}: figures are SVG files: name one that ends in .svg")
    parts: list[str] = []
    top, width = 0.0, 0.0
    for grid in grids:
        drawing, across, down = _training(grid, top)
        parts += drawing
        top, width = top + down, max(width, across)
    for number, (label, mark) in enumerate(_LEGEND.items()):
        x, y = 16 + 230 * number, top + 10
        parts += [mark(x, y), f'<text x="{x + 10}" y="{y + 4}">{label}</text>']
    width = max(width, 230 * len(_LEGEND))
    store.write_text(as_file(element(width, top + _ROW, "training runs over seeds", parts)), path)


def _dot(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{COLOURS[0]}"/>'


def _ring(x: float, y: float) -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="none" stroke="{COLOURS[1]}" stroke-width="1.5"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path d="M{x - 5:.1f} {y:.1f}l5 -5l5 5l-5 5z" fill="{THEORY}"/>'


_LEGEND = MappingProxyType(
    {"l from P̄ before its cast": _dot, "l from rounded P̄": _ring, "the device's or a user's own": _diamond}
)


def _mark(kernel: str, x: float, y: float) -> str:
    if "@train" not in kernel:
        return _diamond(x, y)
    return _ring(x, y + _SHIFT) if kernel.endswith(_ROUNDED) else _dot(x, y - _SHIFT)


def _training(grid: TrainingGrid, top: float) -> tuple[list[str], float, float]:
    """The panels of one backend, their width and their height."""
    rows = list(dict.fromkeys(kernel.removesuffix(_ROUNDED) for kernel in grid.kernels))
    names = [_short(row.removesuffix("@train")) for row in rows]
    left, first = _wide(names) + 12, top + 76
    parts = [f'<text x="0" y="{top + 16}" font-weight="bold">{escape(_short(grid.backend))}</text>']
    for number, name in enumerate(names):
        parts.append(f'<text x="{left - 8}" y="{first + _ROW * number + 4}" text-anchor="end">{escape(name)}</text>')
    for number, case in enumerate(grid.cases):
        places = {kernel: first + _ROW * rows.index(kernel.removesuffix(_ROUNDED)) for kernel in grid.kernels}
        parts += _panel(grid, case, left + (_PANEL + _GAP) * number, places)
    return parts, left + (_PANEL + _GAP) * len(grid.cases), 76 + _ROW * len(rows) + 34


def _panel(grid: TrainingGrid, case: str, left: float, places: Mapping[str, float]) -> Iterator[str]:
    """One snippet: a mark for every seed of every kernel."""
    values = {kernel: grid.values(kernel, case) for kernel in grid.kernels}
    low, high = span([0.0, *(value for several in values.values() for value in several)])
    upper, lower = min(places.values()) - _ROW / 2, max(places.values()) + _ROW / 2

    def across(value: float) -> float:
        return left + 8 + (value - low) / (high - low) * (_PANEL - 16)

    for number, text in enumerate(grid.heading(case).split(": ")):
        yield f'<text x="{left}" y="{upper - 28 + 18 * number}">{escape(_short(text))}</text>'
    for y in sorted(set(places.values())):
        yield f'<path d="M{left} {y}h{_PANEL}" stroke="{GRID}"/>'
    yield f'<path d="M{across(0):.1f} {upper}V{lower}" stroke="{INK}"/>'
    marked = ticks(low, high)
    for value in dict.fromkeys((marked[0], marked[-1])):
        yield f'<text x="{across(value):.1f}" y="{lower + 16}" text-anchor="middle">{value:.3g}</text>'
    for kernel, several in values.items():
        yield from (_mark(kernel, across(value), places[kernel]) for value in several)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _wide(names: Sequence[str]) -> float:
    """The room that the longest of some names takes."""
    return _LETTER * max(map(len, names), default=0)


def _heat_map(records: Sequence[Record], headline: str, title: str) -> str:
    """Cases down, kernels across: a number and its colour; a dash where a case cancels or a cell gave none."""
    kernels = list(dict.fromkeys(record.kernel for record in records))
    cases = list(dict.fromkeys(record.case for record in records))
    left, top = _wide(list(map(_short, cases))) + 8, _wide(list(map(_short, kernels))) + 36
    parts = [f'<text x="0" y="16" font-weight="bold">{escape(_short(title))}</text>']
    for number, kernel in enumerate(kernels):
        x = left + _CELL * (number + 0.5) + 4
        parts.append(f'<text transform="translate({x} {top - 6}) rotate(-90)">{escape(_short(kernel))}</text>')
    for number, case in enumerate(cases):
        y = top + _ROW * number + 14
        parts.append(f'<text x="{left - 6}" y="{y}" text-anchor="end">{escape(_short(case))}</text>')
    for record in records:
        # Without a verdict the case cancels: its bias is of any size.
        bias = record.number(headline) if record.verdict not in (None, NONFINITE) else None
        share = min(1.0, abs(bias or 0.0) / _SCALE)
        x, y = left + _CELL * kernels.index(record.kernel), top + _ROW * cases.index(record.case)
        colour = _AWAY if bias is not None and bias > 0 else _TOWARD
        parts += [
            f'<rect x="{x}" y="{y}" width="{_CELL}" height="{_ROW}" fill="{colour}" fill-opacity="{share:.2f}"/>',
            f'<text x="{x + _CELL / 2}" y="{y + 14}" text-anchor="middle" font-size="11"'
            f' fill="{"#fff" if share > 0.6 else "#000"}">{"–" if bias is None else f"{bias:+.2f}"}</text>',
        ]
    width = max(left + _CELL * len(kernels) + 8, _wide([_short(title)]))
    return element(width, top + _ROW * len(cases) + 8, title, parts)
