"""One table in every format."""

import csv
import io

import pytest

from tiebreak.reports.tables.grids import Grid, Part, csv_text, html, text

pytestmark = pytest.mark.quick

GRID = Grid(["case", "flash@all_bf16", "<b>|x_y"], [["a_b", "one\ntwo", None], ["c", "+0.23 B", "<i>"]], "cpu & more")
PARTS: tuple[Part, ...] = (GRID, "a <note>\nof two lines", "")


def test_a_terminal_has_names_broken_in_headings_and_lines_of_a_cell_joined() -> None:
    shown = text(PARTS, "simple", 80).splitlines()
    assert shown[0] == "cpu & more"
    assert [line.split() for line in shown[2:5]] == [["case", "flash", "<b>|x_"], ["@all_", "y"], ["bf16"]]
    assert [line.split() for line in shown[6:8]] == [["a_b", "one,", "two"], ["c", "+0.23", "B", "<i>"]]
    assert shown[8:] == ["", "a <note>", "of two lines"]


@pytest.mark.parametrize("width", [10, 80])
def test_a_table_wider_than_the_terminal_is_split_and_every_part_has_the_first_column(width: int) -> None:
    grid = Grid(["name", *(f"kernel{number}" for number in range(9))], [["row", *map(str, range(9))]])
    lines = text([grid], width=width).splitlines()
    assert max(map(len, lines)) <= max(width, 18)  # one column beside the first may be too wide by itself
    heads = [line.split() for line in lines if line.startswith("name")]
    assert [name for head in heads for name in head[1:]] == list(grid.headers[1:])
    assert len(heads) == sum(line.startswith("row") for line in lines) > (width < 80)


def test_github_and_latex_escape() -> None:
    github = text(PARTS, "github")
    assert "cpu &amp; more" in github
    assert "&lt;b>\\|x_y" in github
    assert "one, two" in github
    assert "<" not in github.replace("&lt;", "")
    latex = text(PARTS, "latex").splitlines()
    assert "% of two lines" in latex
    assert any(r"x\_y" in line for line in latex)
    assert [line for line in latex if line and not line.startswith(("%", "\\", " "))] == []


def test_a_page_escapes_keeps_lines_apart_and_folds_all_but_the_first() -> None:
    page = html([GRID, Grid(["x"], [["y"]], "second"), "a <note>\nof two lines"])
    assert '<details open><summary>cpu &amp; more</summary><div class="wide"' in page
    assert "<details><summary>second</summary>" in page
    assert '<th scope="row">a_b</th><td>one<br>two</td><td></td>' in page
    assert '<th scope="col">&lt;b&gt;|x_y</th>' in page
    assert page.endswith("<p>a &lt;note&gt;<br>of two lines</p>")


def test_csv_has_numbers_whole_and_nothing_for_none() -> None:
    grid = Grid(["id", "bias", "passed", "kinds"], [["a", 0.125, True, "x, y\nz"], [None] * 4])
    rows = list(csv.reader(io.StringIO(csv_text(grid))))
    assert rows == [["id", "bias", "passed", "kinds"], ["a", "0.125", "True", "x, y | z"], [""] * 4]
