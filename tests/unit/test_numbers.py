"""Every table of figures in the README and docs/ is made from records, held by a test, or listed in docs/numbers.toml.

A table counts where two of its cells, beside the first of each row, are nothing but a number. A figure in a sentence
stands in a table or block of its page, or is listed there too.
"""

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tiebreak.backends.backend import EMULATION
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.kernel import composed
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Record
from tiebreak.studies.cells import CASES, judged

ROOT = Path(__file__).parents[2]
LIST: dict[str, Any] = tomllib.loads((ROOT / "docs" / "numbers.toml").read_text(encoding="utf-8"))
ENTRIES: list[dict[str, Any]] = LIST["table"]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
NUMBER = re.compile(r"x?[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
FIGURE = re.compile(rf"[*]*{NUMBER.pattern}(?: %)?(?: ?(?:±|;|,|to) ?[-+]?[\d,.]+)*[*]*(?: [B?][*]*)?(?: of \d+)?")
FROM = re.compile(r"<!-- from (.*?) -->")
# A figure in a sentence: a number with a fraction, or with a unit. Code, links and versions are none.
UNIT = r" (?:%|ulps?\b|times\b|of bits|of \d|CPU|m?s\b|seconds\b|minutes?\b|hours?\b|GB|GiB|MiB)"
BEGINS = r"(?<![\w.,#/^*-])[-+]?\d[\d,]*"
SAID = re.compile(rf"{BEGINS}(?:\.\d+(?:e[-+]?\d+)?|e[-+]?\d+)(?![\w.]*\.\d|\w|\^)|{BEGINS}(?={UNIT})")
SOFTWARE = "Python|PyTorch|Triton|QEMU|oneDNN|CUDA|ROCm|CANN|GCC"
NO_FIGURE = re.compile(
    r"<!-- from.*?<!-- end -->|<!--.*?-->|`[^`]*`|\]\([^)]*\)|https?://\S+|\d+\.\d+\.\d+\S*|\d{4}\.\d{5}"
    rf"|(?:{SOFTWARE}) \(?[\d.]+\d(?:,? (?:and|or|to) [\d.]+\d)*|[vV]ersion \S+",
    re.DOTALL,
)


@dataclass(frozen=True)
class Table:
    """A table of a page, or a block of text that is one."""

    page: str
    mark: str | None  # the source that the marks around it name
    lines: tuple[str, ...]

    def cells(self) -> Iterator[list[str]]:
        """Each row's, below the head."""
        for line in self.lines[2:]:
            separator = r"(?<!\\)\|" if line.startswith("|") else r" {2,}"
            yield [cell.strip() for cell in re.split(separator, line.strip().strip("|"))]

    def has_figures(self) -> bool:
        return sum(FIGURE.fullmatch(cell) is not None for row in self.cells() for cell in row[1:]) > 1


def tables() -> Iterator[Table]:
    for page in PAGES:
        name, mark, fenced = page.relative_to(ROOT).as_posix(), None, False
        lines: list[str] = []
        for line in [*page.read_text(encoding="utf-8").splitlines(), ""]:
            fence = line.startswith("```")
            if lines and (fence or not (fenced or line.startswith("|"))):
                yield Table(name, mark, tuple(lines))
                lines = []
            fenced ^= fence
            if not fence and (fenced or line.startswith("|")):
                lines.append(line)
            if begun := FROM.match(line):
                mark = begun[1]
            elif line.startswith("<!-- end -->"):
                mark = None


TABLES = [table for table in tables() if table.has_figures()]


def entries_of(table: Table) -> list[dict[str, Any]]:
    return [entry for entry in ENTRIES if entry["page"] == table.page and table.lines[0].startswith(entry["head"])]


def tables_of(entry: dict[str, Any]) -> list[Table]:
    return [table for table in TABLES if entry in entries_of(table)]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: f"{table.page}: {table.lines[0][:30]}")
def test_table_is_made_held_or_listed(table: Table) -> None:
    if "report" in table.page and not table.lines[0].startswith("|"):
        return  # a report's output: test_upstream_reports.py runs the script
    if table.mark is None:
        assert len(entries_of(table)) == 1, f"say in docs/numbers.toml where it comes from: {table.lines[0]}"
    else:
        assert table.mark in LIST["marks"], f"say in docs/numbers.toml which test holds it: {table.mark}"


def test_no_entry_is_stale() -> None:
    assert [entry for entry in ENTRIES if len(tables_of(entry)) != 1] == []
    assert set(LIST["marks"]) - {table.mark for table in TABLES} == set()


