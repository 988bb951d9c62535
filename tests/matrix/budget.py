"""A time for a whole run: the cells that tell most come first, and those that it has no room for are left out."""

import functools
import re
from collections.abc import Mapping
from pathlib import Path

from tiebreak.matrix.experiment import Cell

#: Cases, the one that tells most in a second first: docs/power.md says what that rests on.
ORDER_FILE = Path(__file__).with_name("order.txt")
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}


def seconds_of(text: str) -> float | None:
    """Seconds of a time such as 60, 60s, 1.5m or 1h; None if it is none, or less than a second."""
    matched = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)([smh]?)", text.strip())
    seconds = float(matched[1]) * _UNITS[matched[2]] if matched else 0.0
    return seconds if seconds >= 1 else None


@functools.cache
def _order() -> Mapping[str, int]:
    return {name: place for place, name in enumerate(ORDER_FILE.read_text(encoding="utf-8").split())}


@functools.cache
def needed() -> frozenset[str]:
    """The cases without which a verdict on a kernel says little: those above the order's empty line."""
    return frozenset(ORDER_FILE.read_text(encoding="utf-8").partition("\n\n")[0].split())


def rank(cell: Cell) -> tuple[int, float]:
    """Where a budget has a cell: the least first; behind those of the order the cheapest."""
    return _order().get(cell.experiment.name, len(_order())), cell.experiment.cost(cell.backend)
