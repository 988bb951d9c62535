"""Sharpness against its closed form, and the program that measures it: resumed, refused, from one state on."""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.laboratory import sharpness as program
from tiebreak.laboratory.sharpness import BACK, ON, TRAINED, Point, Run, parse, run_one, settings, sharpness, summary
from tiebreak.reports.cli import main

WORDS = "--steps 2 --more 2 --every 1 --rate 1e-2 --sequences 2 --held-out 4 --eps 5e-4,1e-2 --attention same"


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """A run takes one thread for itself."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _in_the_corner(y: Tensor, targets: Tensor, epsilon: float) -> float:
    """The loss rises with every logit but the answer's, so that its maximum over a box lies in this corner."""
    z = epsilon * (y.abs() + 1)
    z[torch.arange(len(y)), targets] *= -1
    before, after = (torch.nn.functional.cross_entropy(each, targets).item() for each in (y, y + z))
    return 100 * (after - before) / (1 + before)


@pytest.mark.parametrize(("scale", "epsilon"), [(0.1, 5e-3), (3.0, 5e-4), (10.0, 1e-4)])
def test_the_search_comes_to_the_corner(scale: float, epsilon: float) -> None:
    rng = np.random.default_rng(7)
    y, targets = torch.from_numpy(scale * rng.standard_normal((16, 40))), torch.from_numpy(rng.integers(0, 40, 16))
    expected, found = _in_the_corner(y, targets, epsilon), sharpness(y, targets, epsilon)
    # By scipy's settings the search stops where a step gains less than 2e-9 of the loss.
    assert found == pytest.approx(expected, rel=2e-3)
    assert found <= expected * (1 + 1e-9)


def test_what_has_no_sharpness_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN or Inf"):
        sharpness(torch.tensor([[0.0, math.nan]]), torch.tensor([0]), 0.01)


def test_a_run_goes_on_from_one_state() -> None:
    run = run_one(parse(WORDS.split()), ("E8M2", 1))
    assert [(point.phase, point.step) for point in run.points] == [
        *((TRAINED, 1), (TRAINED, 2), (ON, 3), (ON, 4), (BACK, 3), (BACK, 4))
    ]
    on, back = (next(point for point in run.points if point.phase == phase) for phase in (ON, BACK))
    assert on.loss != back.loss  # of the same weights and batch: the forward pass has other bits
    # Each measured as it was trained: where the mask is fine, both ways to compute the logits nearly agree.
    assert abs(back.masked["0.0005"] / back.unmasked["0.0005"] - 1) < abs(
        on.masked["0.0005"] / on.unmasked["0.0005"] - 1
    )
    # On in its format is as if nothing had stopped there.
    whole = run_one(parse(f"{WORDS} --steps 4 --more 0".split()), ("E8M2", 1))
    assert replace(run.points[3], phase=TRAINED) == whole.points[3]
    # A run in the other format has nothing to go back to.
    assert [point.phase for point in run_one(parse(WORDS.split()), ("E8M7", 1)).points] == [TRAINED] * 2 + [ON] * 2


def _run(reduction: str, seed: int, found: float) -> Run:
    """A run whose sharpness is known, and half of it after going back."""

    def point(phase: str, step: int, factor: float) -> Point:
        sharp = {"0.0005": found * factor, "0.01": 20 * found}
        return Point(phase, step, 3.0, 3.1, 1.3, 0.2, sharp, sharp)

    points = [point(TRAINED, 2, 1.0), point(ON, 4, 1.0), point(BACK, 4, 0.5)]
    return Run(settings(parse(WORDS.split())), reduction, seed, 1.0, None, points)


def test_the_summary_tells_the_order_and_its_seeds() -> None:
    runs = [_run("E8M3", 1, 0.5), _run("E8M3", 2, 0.1), _run("E8M7", 1, 0.2), _run("E8M7", 2, 0.3)]
    told = " ".join(summary(runs, parse(WORDS.split())).split())
    assert "Order: E8M3 > (1 of 2 seeds) E8M7" in told
    assert "| E8M3 | 2 | - | 0.3 ± 0.28 |" in told
    assert "| E8M3 | 0.3 ± 0.28 | 0.15 ± 0.14 |" in told  # on in it, and back
    assert "| 141.7 ± 1.5e+02 |" in told  # 250 % of E8M7's at seed 1, 33 % at seed 2


def test_runs_that_are_kept_are_not_run_again_and_those_of_other_settings_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_parts(one, left, options, line, runs, **_) -> bool:  # type: ignore[no-untyped-def]
        print(f"{len(runs)} kept, {len(left)} to run")
        runs += [_run(name, seed, 0.4) for name, seed in left]
        return True

    monkeypatch.setattr(program, "run_parts", run_parts)
    path = tmp_path / "kept.jsonl"
    path.write_text(before := json.dumps(asdict(_run("E8M3", 1, 0.5))) + "\n", encoding="utf-8")
    measure = ["lab", "sharpness", *WORDS.split(), "--out", str(path)]
    assert main([*measure, "--formats", "E8M3,E8M7", "--seeds", "1"]) == 0
    told = capsys.readouterr().out
    assert "1 kept, 1 to run\n" in told
    assert "Order: E8M3 > (1 of 1 seeds) E8M7" in told
    assert main([*measure, "--kernel", "flash@paper"]) == 2
    error = capsys.readouterr().err
    assert "was written with kernel = flash@fused, not flash@paper; name another --out" in error
    assert error.count("\n") == 1
    assert path.read_text(encoding="utf-8") == before
    monkeypatch.setattr(program, "find_spec", lambda name: None)
    assert main(measure) == 2
    assert "pip install 'tiebreak[sharpness]'" in capsys.readouterr().err


def test_a_run_of_train_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    assert main(["lab", "train", *f"--steps 1 --sequences 2 --kernel flash@fp32 --out {folder}".split()]) == 0
    capsys.readouterr()
    assert main(["lab", "sharpness", str(folder), "--eps", "5e-4", "--held-out", "8"]) == 0
    told = capsys.readouterr().out
    assert f"{folder} after 1 step: loss of the last tokens of 8 sequences 4." in told
    # At the start all of 128 tokens are about as likely, ln 128 = 4.85: the rise is about 2 epsilon of 5.85.
    assert 0.015 < float(told.splitlines()[-1].split("|")[2]) < 0.03
    assert main(["lab", "sharpness", str(tmp_path / "other")]) == 2
    assert "no checkpoint.pt in it" in capsys.readouterr().err
