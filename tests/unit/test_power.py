"""The studies behind docs/power.md: what they run and conclude."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tiebreak.defects.kernel import SOUND
from tiebreak.defects.planted import DEFECTS
from tiebreak.matrix.scheduling import ORDER
from tiebreak.studies import budget, power
from tiebreak.studies.pages import read_rows
from tiebreak.studies.power import Caught, Cells, Outcomes, TwinRow, caught, first_catches, twin_rows
from tiebreak.studies.study import Study


def ran(case: str, *outcome: str, kernel: str = "scaled_twice", heads: int = 16) -> dict[Cells, Outcomes]:
    """What a study has where one kernel ran in one case."""
    return {Cells(case, "bf16", kernel, heads): {kernel: list(outcome)}}


def test_a_defect_is_caught_where_it_takes_the_fewest_heads() -> None:
    results = ran("random", "failed", "64", "bound") | ran("padded", "failed", "16", "bound", "range")
    assert caught(results) == {"scaled_twice": Caught("padded", "bound range", 16)}


def test_what_is_missed_or_fails_sooner_than_in_its_row_is_told() -> None:
    found = {name: Caught(defect.case, defect.checks, defect.heads) for name, defect in DEFECTS.items()}
    assert [*first_catches(found)] == []
    del found["scaled_twice"]
    told = [*first_catches(found | {"added_mask": Caught("random", "bound", 64)})]
    assert told == ["added_mask fails first in random by bound, with 64 heads", "scaled_twice is missed"]


def test_a_twin_goes_through_the_first_cases_of_its_defects_users_kernels_with_the_fewest_heads() -> None:
    defects = [DEFECTS[name] for name in ("narrow_product", "rounded_o_bar", "scaled_twice")]
    tasks = list(power.twin_tasks(defects, [16, 256], 2))
    wanted = {(defect.case, defect.fmt.name, defect.twin) for defect in defects}
    assert {task.seed for task in tasks} == {1, 2}
    assert {(task.case, task.fmt, task.kernels) for task in tasks} == wanted
    assert all(task.heads == (16 if task.kernels in SOUND else 256) for task in tasks)


def test_a_twin_that_is_blamed_is_counted() -> None:
    outcomes = ["measured", "failed", "undecided", "passed", "crashed", "skipped"]
    results = {
        Cells("random", "bf16", "tiled", 16, seed): {"tiled": [outcome, "16"]} for seed, outcome in enumerate(outcomes)
    }
    assert twin_rows(results) == [TwinRow("tiled", heads=16, cases=1, seeds=6, cells=5, blamed=2, undecided=1)]


def test_defects_that_a_level_misses_go_through_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, int]] = []

    def results(self: object, tasks: Iterable[Cells], options: object) -> dict[Cells, Outcomes]:
        cells = list(tasks)
        asked.extend((cell.kernels, cell.heads) for cell in cells)
        failed = {"scaled_twice": ["failed", "16"]}
        return {cell: failed if "scaled_twice" in cell.kernels else {} for cell in cells}

    monkeypatch.setattr(power, "DEFECTS", {name: DEFECTS[name] for name in ("scaled_twice", "added_mask")})
    monkeypatch.setattr(power, "EXPERIMENTS", {"random": power.EXPERIMENTS["random"]})
    monkeypatch.setattr(Study, "results", results)
    assert power.main(["--heads", "16,32", "--seeds", "0", "--out", str(tmp_path / "power.jsonl")]) == 1
    assert asked == [("scaled_twice added_mask", 16), ("added_mask", 32)]
    assert "added_mask is missed\n" in capsys.readouterr().out


def test_a_task_runs_its_kernels_in_its_case() -> None:
    outcomes = power.run_cells(Cells("random", "bf16", "scaled_twice tiled", 16))
    assert (outcomes["scaled_twice"][0], outcomes["tiled"][0]) == ("failed", "passed")


def test_a_budget_has_every_case_that_catches_a_defect() -> None:
    assert {defect.case for defect in DEFECTS.values()} <= ORDER.keys() & power.EXPERIMENTS.keys()


def test_every_defect_is_named_within_a_minute() -> None:
    rows = read_rows(budget.NAMED, budget.NamedRow)
    assert {row.defect for row in rows} == set(DEFECTS)
    assert [row for row in rows if not row.case or row.seconds > 54] == []  # nine tenths of 60 s, on one core


def test_what_a_budget_names_first_is_what_the_table_says() -> None:
    (row,) = [row for row in read_rows(budget.NAMED, budget.NamedRow) if row.defect == "rounded_o_bar"]
    again = budget.run_until_named(row.defect)
    assert (again.case, again.cells) == (row.case, row.cells)
