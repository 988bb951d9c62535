"""A figure as SVG, in a page or in a file: no library, no network, text that scales with the reader's screen."""

import math
from collections.abc import Sequence
from html import escape

from tiebreak.reports.page.figures import Figure, Series

_WIDTH, _HEIGHT = 440, 270  # of the plot with its axes, in units of about a pixel
_LEFT, _RIGHT, _TOP, _BOTTOM = 70, 12, 12, 46
_LINE = 20  # height of a line of the legend
#: Okabe and Ito's colours as far as they are dark enough for text; dashes tell lines apart without colours.
COLOURS = ("#b34700", "#00507d", "#00664d", "#8a3a6b")
DASHES = ("", "7 3", "2 3", "9 3 2 3")
THEORY = "#4d4d4d"
INK, GRID = "#666", "#ddd"


def draw(figure: Figure) -> str:
    """The figure as an SVG element with its title for screen readers; strings are escaped."""
    plot = _Plot(figure)
    height = _HEIGHT + _LINE * len(figure.series)
    parts = plot.axes()
    for number, series in enumerate(figure.series):
        parts += plot.line(series, number)
    return element(_WIDTH, height, figure.title, parts)


def element(width: float, height: float, title: str, parts: Sequence[str]) -> str:
    """A drawing as an SVG element, with its title, escaped here, for screen readers."""
    box = f'viewBox="0 0 {width:g} {height:g}"'
    return "\n".join([f'<svg {box} role="img" aria-label="{escape(title)}" font-size="13">', *parts, "</svg>"])


def as_file(drawing: str) -> str:
    """An element as the text of a file, on a ground of its own: pages that show it are light or dark."""
    opened = drawing.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" font-family="sans-serif" ', 1)
    head, _, rest = opened.partition("\n")
    return f'{head}\n<rect width="100%" height="100%" fill="#fff"/>\n{rest}\n'


def _colour(series: Series, number: int) -> str:
    return THEORY if series.dashed else COLOURS[number % len(COLOURS)]


class _Plot:
    """From a figure's numbers to places."""

    def __init__(self, figure: Figure) -> None:
        self.figure = figure
        points = [point for series in figure.series for point in series.points] or [(0.0, 0.0)]
        self.x_low, self.x_high = span([x for x, _ in points])
        ends = [end for series in figure.series for _, *both in series.bars for end in both]
        self.y_low, self.y_high = span([0.0, *(y for _, y in points), *ends])

    def x(self, value: float) -> float:
        return _LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (_WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        return _HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * (_HEIGHT - _TOP - _BOTTOM)

    def axes(self) -> list[str]:
        """Grid, tick labels, names of the axes."""
        right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
        parts = []
        for value in ticks(self.y_low, self.y_high):
            y, stroke = self.y(value), INK if value == 0 else GRID
            parts.append(f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="{stroke}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
        for place, label in self.figure.x_ticks or [(at, f"{at:.4g}") for at in ticks(self.x_low, self.x_high)]:
            x = self.x(place)
            parts.append(f'<path d="M{x:.1f} {bottom}v5" stroke="{INK}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 19}" text-anchor="middle">{escape(label)}</text>')
        middle = (_TOP + bottom) / 2
        named = f'<text x="{(_LEFT + right) / 2}" y="{bottom + 37}" text-anchor="middle">'
        turned = f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">'
        return [
            *parts,
            f"{named}{escape(self.figure.x_label)}</text>",
            f"{turned}{escape(self.figure.y_label)}</text>",
        ]

    def line(self, series: Series, number: int) -> list[str]:
        """One series and its entry in the legend below the plot."""
        colour = _colour(series, number)
        dash = "4 4" if series.dashed else DASHES[number % len(DASHES)]
        style = f'fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"'
        points = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in series.points)
        dots = "".join(
            f'<circle cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="4" fill="{colour}"/>' for x, y in series.marked
        )
        bars = "".join(
            f'<path d="M{self.x(x):.1f} {self.y(low):.1f}V{self.y(high):.1f}" stroke="{colour}" stroke-width="1.5"/>'
            for x, low, high in series.bars
        )
        y = _HEIGHT + _LINE * number + 8
        entry = f'<path d="M{_LEFT} {y}h34" {style}/><text x="{_LEFT + 42}" y="{y + 4}">{escape(series.label)}</text>'
        return [f'<polyline points="{points}" {style}/>', dots + bars, entry]


def span(values: Sequence[float]) -> tuple[float, float]:
    """The range of values, widened where it has no width."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 1, high + 1)


def ticks(low: float, high: float) -> list[float]:
    """Three to eight round numbers from `low` to `high`."""
    step = 10 ** math.floor(math.log10((high - low) / 3))
    step *= next(factor for factor in (5, 2, 1) if (high - low) / (step * factor) >= 3)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(first, last + 1)]
