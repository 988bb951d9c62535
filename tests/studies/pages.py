"""Tables of pages, each between two marks that name its source, so that a program renews them where they stand."""

import argparse
import csv
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

_END = "<!-- end -->"
_Row = TypeVar("_Row")
Tables = Mapping[str, Callable[[], Iterator[str]]]  # what makes the lines of a table, by the source that its marks name


def table(head: Sequence[str], rows: Iterable[Sequence[str]], right: bool = True) -> Iterator[str]:
    """The lines of a table.

    Args:
        head: the columns' names.
        rows: their cells.
        right: whether all columns but the first stand to the right, as numbers do.
    """
    yield f"| {' | '.join(head)} |"
    yield "|---|" + ("---:|" if right else "---|") * (len(head) - 1)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def renewed(text: str, source: str, lines: Iterable[str]) -> str:
    """A page with what stands between the marks of a source replaced.

    Args:
        text: of the page.
        source: what the lines are made from, as the first mark names it.
        lines: what is to stand there.

    Raises:
        ValueError: the page has no such marks.
    """
    begin = f"<!-- from {source} -->"
    before, marked, rest = text.partition(begin)
    _, ended, after = rest.partition(_END)
    if not marked or not ended:
        raise ValueError(f"a page lacks the mark {begin} or {_END} behind it")
    return "\n".join([before + begin, "", *lines, "", _END + after])


def renew(page: Path, source: str, lines: Iterable[str]) -> None:
    """Write a page anew, with what stands between the marks of a source replaced.

    Args:
        page: its file.
        source: as of `renewed`.
        lines: as of `renewed`.
    """
    page.write_text(renewed(page.read_text(encoding="utf-8"), source, lines), encoding="utf-8")


def renew_tables(page: Path, tables: Tables, arguments: Sequence[str] | None = None) -> int:
    """The command line of a program that makes the tables of a page: those that are named, or all.

    Args:
        page: its file.
        tables: all of them.
        arguments: their names; those of the process by default.

    Returns:
        0. A table that there is not ends the process with 2.
    """
    parser = argparse.ArgumentParser(description=f"Renew tables of {page.name}.")
    parser.add_argument("tables", nargs="*", metavar="TABLE", help=f"one of: {', '.join(tables)} (default: all)")
    names: list[str] = parser.parse_args(arguments).tables
    for unknown in (name for name in names if name not in tables):
        parser.error(f"no table {unknown}; there are {', '.join(tables)}")
    for name in names or tables:
        renew(page, name, tables[name]())
        print(name, file=sys.stderr, flush=True)
    return 0


def write_rows(path: Path, kind: type[Any], rows: Iterable[Any]) -> None:
    """Keep rows as a CSV file, once all are there: a run that is stopped leaves the file as it was.

    Args:
        path: of the file.
        kind: the dataclass of a row.
        rows: of that kind.
    """
    lines = [vars(row) for row in rows]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(kind)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)


def read_rows(path: Path, kind: type[_Row]) -> list[_Row]:
    """The rows of a CSV file.

    Args:
        path: of the file.
        kind: the dataclass of a row, whose fields are texts and numbers.
    """
    dataclass: Any = kind
    types: dict[str, Any] = {field.name: field.type for field in fields(dataclass)}
    with path.open(encoding="utf-8", newline="") as file:
        return [kind(**{name: types[name](text) for name, text in row.items()}) for row in csv.DictReader(file)]
