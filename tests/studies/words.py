"""The rows of docs/words.md that describe measures and checks."""

from collections.abc import Iterator, Sequence

from tiebreak.cases.measures import Measure
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiments import kinds
from tiebreak.studies.pages import PageTable, table


def of_measures() -> Iterator[str]:
    """Yield a table of measures for every kind of experiment."""
    for name, kind in kinds().items():
        yield from (f"### Measures of {name}", "", f"{_capital(kind.described.about)}.", "")
        rows = (_row("measure", each.name, _about(each), each.term) for each in kind.measures().values())
        yield from table(("measure", "in one sentence", "the field's term"), rows, right=False)
        yield ""


def of_checks() -> Iterator[str]:
    """Yield the table of checks, and which of them are about a cell's rounding."""
    rows = (_row("check", check.name, f"{_capital(check.about)}.", check.term) for check in checks().values())
    yield from table(("check", "what has to hold", "the field's term"), rows, right=False)
    judging = " and ".join(f"`{name}`" for name, check in checks().items() if check.judges)
    yield from ("", f"{judging} are about the cell's rounding. The others hold for any kernel that is not broken.")


TABLES = [PageTable("words.md", "measures", of_measures), PageTable("words.md", "checks", of_checks)]


def _about(measure: Measure) -> str:
    units = f"{measure.unit.removesuffix('s')}s"
    unit = f" In {units}." if measure.unit and units not in measure.about else ""
    return f"{_capital(measure.about)}.{unit}"


def _row(kind: str, name: str, about: str, term: str) -> Sequence[str]:
    return (f'<a id="{kind}-{name}"></a>`{name}`', about.replace("|", r"\|"), term)


def _capital(text: str) -> str:
    """Return a sentence from what is told in a line; a symbol keeps its letter."""
    return text[0].upper() + text[1:] if text.partition(" ")[0].isalpha() else text
