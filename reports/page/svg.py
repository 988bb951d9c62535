"""Drawings as SVG, in a page or in a file: no library, no network, text that scales with the reader's screen."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import chain

_HEIGHT, _PLOT = 212, 358  # of the plot without its axes, in units of about a pixel
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 12, 46
_LINE = 20  # height of a line of the legend, and of a named row
_LETTER = 7.5  # width of a letter
_LONGEST = 60  # characters of a name
_SHAPES = 3  # of marks: dot, ring, diamond
#: Okabe and Ito's colours as far as they are dark enough for text; dashes tell lines apart without colours.
COLOURS = ("#b34700", "#00507d", "#00664d", "#8a3a6b")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
THEORY = "#4d4d4d"
INK, GRID = "#666", "#ddd"

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line of a figure, or the marks of one kind."""

    label: str
    points: tuple[Point, ...]  # of the line; none: marks alone
    marked: tuple[Point, ...] = ()  # drawn as dots; of marks alone, each series has its own shape
    dashed: bool = False  # a theory, not a measurement
    bars: tuple[tuple[float, float, float], ...] = ()  # x, and from where to where an interval goes


@dataclass(frozen=True)
class Figure:
    """One figure."""

    title: str
    note: str  # what to see in it
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_ticks: tuple[tuple[float, str], ...] = ()  # places and labels; none: even steps
    rows: tuple[str, ...] = ()  # names of the places 0, -1, -2 and so on of y, which is no number then


def tag(name: str, content: str = "", /, **attributes: float | str) -> str:
    """Return an element; names of attributes have - for _, the content is escaped already."""
    pairs = "".join(
        f' {key.replace("_", "-")}="{value if isinstance(value, str) else format(round(value, 1), "g")}"'
        for key, value in attributes.items()
    )
    return f"<{name}{pairs}>{content}</{name}>" if content else f"<{name}{pairs}/>"


def words(x: float, y: float, text: str, anchor: str = "start", /, **attributes: float | str) -> str:
    """Return a line of text, which is escaped here and cut if it is very long."""
    short = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return tag("text", escape(short), x=x, y=y, text_anchor=anchor, **attributes)


def path(steps: str, /, *places: float, **attributes: float | str) -> str:
    """Return a path; `steps` has {} for each of the places."""
    return tag("path", d=steps.format(*(format(round(place, 1), "g") for place in places)), **attributes)


def as_file(*drawings: str) -> str:
    """Return elements, one below the other, as the text of a file on a white ground: pages are light or dark."""
    parts, width, height = list[str](), 0.0, 0.0
    for drawing in drawings:
        wide, high = map(float, drawing.split('"')[1].split()[2:])
        parts.append(drawing.replace("<svg ", f'<svg y="{height:g}" width="{wide:g}" height="{high:g}" ', 1))
        width, height = max(width, wide), height + high
    head = f'<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" viewBox="0 0 {width:g} {height:g}">'
    return "\n".join([head, tag("rect", width="100%", height="100%", fill="#fff"), *parts, "</svg>\n"])


def draw(figure: Figure) -> str:
    """Return the figure as an SVG element with its title for screen readers; strings are escaped."""
    plot = _Plot(figure)
    width, height = plot.right + _RIGHT, plot.bottom + _BOTTOM + _LINE * len(figure.series)
    box = f'viewBox="0 0 {width:g} {height:g}"'
    lines = (plot.line(series, number) for number, series in enumerate(figure.series))
    parts = [f'<svg {box} role="img" aria-label="{escape(figure.title)}" font-size="13">', *plot.axes(), *chain(*lines)]
    return "\n".join([*parts, "</svg>"])


