"""Training runs over seeds as a figure in a file of its own."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from types import MappingProxyType

from tiebreak.reports.errors import UsageError
from tiebreak.reports.page.svg import COLOURS, GRID, INK, THEORY, as_file, element, span, ticks
from tiebreak.reports.records import store
from tiebreak.reports.tables.training import TrainingGrid

_LONGEST = 60  # characters of a name
_LETTER, _ROW = 7.5, 20  # width of a letter, height of a row
_PANEL, _GAP = 150, 22  # width of a snippet's panel, and what lies between two
_ROUNDED = "_l_rounded"  # ends the names of kernels that sum l from rounded P-bar
_SHIFT = 3.5  # by which the two sums of l stand apart in a row


def save_training(grids: Sequence[TrainingGrid], path: Path) -> None:
    """Draw the training runs: a row a kernel, a column a snippet, a mark for every seed.

    Kernels that differ in the sum of l alone share a row.

    Raises:
        UsageError: a path that does not end in .svg.
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
    left, first = _LETTER * max(map(len, names), default=0) + 12, top + 76
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
