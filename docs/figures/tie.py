"""Draws tie.svg, the picture at the top of README.md: python docs/figures/tie.py > docs/figures/tie.svg.

The sum is the paper's worked example (arXiv 2510.04212 v1) without its signs. Text is large: on a phone the picture is
400 pixels wide. It brings its background along: pages are light or dark.
"""

from collections.abc import Iterator

FIRST, SECOND = 2.40625, 2.296875  # two values of V in bf16, each with the weight 1
EVEN, ODD = 4.6875, 4.71875  # bf16's numbers on either side of the sum, by their last bit
TAIL = 0.004  # what the other tokens add; about 0.006 in `tied_maxima[k=2]`
MEASURED = "+0.23"  # ulp, of `tied_maxima[k=2]` with `flash@paper` on a CPU

_WIDTH, _HEIGHT = 900, 690
_INK, _FAINT, _FAIR, _BIASED = "#1f2933", "#5b6875", "#1767a6", "#c2410c"
_FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"
_TITLE = "How a broken tie becomes a bias"
_ABOUT = (
    f"{FIRST} + {SECOND} = {FIRST + SECOND} lies halfway between two numbers of bf16 and goes to the even one, {EVEN}."
    f" With a little more from the other tokens it goes to {ODD}. Half of such sums are ties: without the other tokens"
    " their errors of half an ulp cancel, with them the mean error is a quarter of an ulp, away from zero."
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


def _errors(x: float, y: float, ties: list[int], mean: float, colour: str) -> Iterator[str]:
    """Errors of eight sums, every other one a tie, as bars of half an ulp; their mean is dashed."""
    half = 46  # ulp
    yield f'<path d="M{x:g} {y:g}h330" stroke="{_FAINT}" stroke-width="2"/>'
    for number, sign in enumerate(ties):
        at = x + 57 + 80 * number
        yield f'<rect x="{at:g}" y="{y - half if sign > 0 else y:g}" width="24" height="{half}" fill="{colour}"/>'
        yield f'<circle cx="{at - 28:g}" cy="{y:g}" r="5" fill="{colour}"/>'
    level = y - 2 * half * mean
    yield f'<path d="M{x:g} {level:g}h330" stroke="{colour}" stroke-width="3" stroke-dasharray="9 6"/>'


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


def _third() -> Iterator[str]:
    yield from _heading(498, 3, "Half of such sums are ties. Errors of O, in ulps:")
    yield from _errors(80, 580, [1, -1, -1, 1], 0.0, _FAIR)
    yield from _errors(490, 580, [1, 1, 1, 1], 0.25, _BIASED)
    yield _text(245, 662, "ties to even: mean 0", _FAIR)
    yield _text(655, 662, f"all away: mean ¼, measured {MEASURED}", _BIASED)
    for x in (80, 490):
        yield _text(x - 8, 580 - 40, "½", _FAINT, "end", 22)
        yield _text(x - 8, 588, "0", _FAINT, "end", 22)


def drawing() -> str:
    """The picture as SVG."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}"'
        f' font-family="{_FONT}" role="img">',
        f"<title>{_TITLE}</title>",
        f"<desc>{_ABOUT}</desc>",
        f'<rect x="1" y="1" width="{_WIDTH - 2}" height="{_HEIGHT - 2}" rx="14" fill="#fbfaf7" stroke="#d5d9de"/>',
        *_first(),
        *_second(),
        *_third(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    print(drawing(), end="")
