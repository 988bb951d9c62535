"""Tables of docs/, each between two marks that name its source, and the frozen CSV files that some are made from."""

import csv
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from tiebreak.backends.provenance import CHECKOUT, commit

DOCS = CHECKOUT / "docs"
_END = "<!-- end -->"
_MEASURED = "# measured at "  # begins a frozen file, before the commit
_Row = TypeVar("_Row")


@dataclass(frozen=True)
class PageTable:
    """What stands between two marks of a page."""

    page: str  # its file in docs/
    source: str  # what it is made from, as the first mark names it
    make: Callable[[], Iterable[str]]  # its lines

    @property
    def path(self) -> Path:
        """Return the page's file."""
        return DOCS / self.page

    def renewed(self) -> str:
        """Return the page's text with this table made anew."""
        return renewed(self.path.read_text(encoding="utf-8"), self.source, self.make())

    def is_stale(self) -> bool:
        """Return whether the page has something else than what is made."""
        return self.renewed() != self.path.read_text(encoding="utf-8")

    def renew(self) -> None:
        """Write the page with this table made anew."""
        self.path.write_text(self.renewed(), encoding="utf-8")


def renewed(text: str, source: str, lines: Iterable[str]) -> str:
    """Return a page with what stands between the marks of a source replaced.

    Raises:
        ValueError: the page has no such marks.
    """
    begin = f"<!-- from {source} -->"
    before, marked, rest = text.partition(begin)
    _, ended, after = rest.partition(_END)
    if not marked or not ended:
        raise ValueError(f"a page lacks the mark {begin} or {_END} behind it")
    return "\n".join([before + begin, "", *lines, "", _END + after])


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: bool = True) -> Iterator[str]:
    """Yield the lines of a Markdown table.

    Args:
        head: the columns' names.
        rows: their cells.
        right: whether all columns but the first stand to the right, as numbers do.
    """
    yield f"| {' | '.join(head)} |"
    yield "|---|" + ("---:|" if right else "---|") * (len(head) - 1)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Freeze rows, all of one dataclass, in a CSV file, behind a line with the commit they were measured at."""
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"{_MEASURED}{commit()}\n")
        writer = csv.DictWriter(file, [field.name for field in fields(rows[0])], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(vars, rows))


def read_rows(path: Path, kind: type[_Row]) -> list[_Row]:
    """Return the rows of a frozen file, as a dataclass whose fields are texts and numbers."""
    dataclass: Any = kind
    types: dict[str, Any] = {field.name: field.type for field in fields(dataclass)}
    with path.open(encoding="utf-8", newline="") as file:
        next(file)
        return [kind(**{name: types[name](text) for name, text in row.items()}) for row in csv.DictReader(file)]


def measured_at(path: Path) -> str:
    """Return the commit that a frozen file was measured at, in short, as Markdown."""
    with path.open(encoding="utf-8") as file:
        return f"`{next(file).removeprefix(_MEASURED)[:7]}`"
