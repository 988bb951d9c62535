"""The program behind docs/power.md: what it runs, keeps, goes on from and concludes."""

from pathlib import Path

import pytest

from tiebreak.defects.planted import DEFECTS
from tiebreak.matrix.budget import ORDER_FILE
from tiebreak.programs import resumable
from tiebreak.programs.resumable import read_parts
from tiebreak.studies import budget, power
from tiebreak.studies.pages import read_rows, renewed
from tiebreak.studies.power import (
    CAUGHT,
    TWINS,
    Caught,
    CaughtRow,
    Part,
    PlantedCell,
    Task,
    TwinRow,
    catches,
    caught_rows,
    left,
    main,
    order,
    ordered,
    report,
    sound_cells,
    twin_rows,
    twin_tasks,
)

FELL_AT_16 = Part(1, 16, None, {"scaled_twice random bf16": ["fell", "64", "bound"]}, 1.0)
FELL_SOONER = Part(1, 16, None, {"scaled_twice padded bf16": ["fell", "16", "bound", "range"]}, 1.0)
FELL_AT_32 = Part(1, 32, None, {"scaled_twice no_tail bf16": ["fell", "32", "finite"]}, 1.0)


def test_a_defect_is_caught_where_it_takes_the_fewest_heads() -> None:
    caught = catches([FELL_AT_32, FELL_AT_16, FELL_SOONER])
    assert caught == {"scaled_twice": Caught(16, ("padded", "random"), ("bound", "range"))}


@pytest.mark.parametrize("outcome", ["held", "measured", "inconclusive", "skipped"])
def test_what_did_not_fall_is_not_caught(outcome: str) -> None:
    assert catches([Part(1, 16, None, {"scaled_twice random bf16": [outcome, "16"]}, 1.0)]) == {}


def test_a_twin_that_falls_is_no_defect_that_is_caught() -> None:
    assert catches([Part(1, 16, None, {"tiled random bf16": ["fell", "16", "bound"]}, 1.0)]) == {}


def test_a_twin_goes_through_the_first_cases_of_its_defects_in_their_format() -> None:
    caught = {name: Caught(16, ("padded", "random"), ()) for name in ("narrow_product", "split_unweighted")}
    assert set(sound_cells(caught)) == {PlantedCell("tiled", "padded", "fp16"), PlantedCell("split", "padded", "bf16")}


def test_users_twins_get_by_with_the_fewest_heads() -> None:
    few, many = PlantedCell("tiled", "random", "bf16"), PlantedCell("fair", "sink_tie", "bf16")
    expected = [Task(seed, heads, (cell,)) for seed in (1, 2) for heads, cell in ((16, few), (256, many))]
    assert twin_tasks([few, many], [16, 256], 2) == expected


def test_what_has_been_run_is_left_out() -> None:
    cells = (PlantedCell("scaled_twice", "random", "bf16"), PlantedCell("scaled_twice", "padded", "bf16"))
    assert left([Task(1, 16, cells)], [FELL_AT_16]) == [Task(1, 16, cells[1:])]
    assert left([Task(2, 16, cells)], [FELL_AT_16]) == [Task(2, 16, cells)], "another seed"
    assert left([Task(1, 32, cells)], [FELL_AT_16]) == [Task(1, 32, cells)], "other heads"
    assert left([Task(1, 16, cells[:1])], [FELL_AT_16]) == []


def test_a_twin_that_is_blamed_is_counted() -> None:
    cells = [PlantedCell("tiled", "random", "bf16")]
    outcomes = ["measured", "fell", "inconclusive", "held", "crashed"]
    parts = [Part(seed, 16, None, {cells[0].id: [outcome, "16"]}, 1.0) for seed, outcome in enumerate(outcomes)]
    assert twin_rows(parts, cells) == [TwinRow("tiled", heads=16, cases=1, seeds=5, cells=5, blamed=2, undecided=1)]


def test_a_missed_defect_is_reported_as_missed() -> None:
    rows = caught_rows(catches([FELL_AT_16]))
    assert [row for row in rows if row.case] == [CaughtRow("scaled_twice", "random", "bound", 16)]
    assert f"1 of {len(DEFECTS)} defects are caught." in report(rows, [])


def test_the_page_has_what_the_data_say() -> None:
    text, lines = (
        power.PAGE.read_text(encoding="utf-8"),
        report(read_rows(CAUGHT, CaughtRow), read_rows(TWINS, TwinRow)),
    )
    assert renewed(text, power.SOURCE, lines) == text


def test_a_run_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        power, "DEFECTS", {"scaled_twice": DEFECTS["scaled_twice"], "added_mask": DEFECTS["added_mask"]}
    )
    monkeypatch.setattr(power, "EXPERIMENTS", {"random": power.EXPERIMENTS["random"]})
    out = tmp_path / "power.jsonl"
    arguments = ["--heads", "16", "--seeds", "0", "--workers", "1", "--out", str(out)]
    assert main(arguments) == 0
    assert "1 of 2 defects are caught" in capsys.readouterr().out
    assert [sorted(part.results) for part in read_parts(out, Part)] == [
        ["added_mask random bf16", "scaled_twice random bf16"],
    ]
    written = out.read_text(encoding="utf-8")
    assert main(arguments) == 0
    assert "to go" not in capsys.readouterr().out
    assert out.read_text(encoding="utf-8") == written


def test_bad_usage_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flag, value in (("--heads", "none"), ("--seeds", "-1"), ("--workers", "0")):
        with pytest.raises(SystemExit) as stopped:
            main([flag, value, "--out", str(tmp_path / "power.jsonl")])
        assert stopped.value.code == 2
        assert flag in capsys.readouterr().err


def test_a_stop_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(resumable, "in_processes", stopped)
    assert main(["--heads", "16", "--out", str(tmp_path / "power.jsonl")]) == 130
    assert "the same command goes on" in capsys.readouterr().out


def test_a_budget_has_the_cases_first_that_catch_most_for_their_cost() -> None:
    rows = [CaughtRow(name, case, "bound", 16) for name, case in (("a", "random"), ("b", "random"), ("c", "padded"))]
    assert order([*rows, CaughtRow("d", "past_the_end", "usage", 16), CaughtRow("e", "", "", 0)]) == [
        "past_the_end",  # a quarter of the cost
        "random",
        "padded",
    ]
    assert ORDER_FILE.read_text(encoding="utf-8") == ordered(read_rows(CAUGHT, CaughtRow))


def test_every_defect_is_named_within_a_minute_and_the_page_says_so() -> None:
    rows = read_rows(budget.NAMED, budget.NamedRow)
    assert {row.defect for row in rows} == set(DEFECTS)
    assert [row for row in rows if not row.case or row.seconds > 54] == []  # nine tenths of 60 s, on one core
    page = power.PAGE.read_text(encoding="utf-8")
    assert renewed(page, budget.SOURCE, budget.report(rows, read_rows(CAUGHT, CaughtRow))) == page


@pytest.mark.parametrize("defect", ["noise_shared", "rounded_o_bar"])
def test_what_a_budget_names_first_is_what_the_table_says(defect: str) -> None:
    (row,) = [row for row in read_rows(budget.NAMED, budget.NamedRow) if row.defect == defect]
    again = budget.named(defect)
    assert (again.case, again.cells) == (row.case, row.cells)
