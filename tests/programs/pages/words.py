"""`python -m tiebreak.programs.pages.words` renews the rows of docs/words.md that describe checks."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tiebreak.matrix.checks import checks
from tiebreak.programs.pages.tables import Tables, renew_tables, table

PAGE = Path(__file__).parents[3] / "docs" / "words.md"


def of_checks() -> Iterator[str]:
    """The table of checks, and which of them are about a cell's rounding."""
    rows = (_row("check", check.name, f"{_capital(check.about)}.", check.term) for check in checks().values())
    yield from table(("check", "what has to hold", "the field's term"), rows, right=False)
    judging = " and ".join(f"`{name}`" for name, check in checks().items() if check.judges)
    yield from ("", f"{judging} are about the cell's rounding. The others hold for any kernel that is not broken.")


TABLES: Tables = {"checks": of_checks}


def _row(kind: str, name: str, about: str, term: str) -> Sequence[str]:
    return (f'<a id="{kind}-{name}"></a>`{name}`', about.replace("|", r"\|"), term)


def _capital(text: str) -> str:
    """A sentence from what is told in a line; a symbol keeps its letter."""
    return text[0].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


if __name__ == "__main__":
    sys.exit(renew_tables(PAGE, TABLES))
