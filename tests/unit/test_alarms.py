"""The count of false alarms over seeds: what it runs, keeps, goes on from and concludes."""

from pathlib import Path

import pytest

from tiebreak.studies.alarms import STUDY, Outcomes, Seed, at_most, main, summary

CASE = ("--backend", "emulation", "--cases", "no_tail", "--workers", "1", "--seeds", "1")


def test_no_alarm_in_n_cells_bounds_the_rate_by_3_in_n() -> None:
    assert at_most(0, 1000) == pytest.approx(3.0e-3, rel=0.01)  # ln 20 = 2.996: the rule of three
    assert at_most(2, 1000) == pytest.approx(6.3e-3, rel=0.01)  # Poisson: P(2 or fewer | 6.296) = 0.05


def test_an_alarm_is_counted_and_named() -> None:
    results = {Seed(1, "cpu", None): Outcomes({"passed": 9, "failed": 1, "skipped": 5}, ["failed x: why"])}
    assert "1 seed, 10 cells" in summary(results)
    assert summary(results).splitlines()[1:] == ["seed 1: failed x: why"]


def test_seeds_that_are_done_are_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tiebreak.laboratory.resumable.in_processes", lambda run, left, workers: map(run, left))
    words = [*CASE, "--out", str(tmp_path / "alarms.jsonl")]
    assert main(words) == 0
    assert "0 kept, 1 to run" in capsys.readouterr().out
    assert list(STUDY.kept(STUDY.parser(None).parse_args(words[-2:]))) == [Seed(1, "emulation", "no_tail")]
    assert main(words) == 0
    assert "to run" not in capsys.readouterr().out


@pytest.mark.parametrize("words", [("--seeds", "0"), ("--cases", "nosuch"), ("--nosuch",)])
def test_bad_input_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
