"""The picture of the mechanism: one tie on bf16's number line, the tail that tips it, and the errors that come of it.

The sum is the paper's worked example (arXiv 2510.04212 v1) without its signs. The histograms are of records. Text is
large: on a phone the picture is 400 pixels wide. It brings its background along: pages are light or dark.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape

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


_WIDTH, _HEIGHT = 900, 730
_INK, _FAINT, _FAIR, _BIASED = "#1f2933", "#5b6875", "#1767a6", "#c2410c"
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_TITLE = "How a broken tie becomes a bias"
_ABOUT = (
    f"{FIRST} + {SECOND} = {FIRST + SECOND} lies halfway between two numbers of bf16 and goes to the even one, {EVEN}."
    f" With a little more from the other tokens it goes to {ODD}."
)


def _at(value: float) -> float:
    """Where a value stands on the number line."""
    return 300 + 300 * (value - EVEN) / (ODD - EVEN)


def _text(x: float, y: float, text: str, colour: str = _INK, anchor: str = "middle", size: int = 24) -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}" font-size="{size}">{text}</text>'


def _heading(y: float, number: int, text: str) -> Iterator[str]:
    yield f'<circle cx="52" cy="{y - 9:g}" r="20" fill="{_INK}"/>'
    yield _text(52, y, str(number), "#ffffff")
    yield _text(88, y, text, anchor="start", size=27)


def _line(y: float) -> Iterator[str]:
    """The number line with the two numbers of bf16 and, fainter, the place halfway."""
    yield f'<path d="M70 {y:g}H830" stroke="{_INK}" stroke-width="2.5"/>'
    yield f'<path d="M{_at((EVEN + ODD) / 2):g} {y - 10:g}v20" stroke="{_FAINT}" stroke-width="2.5"/>'
    for value, parity in ((EVEN, "even"), (ODD, "odd")):
        yield f'<path d="M{_at(value):g} {y - 16:g}v32" stroke="{_INK}" stroke-width="4"/>'
        yield _text(_at(value), y + 46, f"{value} <tspan fill='{_FAINT}'>({parity})</tspan>")


def _jump(y: float, start: float, end: float, colour: str) -> Iterator[str]:
    """A dot on the line and an arrow from it to where it is rounded."""
    from_x, to_x = _at(start), _at(end)
    towards = 1 if to_x > from_x else -1
    yield (
        f'<path d="M{from_x:g} {y - 12:g}C{from_x:g} {y - 52:g} {to_x - 8 * towards:g} {y - 56:g}'
        f' {to_x - 3 * towards:g} {y - 30:g}" stroke="{colour}" stroke-width="4.5" fill="none"/>'
    )
    yield f'<path d="M{to_x - 12:g} {y - 34:g}h24l-12 20z" fill="{colour}"/>'
    yield f'<circle cx="{from_x:g}" cy="{y:g}" r="9" fill="{colour}"/>'


def _errors(x: float, y: float, side: Side, colour: str) -> Iterator[str]:
    """The histogram of signed errors, and their mean, dashed."""
    width, height = 330.0, 96.0
    errors = side.errors
    bins = [
        (left, count)
        for number, count in enumerate(errors.counts)
        if -REACH <= (left := errors.low + number * errors.width) < REACH
    ]
    most = max(count for _, count in bins)

    def place(error: float) -> float:
        return x + (error + REACH) / (2 * REACH) * width

    wide = place(errors.width) - place(0) - 1
    for left, count in bins:
        tall = height * count / most
        if tall >= 0.5:
            at = f'x="{place(left):.1f}" y="{y - tall:.1f}"'
            yield f'<rect {at} width="{wide:.1f}" height="{tall:.1f}" fill="{colour}"/>'
    yield f'<path d="M{x:g} {y:g}h{width:g}" stroke="{_FAINT}" stroke-width="2"/>'
    yield f'<path d="M{place(0):g} {y - height:g}V{y + 8:g}" stroke="{_FAINT}" stroke-width="2"/>'
    mean = place(side.bias)
    dashed = f'stroke="{_INK}" stroke-width="4" stroke-dasharray="9 5"'
    yield f'<path d="M{mean:.1f} {y - height - 8:g}V{y + 8:g}" {dashed}/>'
    for error, text in ((-REACH, f"-{REACH:g}"), (0.0, "0"), (REACH, f"+{REACH:g}")):
        yield _text(place(error), y + 30, text, _FAINT, size=22)


def _first() -> Iterator[str]:
    yield from _heading(52, 1, "Two scores tie for the maximum: O adds two values of V")
    yield _text(450, 104, f"{FIRST} + {SECOND} = {FIRST + SECOND}, a tie")
    yield from _line(176)
    yield from _jump(176, FIRST + SECOND, EVEN, _FAIR)
    yield _text(272, 156, "to even", _FAIR, "end")
    yield _text(830, 162, "bf16", _FAINT, "end")


def _second() -> Iterator[str]:
    yield from _heading(276, 2, "The other tokens add a little: no tie any more")
    yield _text(450, 326, f"{FIRST + SECOND} + {TAIL}")
    yield from _line(398)
    yield from _jump(398, FIRST + SECOND + TAIL, ODD, _BIASED)
    yield _text(628, 378, "away from zero", _BIASED, "start")


def _third(before: Side, after: Side) -> Iterator[str]:
    yield from _heading(498, 3, "Errors of O over such rows, in ulps (dashed: mean)")
    for x, side, colour in ((80, before, _BIASED), (490, after, _FAIR)):
        yield from _errors(x, 634, side, colour)
        yield _text(x + 165, 704, f"{escape(side.name)}: {side.bias:+.2f}", colour)


def _means(*sides: Side) -> str:
    return " ".join(f"The mean error of {escape(side.name)} is {side.bias:+.2f} ulp." for side in sides)


def drawing(before: Side, after: Side) -> str:
    """The picture as SVG, of a kernel whose ties are broken to one side and one whose are not; names are escaped."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' font-family="{_FONT}" role="img">',
        f"<title>{_TITLE}</title>",
        f"<desc>{_ABOUT} {_means(before, after)}</desc>",
        f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="14" fill="#fbfaf7" stroke="#d5d9de"/>',
        *_first(),
        *_second(),
        *_third(before, after),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"
