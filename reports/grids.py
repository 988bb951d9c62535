"""Grids of text, as a terminal, GitHub or LaTeX takes them."""

from collections.abc import Sequence

from tabulate import tabulate


def grid_text(rows: Sequence[Sequence[str]], headers: Sequence[str], tablefmt: str) -> str:
    """A table with its first column to the left, the others to the right."""
    if tablefmt == "github":
        # A bar would end the cell, and names may hold HTML, which GitHub renders.
        rows = [[_escaped(text) for text in row] for row in rows]
        headers = [_escaped(text) for text in headers]
    aligned = ("left", *("right" for _ in headers[1:]))
    return tabulate(rows, headers=headers, tablefmt=tablefmt, colalign=aligned, disable_numparse=True)


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
