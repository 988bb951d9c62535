"""Tables and the figure of training runs over seeds."""

from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tiebreak.defects.made_up import record, run, skip, trained
from tiebreak.reports.cli import main
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables.grids import text as as_text
from tiebreak.reports.tables.training import training_tables

Keep = Callable[[Run, str], Path]


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
        ({"outcome": "fell"}, "!+1.0e-03 to +2.0e-03!"),
        ({"outcome": "fell", "excused": "known"}, "(+1.0e-03 to +2.0e-03)"),
        ({"outcome": "inconclusive"}, "?+1.0e-03 to +2.0e-03?"),
        ({"outcome": "held"}, "+1.0e-03 to +2.0e-03 ·"),
        ({"outcome": "measured"}, "+1.0e-03 to +2.0e-03"),
    ],
)
def test_the_worst_seed_marks_all(fields: dict[str, str], shown: str) -> None:
    runs = [run(trained()), run(trained(value=1e-3, seed=2, **fields))]
    assert rows(table(*runs))["flash@train"][0] == shown


@pytest.mark.parametrize(("outcome", "shown"), [("skipped", "skip"), ("crashed", "!crash!"), ("timed_out", "!time!")])
def test_a_run_that_gave_nothing_says_so(outcome: str, shown: str) -> None:
    text = table(run(skip("flash@train", "train_drift", outcome, experiment="training")))
    assert rows(text) == {"flash@train": [shown]}


def test_a_nan_is_no_lowest_number() -> None:
    text = table(run(trained()), run(trained(value=None, seed=2, outcome="fell")))
    assert rows(text)["flash@train"][0] == "!+2.0e-03 to NaN!"


def test_backends_have_tables_of_their_own_and_other_records_none() -> None:
    text = table(run(trained(), trained(backend="emulation"), record()))
    assert [line for line in text.splitlines() if line.startswith("training")] == [
        "training, cpu, seed 1",
        "training, emulation, seed 1",
    ]
    assert table(run()) == ""


def test_columns_are_headed_and_explained_by_what_the_file_says_of_its_cases() -> None:
    lettered = run(trained(case="train_lm"), trained(), trained(case="unheard_of"))
    text = table(lettered, tablefmt="github")
    assert text.index("A: delta_error_mean") < text.index("L: delta_error_mean") < text.index("unheard_of")
    assert "A, train_drift: delta errs" in text
    assert "What differs is the kernel." in text


def test_the_command_takes_several_files_and_draws(
    keep: Keep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [
        str(keep(run(trained(seed=seed, value=seed * 1e-3), trained("sdpa", seed=seed), run="ab"[seed - 1] * 32), name))
        for seed, name in ((1, "a"), (2, "b"))
    ]
    figure = tmp_path / "new" / "figure.svg"
    assert main(["show", *files, "--figure", str(figure), "--kernels", "flash*"]) == 0
    assert rows(capsys.readouterr().out) == {"flash@train": ["+1.0e-03 to +2.0e-03 ·", "fails"]}
    drawn = ElementTree.fromstring(figure.read_text(encoding="utf-8"))
    marks = drawn.findall(".//{*}circle[@r='4']")
    _of_legend, first, second = (float(mark.get("cx", "nan")) for mark in marks)
    texts = {text.text: float(text.get("x", "nan")) for text in drawn.findall(".//{*}text")}
    assert texts["0"] < first < second <= texts["0.002"]


def test_files_of_two_platforms_are_no_seeds(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    one, other = keep(run(trained()), "a"), keep(run(trained(), platform={"cpu": "Another"}, run="b" * 32), "b")
    assert main(["show", str(one), str(other)]) == 2
    error = capsys.readouterr().err
    message = f"platform.cpu is 'Another', 'Made-up 9000' in {one}; compare puts them side by side"
    assert error == f"tiebreak show: {other}: {message}\n"


def test_files_without_training_runs_are_refused(keep: Keep, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(keep(run(record(), run=name * 32), name)) for name in "ab"]
    assert main(["show", *files]) == 2
    assert "no training runs in there" in capsys.readouterr().err


def test_an_unknown_kind_of_figure_is_refused_in_one_line(
    keep: Keep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(keep(run(trained()), "a")), "--figure", str(tmp_path / "x.docx")]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"tiebreak show: --figure {tmp_path / 'x.docx'}: ")
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "x.docx").exists()


def test_what_the_paper_says_comes_from_any_seed_that_ran() -> None:
    lost, stable = skip("flash@train", "train_lm", experiment="training"), trained(evidence={"paper": "stable"})
    assert rows(table(run(lost, stable)))["flash@train"][-1] == "stable"
