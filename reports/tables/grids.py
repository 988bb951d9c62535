"""Grids of text, as a terminal, GitHub or LaTeX takes them."""

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from tabulate import tabulate

_GAP = 2  # characters between the columns of a table in tabulate's style "simple"
_PADDING = 2  # characters by which tabulate makes a column wider than its heading


def grid_text(rows: Sequence[Sequence[str]], headers: Sequence[str], tablefmt: str) -> str:
    """A table with its first column to the left, the others to the right."""
    if tablefmt == "github":
        # A bar would end the cell, and names may hold HTML, which GitHub renders.
        rows = [[_escaped(text) for text in row] for row in rows]
        headers = [_escaped(text) for text in headers]
    aligned = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers=headers, tablefmt=tablefmt, colalign=aligned, disable_numparse=True)


def fitted(rows: Sequence[Sequence[str]], headers: Sequence[str], tablefmt: str, width: int | None) -> list[str]:
    """A grid as one table or as several, each with the first column, so that none is wider than need be.

    Args:
        rows: texts, one a column.
        headers: one a column, of one line.
        tablefmt: tabulate's name of the table's style.
        width: of the terminal, in columns; one column beside the first may be too wide by itself. None: no limit.
    """
    columns = zip(headers, *rows, strict=True)
    sizes = [max(len(head) + _PADDING, *map(len, texts)) + _GAP for head, *texts in columns]
    chosen: list[list[int]] = [[]]
    for column in range(1, len(sizes)):
        taken = sizes[0] + sum(sizes[place] for place in chosen[-1])
        if chosen[-1] and width is not None and taken + sizes[column] - _GAP > width:
            chosen.append([])
        chosen[-1].append(column)
    parts = [(0, *part) for part in chosen]
    return [
        grid_text([[row[place] for place in part] for row in rows], [headers[place] for place in part], tablefmt)
        for part in parts
    ]


def csv_text(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows by the names of their columns as CSV; what a row has None of is empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def aside(text: str, tablefmt: str) -> str:
    """Text between tables, as the format takes it."""
    if tablefmt == "latex":
        return "\n".join(f"% {line}" for line in text.splitlines())
    return _escaped(text) if tablefmt == "github" else text


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|")


def broken(name: str) -> str:
    """A column's heading on several lines: names break before @ and after _."""
    return name.replace("@", "\n@").replace("_", "_\n").replace("_\n\n", "_\n")
