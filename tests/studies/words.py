"""The rows of docs/words.md that describe checks."""

from collections.abc import Iterator

from tiebreak.matrix.checks import checks
from tiebreak.studies.pages import PageTable, table


def of_checks() -> Iterator[str]:
    """Yield the table of checks, and which of them are about a cell's rounding."""
    rows = (
        (f'<a id="check-{name}"></a>`{name}`', f"{_capital(check.about)}.".replace("|", r"\|"), check.term)
        for name, check in checks().items()
    )
    yield from table(("check", "what has to hold", "the field's term"), rows, right=False)
    judging = " and ".join(f"`{name}`" for name, check in checks().items() if check.judges)
    yield from ("", f"{judging} are about the cell's rounding. The others hold for any kernel that is not broken.")


def _capital(text: str) -> str:
    """Return a sentence from what is told in a line; a symbol keeps its letter."""
    return text[0].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


TABLES = [PageTable("words.md", "checks", of_checks)]
