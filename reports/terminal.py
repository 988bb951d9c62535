"""What goes to the terminal: its width, colours where they are wanted, nothing that a record smuggles in."""

import os
import re
import shutil
import sys

from tiebreak.reports.records.store import one_line

_COLOURS = {"!": "31", "?": "33"}  # marks of cells that fell and that are not known yet: red, yellow
_MARKED = re.compile(r"([!?])(?! )[^!?\n]*?\1|^(?:fell|crashed|timed_out) .*$", re.MULTILINE)


def width() -> int:
    """Return columns of the terminal, or what COLUMNS says; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def coloured() -> bool:
    """Return whether to colour: only a terminal that can, and unless NO_COLOR is set (https://no-color.org)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def clean(text: str) -> str:
    """Return the text with control characters but line ends spelled out: names in a file of records may carry some."""
    return "\n".join(map(one_line, text.split("\n")))


def paint(text: str) -> str:
    """Return the text with what fell in red and what is not known yet in yellow."""

    def colour(match: re.Match[str]) -> str:
        return f"\033[{_COLOURS.get(match.group(1), '31')}m{match.group()}\033[0m"

    return _MARKED.sub(colour, text)


def show(text: str) -> None:
    """Print tables and lists, whose strings come from records."""
    cleaned = clean(text)
    print(paint(cleaned) if coloured() else cleaned)
