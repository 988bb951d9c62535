"""Tables of pages, each between two marks that name its source, so that a program renews them where they stand."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_END = "<!-- end -->"


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
