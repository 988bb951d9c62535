"""The tables of docs/science.md: rows, ranges, and the document itself."""

from dataclasses import replace

import pytest

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.gpt2 import tables
from tiebreak.cases.gpt2.__main__ import HEADLINES
from tiebreak.cases.gpt2.isolation import PAPER, IsolationRow, isolation_rows
from tiebreak.cases.gpt2.snippets import DRIFT, RUNAWAY, SNIPPETS, run_snippet
from tiebreak.cases.gpt2.tables import Range
from tiebreak.cases.gpt2.variants import isolation, variants

SHORT_DRIFT, SHORT_RUNAWAY = replace(DRIFT, steps=8), replace(RUNAWAY, steps=2)


@pytest.fixture(scope="module")
def rows() -> dict[str, IsolationRow]:
    found = isolation_rows(EMULATION.arithmetic, 0, row_sum_from_rounded=True, drift=SHORT_DRIFT, runaway=SHORT_RUNAWAY)
    return {row.change: row for row in found}


def test_section_3_2_has_a_row_a_change(rows: dict[str, IsolationRow]) -> None:
    assert list(rows) == list(PAPER) == list(isolation(row_sum_from_rounded=True))


@pytest.mark.parametrize("change", PAPER)
def test_what_stops_the_drift(rows: dict[str, IsolationRow], change: str) -> None:
    assert rows[change].stops_drift == (change not in STOPS_NOT)


# While the sinks' scores are equal. Later in snippet A they part by an ulp of bf16, and see docs/science.md.
STOPS_NOT = ("flash in tiles", "tiling off", "flash in layer 2 only", "P̄V in fp32")


def test_a_row_stops_what_stays_under_its_threshold() -> None:
    row = IsolationRow("x", drift=-1e-4, one_signedness=-1.0, growth=1.1, paper=True)
    assert row.stops_drift
    assert row.stops_runaway
    assert not replace(row, drift=-3e-4).stops_drift
    assert not replace(row, growth=1.7).stops_runaway
    assert not replace(row, growth=float("nan")).stops_runaway
    assert tables.isolation_cells(row) == ["x", "-1.0e-04", "-1.00", "stops it", "1.10", "stops it", "stops it"]


def test_a_training_row_is_what_the_snippet_measures() -> None:
    seeds, name = (0, 1), "delta_error_mean"
    short = replace(DRIFT, steps=1)
    rows = {row.variant: row for row in tables.training_rows(short, name, EMULATION.arithmetic, seeds)}
    rounded, unrounded = (variants(row_sum_from_rounded=choice) for choice in (True, False))
    assert list(rows) == list(rounded)
    assert rows["standard"].unrounded.values == ()
    for table, found in ((rounded, rows["flash"].rounded), (unrounded, rows["flash"].unrounded)):
        runs = [run_snippet(short, table["flash"], EMULATION.arithmetic, seed) for seed in seeds]
        assert found.values == tuple(run.measures[name] for run in runs)


def test_ranges_read_from_lowest_to_highest() -> None:
    assert Range((2.0, 1.0)).text(".1f") == "1.0 to 2.0"
    assert Range((1.01, 1.02)).text(".1f") == "1.0"
    assert Range(()).text(".1f") == ""


def test_markdown() -> None:
    assert tables.markdown(["a", "b"], [["1", "2"]]) == "| a | b |\n| --- | --- |\n| 1 | 2 |"


def test_every_snippet_has_a_headline() -> None:
    assert list(HEADLINES) == list(SNIPPETS)
    for name, (measure, _) in HEADLINES.items():
        assert any(claim.measure == measure for claim in SNIPPETS[name].claims)