def test_entries_say_where_their_tables_come_from() -> None:
    for entry in ENTRIES:
        assert len({"records", "emulated", "test", "measured"} & set(entry)) == 1, entry
        assert "measured" not in entry or re.fullmatch(r"[0-9a-f]{7,}", entry["at"]), entry
    named = [
        *LIST["marks"].values(),
        *(entry[kind] for entry in ENTRIES for kind in ("test", "records") if kind in entry),
    ]
    assert [path for path in named if not (ROOT / path).is_file()] == []


@cache
def kept(path: str) -> dict[tuple[str, str], Record]:
    return {(record.case, record.kernel): record for record in store.read(ROOT / path).records}


def emulated(case: str, kernel: str) -> Record:
    return judged(composed(kernel, parse_declaration(kernel)), case, 256, backend=EMULATION)


def assert_says(cell: str, record: Record, measure: str | None, *, marked: bool) -> None:
    """A cell has a record's number, rounded as it is written, and a B where it is biased, if the table has any."""
    assert record.shown is not None
    written, value = cell.strip("*"), record.shown.number if measure is None else record.number(measure)
    number = NUMBER.match(written)
    if number is None or value is None:
        assert (written, record.shown.kind) == ("NaN", "nonfinite"), record.case
        return
    digits, _, exponent = number[0].lstrip("x").replace(",", "").partition("e")
    unit = 10.0 ** (int(exponent or 0) - len(digits.partition(".")[2]))
    told, name = float(digits) * 10.0 ** int(exponent or 0), (record.case, record.kernel)
    assert told == pytest.approx(value, abs=0.505 * unit), name
    if marked and record.shown.kind == "bias":
        assert written.endswith(" B") == (record.verdict == "biased"), name


@pytest.mark.parametrize(
    "entry", [e for e in ENTRIES if "columns" in e], ids=lambda e: f"{e['page']}: {e['head'][:20]}"
)
def test_cells_are_what_records_and_the_emulation_have(entry: dict[str, Any]) -> None:
    (table,) = tables_of(entry)
    compared, marked = 0, any(re.search(r"\d B\b", line) for line in table.lines)
    for first, *cells in table.cells():
        name = re.search(r"`([^`]+)`", first)
        row = name[1] if name else first
        if entry.get("emulated", row) != row or (name is None and row not in CASES):
            continue
        for column, cell in zip(entry["columns"], cells, strict=True):
            if column:
                case, kernel, *measure = column.replace("ROW", row).split()
                record = kept(entry["records"])[case, kernel] if "records" in entry else emulated(case, kernel)
                assert_says(cell, record, measure[0] if measure else None, marked=marked)
                compared += 1
    assert compared


def unbacked(page: Path) -> set[str]:
    """Figures in the sentences of a page that none of its tables and blocks has."""
    sentences: list[str] = []
    shown: list[str] = []
    fenced = False
    for line in page.read_text(encoding="utf-8").splitlines():
        fence = line.startswith("```")
        fenced ^= fence
        if not fence:
            (shown if fenced or line.startswith(("|", "    ")) else sentences).append(line)
    numbers = {abs(number_of(number)) for number in re.findall(NUMBER.pattern, " ".join(shown))}
    figures = set(SAID.findall(NO_FIGURE.sub("", "\n".join(sentences))))
    return {figure for figure in figures if not any(rounds_to(number, figure) for number in numbers)}


def number_of(text: str) -> float:
    return float(text.lstrip("x").replace(",", ""))


def rounds_to(number: float, figure: str) -> bool:
    said = abs(number_of(figure))
    return number == said or ("e" not in figure and round(number, len(figure.partition(".")[2])) == said)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_figure_in_a_sentence_stands_in_a_table_of_its_page_or_is_listed(page: Path) -> None:
    listed = LIST["sentences"].get(page.relative_to(ROOT).as_posix(), {})
    figures = {figure for each in listed.values() for figure in each.split()}
    assert unbacked(page) - figures == set(), (
        "say in docs/numbers.toml, [sentences], at which commit it was measured, or which file has it"
    )
    assert figures - unbacked(page) == set(), "docs/numbers.toml, [sentences]: stale"


def test_listed_sentences_are_those_of_pages_and_name_commits_or_files() -> None:
    assert set(LIST["sentences"]) <= {page.relative_to(ROOT).as_posix() for page in PAGES}
    sources = {at for page in LIST["sentences"].values() for at in page if not re.fullmatch(r"[0-9a-f]{7}", at)}
    assert [at for at in sources if not (ROOT / at).is_file()] == []
