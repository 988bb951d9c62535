"""The count of false alarms over seeds: what it runs, keeps, goes on from and concludes."""

from pathlib import Path

import pytest

from tiebreak.studies.alarms import Seed, at_most, kept, main, summary

CASE = ("--backend", "emulation", "--cases", "no_tail", "--workers", "1")


def test_no_alarm_in_n_cells_bounds_the_rate_by_3_in_n() -> None:
    assert at_most(0, 1000) == pytest.approx(3.0e-3, rel=0.01)  # ln 20 = 2.996: the rule of three
    assert at_most(2, 1000) == pytest.approx(6.3e-3, rel=0.01)  # Poisson: P(2 or fewer | 6.296) = 0.05


def test_an_alarm_is_counted_and_named() -> None:
    seeds = [Seed(1, "cpu", None, None, {"held": 9, "fell": 1, "skipped": 5}, ["fell x: why"], 1.0)]
    assert "1 seed, 10 cells" in summary(seeds)
    assert summary(seeds).splitlines()[1:] == ["seed 1: fell x: why"]


def test_seeds_that_are_done_are_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "alarms.jsonl"
    assert main([*CASE, "--seeds", "1", "--out", str(out)]) == 0
    assert list(kept(out, "emulation", "no_tail")) == [1]
    assert kept(out, "cpu", "no_tail") == {}
    written = out.read_text(encoding="utf-8")
    capsys.readouterr()
    assert main([*CASE, "--seeds", "1", "--out", str(out)]) == 0
    assert "0 of 1 seeds to run" in capsys.readouterr().out
    assert out.read_text(encoding="utf-8") == written


@pytest.mark.parametrize("words", [("--seeds", "0"), ("--cases", "nosuch"), ("--nosuch",)])
def test_bad_input_is_one_line(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_line_of_another_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"a\.jsonl, line 1: none of this program's: .*; name another --out"):
        kept(tmp_path / "a.jsonl", "cpu", None)
