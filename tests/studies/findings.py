"""The tables of docs/findings.md, from the list that `tiebreak findings` asks by."""

from collections.abc import Iterator

from tiebreak.programs.findings import known_findings
from tiebreak.studies.pages import PageTable, table

_HEAD = ("what, where", "how large", "who is hit", "shown by", "guarded by", "mended by")


def rows(section: str) -> Iterator[str]:
    """Yield the table of one section of the page."""
    found = [each for each in known_findings() if each.section == section]
    cells = ((each.what, each.size, each.hit, each.shown, each.guarded, each.mended) for each in found)
    yield from table(_HEAD, cells, right=False)


def _table(section: str) -> PageTable:
    return PageTable("findings.md", section, lambda: rows(section))


TABLES = [_table(section) for section in dict.fromkeys(each.section for each in known_findings())]
