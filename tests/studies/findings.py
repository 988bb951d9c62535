"""The tables of docs/findings.md, from the list that `tiebreak findings` asks by, and the index of findings/."""

from collections.abc import Iterator

from tiebreak.laboratory.findings import known_findings, surprises
from tiebreak.studies.pages import PageTable, table

_HEAD = ("what, where", "how large", "who is hit", "shown by", "guarded by", "mended by")


def rows(section: str) -> Iterator[str]:
    """Yield the table of one section of the page."""
    found = [each for each in known_findings() if each.section == section]
    cells = ((each.what, each.size, each.hit, each.shown, each.guarded, each.mended) for each in found)
    yield from table(_HEAD, cells, right=False)


def index() -> Iterator[str]:
    """Yield a line for each script of findings/, with the sentence that it begins with."""
    return (f"- [{name}]({name}.sh): {sentence}" for name, sentence in surprises().items())


def _table(section: str) -> PageTable:
    return PageTable("findings.md", section, lambda: rows(section))


TABLES = [_table(section) for section in dict.fromkeys(each.section for each in known_findings())]
TABLES.append(PageTable("../findings/README.md", "the scripts", index))
