"""The picture of the mechanism: one tie on bf16's number line, the tail that tips it, and the errors that come of it.

The sum is the paper's worked example (arXiv 2510.04212 v1) without its signs. The histograms are of records. It is
narrow, with large text: on a phone it has 360 pixels. It brings its background along: pages are light or dark.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template

from tiebreak.reports.page.svg import path, tag, words
from tiebreak.reports.records.record import HistogramRecord

#: All but the histograms.
TEMPLATE = Path(__file__).with_name("mechanism.svg")
REACH = 1.5  # ulps that a histogram shows on either side of 0
_INK, _FAINT, _FAIR, _BIASED = "#1f2933", "#5b6875", "#1767a6", "#c2410c"
_WIDTH, _HEIGHT, _BOTTOM = 220.0, 90.0, 690.0  # of a histogram


@dataclass(frozen=True)
class HistogramSide:
    """One of the two histograms."""

    name: str  # of the kernel
    errors: HistogramRecord  # signed errors of O, in ulps
    bias: float  # their mean


def drawing(before: HistogramSide, after: HistogramSide) -> str:
    """Return the picture as SVG, of a kernel whose ties are broken to one side and one whose are not."""
    means = "".join(f" The mean error of {side.name} is {side.bias:+.2f} ulp." for side in (before, after))
    errors = [*_errors(50.0, before, _BIASED), *_errors(330.0, after, _FAIR)]
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(means=escape(means), errors="\n".join(errors))


def _errors(x: float, side: HistogramSide, colour: str) -> Iterator[str]:
    """Yield the histogram of signed errors, and their mean, dashed."""
    errors, y = side.errors, _BOTTOM

    def place(error: float) -> float:
        return x + (error + REACH) / (2 * REACH) * _WIDTH

    lefts = (errors.low + number * errors.width for number in range(len(errors.counts)))
    bins = [(left, count) for left, count in zip(lefts, errors.counts, strict=True) if -REACH <= left < REACH]
    most = max(count for _, count in bins)
    for left, count in bins:
        if (tall := _HEIGHT * count / most) >= 0.5:
            wide = place(errors.width) - place(0) - 1
            yield tag("rect", x=place(left), y=y - tall, width=wide, height=tall, fill=colour)
    yield path("M{} {}h{}", x, y, _WIDTH, stroke=_FAINT, stroke_width=2)
    yield path("M{} {}V{}", place(0), y - _HEIGHT, y + 8, stroke=_FAINT, stroke_width=2)
    mean = place(side.bias)
    yield path("M{} {}V{}", mean, y - _HEIGHT - 8, y + 8, stroke=_INK, stroke_width=4, stroke_dasharray="9 5")
    middle = x + _WIDTH / 2
    marks = [(place(at), 30, f"{at:+g}" if at else "0", _FAINT) for at in (-REACH, 0.0, REACH)]
    for at, below, text, fill in [*marks, (middle, 62, side.name, colour), (middle, 92, f"{side.bias:+.2f}", colour)]:
        yield words(at, y + below, text, "middle", fill=fill, font_size=22)
