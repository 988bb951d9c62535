"""Attention in 8 bits, docs/fewer-bits.md: its tables are what the script makes."""

import pytest

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.reference import reference
from tiebreak.programs.pages import eight_bits as script
from tiebreak.programs.pages.tables import renewed


@pytest.fixture(scope="module")
def page() -> str:
    text: str = script.PAGE.read_text(encoding="utf-8")
    return text


def test_the_table_of_scales_is_what_the_script_makes(page: str) -> None:
    assert renewed(page, "scales", script.TABLES["scales"]()) == page


def test_where_a_sink_makes_others_0_is_the_closed_form_of_the_paper() -> None:
    _, _, *rows = (line.strip("| ").split(" | ") for line in script.sink())
    apart = [abs(float(cell.rstrip("%"))) for row in rows for cell in row[-2:]]
    assert len(apart) == 6
    assert max(apart) == 2.3  # per cent; the paper has 5


def test_a_column_of_the_fixes_is_what_a_run_gives(page: str) -> None:
    name = "fp8_random"
    inputs = next(case for case in SCRIPTED if case.name == name).make(script.SEED, 0, script.HEADS, BF16)
    ref = reference(inputs).o
    for told, kernel in script.FIX.items():
        row = next(line for line in page.splitlines() if line.startswith(f"| {told} |"))
        column = 1 + script.FIX_CASES.index(name)
        assert row.strip("| ").split(" | ")[column] == script.fix_row(kernel, inputs, ref), told


def test_e4m3_is_worse_than_e5m2_where_the_maximum_lags_and_better_after_the_change() -> None:
    """What users of FlashAttention-4 saw, on fewer keys."""
    head, _, *rows = (line.strip("| ").split(" | ") for line in script.stale(keys=4096, queries=64))
    columns = ("e4m3, 2^8, lag 4", "e5m2, 2^8, lag 4", "e4m3, 2^4, lag 4")
    before, e5m2, after = ([float(row[head.index(name)]) for row in rows] for name in columns)
    assert [one > other for one, other in zip(before, e5m2, strict=True)] == [False, False, True, True, True]
    assert all(one < 0.55 * other for one, other in zip(after, e5m2, strict=True))
