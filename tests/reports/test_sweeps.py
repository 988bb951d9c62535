"""A sweep's folder, its tables, and its part of the page: what is kept, refused and said."""

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import asdict, replace

from tiebreak.defects.made_up import Call
from tiebreak.laboratory import sweep_store as store
from tiebreak.laboratory.sweep_store import (
    RUNS,
    SETTINGS,
    Place,
    Sweep,
    SweepRun,
    SweepSettings,
    open_store,
    read_sweep,
)
from tiebreak.laboratory.sweep_tables import csv_grid, legend, sweep_figures, sweep_tables, wilson
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.store import UnreadableRecordsError
from tiebreak.reports.tables.grids import Grid, csv_text

SETTINGS_OF = SweepSettings(
    SCHEMA, {"steps": 100}, "in words", 20, (0.01, 0.1), ("E8M7",), ("plain", "mine"), ("none",)
)


def run(place: Place, diverged: str | None = None, loss: float | None = 3.0) -> SweepRun:
    return SweepRun(**asdict(place), diverged=diverged, steps=100, loss=loss, lowest=2.5, max_logit=7.0, seconds=1.0,
                    platform={"cpu": "a CPU", "commit": None})  # fmt: skip


def kept(folder: Path, runs: Iterable[SweepRun], settings: SweepSettings = SETTINGS_OF) -> Path:
    open_store(folder, settings)
    for run in runs:
        store.keep(run, folder)
    return folder


def swept(*counts: tuple[float, str, int]) -> Sweep:
    """Twenty seeds of each (learning rate, kernel), of which so many diverged."""
    runs = []
    for rate, kernel, count in counts:
        places = [Place("E8M7", rate, kernel, "none", seed) for seed in range(1, 21)]
        runs += [run(place, "loss" if place.seed <= count else None, 3 + place.seed / 100) for place in places]
    return Sweep(SETTINGS_OF, tuple(runs))


def test_what_is_kept_is_not_run_again_and_more_seeds_go_on_and_fewer_leave_the_rest_alone(tmp_path: Path) -> None:
    places = list(SETTINGS_OF.places())
    folder = kept(tmp_path / "out", map(run, places[:3]))
    sweep = open_store(folder, SETTINGS_OF)
    assert [each.place for each in sweep.runs] == places[:3]
    assert sweep.left == places[3:]
    assert len(places) == len({place.file for place in places}) == 80
    assert [place.seed for place in places[:5]] == [1, 1, 1, 1, 2]  # a seed of every setting before the next
    assert len(open_store(folder, replace(SETTINGS_OF, seeds=21)).left) == 81
    assert read_sweep(folder).settings.seeds == 21
    fewer = open_store(folder, replace(SETTINGS_OF, seeds=1))
    assert (len(fewer.runs), len(fewer.left)) == (3, 1)
    assert read_sweep(folder).settings.seeds == 21


def test_another_sweep_or_a_folder_of_something_else_is_refused_and_nothing_changed(tmp_path: Path) -> None:
    folder = kept(tmp_path, [run(next(SETTINGS_OF.places()))])
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    fewer, steps = replace(SETTINGS_OF, rates=(0.1,)), replace(SETTINGS_OF, recipe={"steps": 200})
    for other, message in ((fewer, r"rates is \[0.01, 0.1\], not \[0.1\]"), (steps, "steps is 100, not 200")):
        with pytest.raises(UsageError, match=f"settings.json: another sweep: its {message}; name another --out"):
            open_store(folder, other)
    with pytest.raises(UsageError, match="is no sweep's, but it is not empty"):
        open_store(folder / RUNS, SETTINGS_OF)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("name", "cure"), [(SETTINGS, r"not JSON .*; name another --out"), (RUNS, r"not JSON .*; delete it, and its run")]
)
def test_a_file_cut_short_is_named_and_left(tmp_path: Path, name: str, cure: str) -> None:
    place = next(SETTINGS_OF.places())
    folder = kept(tmp_path, [run(place)])
    path = folder / RUNS / place.file if name == RUNS else folder / name
    path.write_text(half := path.read_text()[:40])
    with pytest.raises(UnreadableRecordsError, match=cure) as refused:
        open_store(folder, SETTINGS_OF)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)
    assert path.read_text() == half


