"""The picture of the mechanism: one tie on bf16's number line, the tail that tips it, and the errors that come of it.

The sum is the paper's worked example (arXiv 2510.04212 v1) without its signs. The histograms are of records. It is
narrow, with large text: on a phone it has 360 pixels. It brings its background along: pages are light or dark.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

from tiebreak.reports.page.svg import dot, path, tag, words
from tiebreak.reports.records.record import HistogramRecord

FIRST, SECOND = 2.40625, 2.296875  # two values of V in bf16, each with the weight 1
EVEN, ODD = 4.6875, 4.71875  # bf16's numbers on either side of the sum, by their last bit
TAIL = 0.004  # what the other tokens add; about 0.006 in `tied_maxima[k=2]`
REACH = 1.5  # ulps that a histogram shows on either side of 0


@dataclass(frozen=True)
class Side:
    """One of the two histograms."""

    name: str  # of the kernel
    errors: HistogramRecord  # signed errors of O, in ulps
    bias: float  # their mean


_WIDTH, _HEIGHT = 600, 800
_INK, _FAINT, _FAIR, _BIASED = "#1f2933", "#5b6875", "#1767a6", "#c2410c"
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_ABOUT = (
    f"{FIRST} + {SECOND} = {FIRST + SECOND} lies halfway between two numbers of bf16 and goes to the even one, {EVEN}."
    f" With a little more from the other tokens it goes to {ODD}."
)


def drawing(before: Side, after: Side) -> str:
    """Return the picture as SVG, of a kernel whose ties are broken to one side and one whose are not."""
    means = "".join(f" The mean error of {side.name} is {side.bias:+.2f} ulp." for side in (before, after))
    parts = [
        tag("title", "How a broken tie becomes a bias"),
        tag("desc", escape(_ABOUT + means)),
        tag("rect", x=1, y=1, width=_WIDTH - 2, height=_HEIGHT - 2, rx=14, fill="#fbfaf7", stroke="#d5d9de"),
        *_heading(42, "1", "Two scores tie for the maximum:", "O adds two values of V"),
        _text(300, 118, f"{FIRST} + {SECOND} = {FIRST + SECOND}, a tie"),
        *_number_line(186),
        *_jump(186, FIRST + SECOND, EVEN, _FAIR),
        _text(118, 164, "to even", _FAIR, "end"),
        _text(570, 172, "bf16", _FAINT, "end"),
        *_heading(284, "2", "The other tokens add a little:", "no tie any more"),
        _text(300, 360, f"{FIRST + SECOND} + {TAIL}"),
        *_number_line(432),
        *_jump(432, FIRST + SECOND + TAIL, ODD, _BIASED),
        _text(418, 410, "away from zero", _BIASED, "start"),
        *_heading(530, "3", "Errors of O over such rows,", "in ulps (dashed: mean)"),
    ]
    for x, side, colour in ((50, before, _BIASED), (330, after, _FAIR)):
        parts += [*_errors(x, 690, side, colour), _text(x + 110, 752, side.name, colour)]
        parts.append(_text(x + 110, 782, f"{side.bias:+.2f}", colour))
    box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {box} font-family="{_FONT}" role="img">'
    return "\n".join([head, *parts, "</svg>\n"])


def _at(value: float) -> float:
    """Return where a value stands on the number line."""
    return 130 + 270 * (value - EVEN) / (ODD - EVEN)


def _text(x: float, y: float, text: str, colour: str = _INK, anchor: str = "middle") -> str:
    return words(x, y, text, anchor, fill=colour, font_size=22)


def _heading(y: float, number: str, *lines: str) -> Iterator[str]:
    yield tag("circle", cx=40, cy=y - 8, r=19, fill="none", stroke=_INK, stroke_width=2)
    yield _text(40, y, number)
    for at, line in enumerate(lines):
        yield words(74, y + 30 * at, line, fill=_INK, font_size=25)


def _number_line(y: float) -> Iterator[str]:
    """Yield the number line with the two numbers of bf16 and, fainter, the place halfway."""
    yield path("M30 {}H570", y, stroke=_INK, stroke_width=2.5)
    yield path("M{} {}v20", _at((EVEN + ODD) / 2), y - 10, stroke=_FAINT, stroke_width=2.5)
    for value, parity in ((EVEN, "even"), (ODD, "odd")):
        yield path("M{} {}v32", _at(value), y - 16, stroke=_INK, stroke_width=4)
        yield _text(_at(value), y + 44, f"{value} ({parity})")


def _jump(y: float, start: float, end: float, colour: str) -> Iterator[str]:
    """Yield a dot on the line and an arrow from it to where it is rounded."""
    x, to = _at(start), _at(end)
    way = 1 if to > x else -1
    curve = (x, y - 12, x, y - 52, to - 8 * way, y - 56, to - 3 * way, y - 30)
    yield path("M{} {}C{} {} {} {} {} {}", *curve, stroke=colour, stroke_width=4.5, fill="none")
    yield path("M{} {}h24l-12 20z", to - 12, y - 34, fill=colour)
    yield dot(x, y, colour, 9)


def _errors(x: float, y: float, side: Side, colour: str) -> Iterator[str]:
    """Yield the histogram of signed errors, and their mean, dashed."""
    width, height, errors = 220.0, 90.0, side.errors

    def place(error: float) -> float:
        return x + (error + REACH) / (2 * REACH) * width

    lefts = (errors.low + number * errors.width for number in range(len(errors.counts)))
    bins = [(left, count) for left, count in zip(lefts, errors.counts, strict=True) if -REACH <= left < REACH]
    most = max(count for _, count in bins)
    for left, count in bins:
        if (tall := height * count / most) >= 0.5:
            wide = place(errors.width) - place(0) - 1
            yield tag("rect", x=place(left), y=y - tall, width=wide, height=tall, fill=colour)
    yield path("M{} {}h{}", x, y, width, stroke=_FAINT, stroke_width=2)
    yield path("M{} {}V{}", place(0), y - height, y + 8, stroke=_FAINT, stroke_width=2)
    mean = place(side.bias)
    yield path("M{} {}V{}", mean, y - height - 8, y + 8, stroke=_INK, stroke_width=4, stroke_dasharray="9 5")
    for error, text in ((-REACH, f"-{REACH:g}"), (0.0, "0"), (REACH, f"+{REACH:g}")):
        yield _text(place(error), y + 30, text, _FAINT)
