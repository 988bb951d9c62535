"""Tables and the figure of training runs over seeds."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tiebreak.defects.made_up import Call, record, run, skip, trained
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables.grids import text as as_text
from tiebreak.reports.tables.training import training_tables


def table(*runs: Run, tablefmt: str = "simple") -> str:
    return as_text(training_tables(runs), tablefmt)


def rows(text: str) -> dict[str, list[str]]:
    """Cells by kernel."""
    lines = [line.split("  ") for line in text.splitlines() if line.startswith(("flash", "sdpa"))]
    return {cells[0]: [cell.strip() for cell in cells[1:] if cell.strip()] for cells in lines}


def test_seeds_are_shown_from_the_lowest_to_the_highest() -> None:
    runs = [run(trained(value=value, seed=seed)) for seed, value in ((1, -1e-3), (2, 3e-3), (3, -2e-3))]
    text = table(*runs)
    assert text.startswith("training, cpu, seeds 1, 2, 3\n")
    assert rows(text) == {"flash@train": ["-2.0e-03 to +3.0e-03 ·", "fails"]}


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"outcome": "failed"}, "!+1.0e-03 to +2.0e-03!"),
        ({"outcome": "failed", "excused": "known"}, "(+1.0e-03 to +2.0e-03)"),
        ({"outcome": "passed"}, "+1.0e-03 to +2.0e-03 ·"),
    ],
)
def test_the_worst_seed_marks_all(fields: dict[str, str], shown: str) -> None:
    runs = [run(trained()), run(trained(value=1e-3, seed=2, **fields))]
    assert rows(table(*runs))["flash@train"][0] == shown


def test_a_run_that_gave_nothing_says_so_and_a_nan_is_no_lowest_number() -> None:
    crashed = skip("flash@train", "train_drift", "crashed", experiment="training")
    assert rows(table(run(crashed))) == {"flash@train": ["!crash!"]}
    # What the paper says comes from any seed that ran.
    assert rows(table(run(crashed, trained(case="train_lm"))))["flash@train"][-1] == "fails"
    text = table(run(trained()), run(trained(value=None, seed=2, outcome="failed")))
    assert rows(text)["flash@train"][0] == "!+2.0e-03 to NaN!"


def test_backends_have_tables_of_their_own_and_other_records_none() -> None:
    text = table(run(trained(), trained(backend="emulation"), record()))
    heads = [line for line in text.splitlines() if line.startswith("training")]
    assert heads == ["training, cpu, seed 1", "training, emulation, seed 1"]
    assert table(run()) == ""


def test_columns_are_headed_and_explained_by_what_the_file_says_of_its_cases() -> None:
    lettered = run(trained(case="train_lm"), trained(), trained(case="unheard_of"))
    text = table(lettered, tablefmt="github")
    assert text.index("A: delta_error_mean") < text.index("L: delta_error_mean") < text.index("unheard_of")
    assert "A, train_drift: delta errs" in text
    assert "What differs is the kernel." in text


def test_the_command_takes_several_files_and_draws(tiebreak: Call) -> None:
    runs = [run(trained(seed=seed, value=seed * 1e-3), trained("sdpa", seed=seed)) for seed in (1, 2)]
    told = tiebreak("show", *runs, "--kernels", "flash*")
    assert rows(told.out) == {"flash@train": ["+1.0e-03 to +2.0e-03 ·", "fails"]}
    alone = [run(each.records[0]) for each in runs]
    assert tiebreak("page", *alone, "-o", "new/figure.svg").out == "figure: new/figure.svg\n"
    drawn = ElementTree.fromstring(Path("new/figure.svg").read_text(encoding="utf-8"))
    marks = drawn.findall(".//{*}circle[@r='4']")
    _of_legend, first, second = (float(mark.get("cx", "nan")) for mark in marks)
    texts = {text.text: float(text.get("x", "nan")) for text in drawn.findall(".//{*}text")}
    assert texts["0"] < first < second <= texts["0.002"]


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ([run(trained()), run(trained(), platform={"cpu": "Another"})], [],
         "2.json: platform.cpu is 'Another', 'Made-up 9000' in 1.json; compare puts them side by side\n"),
        ([run(record()), run(record())], [], "1.json: no training runs in there, and compare puts calls side by side"),
        ([run(trained()), run(trained())], ["--format", "csv"], "--format csv: the table over seeds is simple, "),
    ],
)  # fmt: skip
def test_what_is_no_table_over_seeds_is_refused(
    files: list[Run], words: list[str], message: str, tiebreak: Call
) -> None:
    refused = tiebreak("show", *files, *words)
    assert (refused.code, refused.err.count("\n")) == (2, 1)
    assert refused.err.startswith(f"tiebreak show: {message}")