def test_a_file_of_another_run_is_refused(tmp_path: Path) -> None:
    first, second, *_ = SETTINGS_OF.places()
    folder = kept(tmp_path, [run(first)])
    (folder / RUNS / first.file).rename(folder / RUNS / second.file)
    with pytest.raises(UnreadableRecordsError, match=r"holds another run: plain E8M7 lr 0\.01 none seed 1"):
        read_sweep(folder)


def test_rates_and_losses_are_told() -> None:
    rates, losses, text = sweep_tables(swept((0.01, "plain", 0), (0.01, "mine", 3)))
    assert isinstance(rates, Grid)
    assert isinstance(losses, Grid)
    assert rates.rows[0] == ["E8M7 0.01", "0/20 (0 to 16 %)", "3/20 (5 to 36 %)"]
    # Of those that did not diverge.
    assert losses.rows[0] == ["E8M7 0.01", "3.10 (3.01 to 3.20)", "3.12 (3.04 to 3.20)"]
    assert rates.rows[1] == losses.rows[1] == ["E8M7 0.1", None, None]
    assert isinstance(text, str)
    assert text.splitlines()[0] == "40 runs, 40 to run; diverged: mine: 3 by loss"


def test_only_intervals_that_are_apart_are_called_so() -> None:
    assert "no two rates" in legend(swept((0.01, "plain", 1), (0.01, "mine", 5)))
    text = legend(swept((0.01, "plain", 0), (0.01, "mine", 12), (0.1, "mine", 20)))
    assert "  plain E8M7 0.01 (0/20), mine (12/20)" in text.splitlines()
    assert "  mine E8M7 0.01 (12/20), 0.1 (20/20)" in text.splitlines()
    assert "plain E8M7 0.01 (0/20), mine (20/20)" not in text  # they differ in the rate, too


@pytest.mark.parametrize(
    ("count", "of", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_published_intervals(count: int, of: int, low: float, high: float) -> None:
    assert [round(end, 4) for end in wilson(count, of)] == [low, high]


def test_csv_and_figures_have_a_line_and_a_mark_a_group() -> None:
    sweep = swept((0.01, "plain", 0), (0.1, "plain", 10), (0.1, "mine", 20))
    first, second, third = csv.DictReader(io.StringIO(csv_text(csv_grid(sweep))))
    assert (first["kernel"], first["loss_lowest"], first["max_logit"]) == ("plain", "3.01", "7.0")
    assert (second["diverged"], second["runs"]) == ("10", "20")
    assert (third["diverged"], third["loss_median"]) == ("20", "")
    figure, losses = sweep_figures(sweep, "here")
    assert [[y for _, y in line.points] for line in figure.series] == [[0.0, 50.0], [100.0]]
    assert [(round(low), round(high)) for _, low, high in figure.series[0].bars] == [(0, 16), (30, 70)]
    assert [label for _, label in figure.x_ticks] == ["0.01", "0.1"]
    assert losses.series[0].bars[0][1:] == (3.01, 3.2)


def test_show_and_page_take_a_folder(tmp_path: Path, tiebreak: Call) -> None:
    kept(tmp_path / "a<b", swept((0.01, "plain", 0), (0.1, "mine", 20)).runs)
    shown = tiebreak("show", "a<b", "--kernels", "mine").out
    assert "20/20 (84 to 100 %)" in shown
    assert "plain" not in shown
    assert len(json.loads(tiebreak("show", "a<b", "--format", "json").out)["runs"]) == 40
    refused = tiebreak("show", "a<b", "--cases", "x")
    assert (refused.code, refused.err) == (2, "tiebreak show: --cases: a<b is a sweep; --kernels alone narrows it\n")
    assert tiebreak("page", "a<b", "-o", "page").code == 0
    page = Path("page/index.html").read_text()
    assert "<td>20/20 (84 to 100 %)</td>" in page
    assert page.count("<svg ") == 2
    assert "a&lt;b" in page
    assert "a<b" not in page
    refused = tiebreak("page", ".", "-o", "page")
    assert refused.code == 2
    assert "settings.json (a sweep)" in refused.err
