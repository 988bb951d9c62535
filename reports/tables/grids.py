"""Tables as plain data, and how a terminal, GitHub, LaTeX, a page and CSV take them.

What is to be shown is a list of parts: grids, and the paragraphs between them.
"""

import csv
import io
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from tabulate import tabulate

from tiebreak.reports import terminal

_GAP = 2  # characters between the columns of a table in tabulate's style "simple"
_PADDING = 2  # characters by which tabulate makes a column wider than its heading
_HEADING = 26  # characters of a line of a heading on a terminal


@dataclass(frozen=True)
class Grid:
    """A table. A cell may have several lines: a page and CSV keep them apart, the other formats join them."""

    headers: Sequence[str]
    rows: Sequence[Sequence[Any]]  # one value a header, the first names the row; None: nothing
    title: str = ""  # above it


Part = Grid | str  # a string is a paragraph, perhaps of several lines


def show(parts: Iterable[Part], tablefmt: str = "simple") -> None:
    """Print parts, in a format for the terminal as wide as it is."""
    terminal.show(text(parts, tablefmt, terminal.width() if tablefmt == "simple" else None))


def text(parts: Iterable[Part], tablefmt: str = "simple", width: int | None = None) -> str:
    """Return parts as a terminal, GitHub or LaTeX takes them.

    `tablefmt` is tabulate's name of the tables' style. Tables that are wider than `width`, in columns, are split.
    """
    texts: list[str] = []
    for part in parts:
        if isinstance(part, Grid):
            texts += [_paragraph(part.title, tablefmt), *_tables(part, tablefmt, width)]
        else:
            texts.append(_paragraph(part, tablefmt))
    return "\n\n".join(filter(None, texts))


def _tables(grid: Grid, tablefmt: str, width: int | None) -> Iterator[str]:
    """Yield a grid as one table or as several, each with the first column, so that none is wider than need be."""
    headers = [_broken(head) for head in grid.headers] if tablefmt == "simple" else list(grid.headers)
    rows = [["" if value is None else ", ".join(str(value).split("\n")) for value in row] for row in grid.rows]
    columns = zip(headers, *rows, strict=True)
    sizes = [max([_PADDING + max(map(len, head.split("\n"))), *map(len, texts)]) + _GAP for head, *texts in columns]
    chosen: list[list[int]] = [[0]]
    for column in range(1, len(sizes)):
        taken = sum(sizes[place] for place in chosen[-1])
        if len(chosen[-1]) > 1 and width is not None and taken + sizes[column] - _GAP > width:
            chosen.append([0])
        chosen[-1].append(column)
    if tablefmt == "github":
        # A bar would end the cell, and names may hold HTML, which GitHub renders.
        headers, *rows = ([_escaped(cell) for cell in line] for line in (headers, *rows))
    for part in chosen:
        head, *lines = ([line[at] for at in part] for line in (headers, *rows))
        aligned = ["left", *("right" for _ in part[1:])]
        yield tabulate(lines, headers=head, tablefmt=tablefmt, colalign=aligned, disable_numparse=True)


def _broken(head: str) -> str:
    """Return a heading on several lines: names break before @ and after _, others where they would be too long."""
    lines = head.replace("@", "\n@").replace("_", "_\n").replace("_\n\n", "_\n").split("\n")
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _HEADING) or [""])


def _paragraph(paragraph: str, tablefmt: str) -> str:
    if tablefmt == "latex":
        return "\n".join(f"% {line}" for line in paragraph.splitlines())
    return _escaped(paragraph) if tablefmt == "github" else paragraph


def _escaped(words: str) -> str:
    return words.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def html(parts: Iterable[Part]) -> str:
    """Return parts as HTML: strings are escaped, wide tables scroll, titled ones are folded but for the first."""
    texts: list[str] = []
    opened = " open"
    for part in parts:
        if not isinstance(part, Grid):
            texts.append(f"<p>{_lines(part)}</p>")
        elif part.title:
            texts.append(f"<details{opened}><summary>{escape(part.title)}</summary>{_table(part)}</details>")
            opened = ""
        else:
            texts.append(_table(part))
    return "\n".join(texts)


def _table(grid: Grid) -> str:
    """Return a grid in a box that scrolls where it is wider than the screen."""
    head = "".join(f'<th scope="col">{escape(text)}</th>' for text in grid.headers)
    body = "".join(
        f'<tr><th scope="row">{_lines(first)}</th>{"".join(f"<td>{_lines(value)}</td>" for value in rest)}</tr>'
        for first, *rest in grid.rows
    )
    table = f'<table class="grid"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
    label = escape(grid.title or grid.headers[0])
    return f'<div class="wide" tabindex="0" role="region" aria-label="{label}">{table}</div>'


def _lines(value: Any) -> str:
    return "" if value is None else escape(str(value)).replace("\n", "<br>")


def csv_text(grid: Grid) -> str:
    """Return a grid as CSV; what is None is empty, lines of a cell have bars between them."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(grid.headers)
    writer.writerows([v.replace("\n", " | ") if isinstance(v, str) else v for v in row] for row in grid.rows)
    return out.getvalue()