class _Plot:
    """The scales from a figure's numbers to places."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        points = [point for series in figure.series for point in (*series.points, *series.marked)] or [(0.0, 0.0)]
        ends = [end for series in figure.series for _, *both in series.bars for end in both]
        self.x_low, self.x_high = span([*(x for x, _ in points), *([0.0] if figure.rows else [])])
        self.y_low, self.y_high = span([0.0, *(y for _, y in points), *ends])
        self.left, self.top, height = float(_LEFT), float(_TOP), _HEIGHT
        if figure.rows:
            self.y_low, self.y_high, height = 0.5 - len(figure.rows), 0.5, _LINE * len(figure.rows)
            self.left, self.top = _LETTER * min(_LONGEST, max(map(len, figure.rows))) + 12, _TOP + _LINE
        self.right, self.bottom = self.left + _PLOT, self.top + height

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * _PLOT

    def y(self, value: float) -> float:
        return self.bottom - (value - self.y_low) / (self.y_high - self.y_low) * (self.bottom - self.top)

    def axes(self) -> Iterator[str]:
        """Yield grid, tick labels, names of the axes; for a figure of rows its title too, instead of an axis."""
        figure = self.figure
        rows = [(-float(number), name) for number, name in enumerate(figure.rows)]
        for value, label in rows or [(at, f"{at:.4g}") for at in ticks(self.y_low, self.y_high)]:
            y, stroke = self.y(value), INK if value == 0 and not rows else GRID
            yield path("M{} {}H{}", self.left, y, self.right, stroke=stroke)
            yield words(self.left - 6, y + 4, label, "end")
        for place, label in figure.x_ticks or [(at, f"{at:.4g}") for at in ticks(self.x_low, self.x_high)]:
            start = self.top if rows and place == 0 else self.bottom
            yield path("M{} {}V{}", self.x(place), start, self.bottom + 5, stroke=INK)
            yield words(self.x(place), self.bottom + 19, label, "middle")
        yield words((self.left + self.right) / 2, self.bottom + 37, figure.x_label, "middle")
        if rows:
            yield words(0, 16, figure.title, font_weight="bold")
        else:
            turned = f"translate(14 {(self.top + self.bottom) / 2:g}) rotate(-90)"
            yield words(0, 0, figure.y_label, "middle", transform=turned)

    def line(self, series: Series, number: int) -> Iterator[str]:
        """Yield one series, and its entry in the legend below the plot."""
        colour = THEORY if series.dashed else COLOURS[number % len(COLOURS)]
        dash = "4 4" if series.dashed else DASHES[number % len(DASHES)]
        style: dict[str, float | str] = {"fill": "none", "stroke": colour, "stroke_width": 2, "stroke_dasharray": dash}
        shape = 0 if series.points else number % _SHAPES
        y = self.bottom + _BOTTOM + _LINE * number + 12
        if series.points:
            points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in series.points)
            yield tag("polyline", points=points, **style)
            yield path("M{} {}h34", self.left, y, **style)
        else:
            yield _mark(self.left + 17, y, colour, shape)
        yield from (_mark(self.x(x), self.y(y), colour, shape) for x, y in series.marked)
        for x, low, high in series.bars:
            yield path("M{} {}V{}", self.x(x), self.y(low), self.y(high), stroke=colour, stroke_width=1.5)
        yield words(self.left + 42, y + 4, series.label)


def _mark(x: float, y: float, colour: str, shape: int) -> str:
    """Return a dot, a ring or a diamond."""
    if shape == 0:
        return tag("circle", cx=x, cy=y, r=4, fill=colour)
    if shape == 1:
        return tag("circle", cx=x, cy=y, r=3.5, fill="none", stroke=colour, stroke_width=1.5)
    return path("M{} {}l5 -5l5 5l-5 5z", x - 5, y, fill=colour)


def span(values: Sequence[float]) -> tuple[float, float]:
    """Return the range of values, widened where it has no width."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def ticks(low: float, high: float) -> list[float]:
    """Return three to eight round numbers from `low` to `high`."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (5, 2, 1) if (high - low) / (step * factor) >= 3)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]


def section(figures: Sequence[Figure], head: str) -> str:
    """Return figures below a heading, as HTML."""
    parts = [head, '<div class="figures">']
    for each in figures:
        caption = f"<figcaption><b>{escape(each.title)}</b>. {escape(each.note)}</figcaption>"
        parts.append(f"<figure>\n{caption}\n{draw(each)}\n</figure>")
    return "\n".join([*parts, "</div>"])
