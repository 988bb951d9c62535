"""Training at toy size: resumed to the bit, stopped by itself, refused in one line."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tiebreak.cases.gpt2.attention import Observation
from tiebreak.cases.gpt2.checkpoints import CHECKPOINT
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.cases.gpt2.monitors import View
from tiebreak.cases.gpt2.train import main
from tiebreak.cases.gpt2.training import KEPT_STEPS, LOG, Schedule, Watch

TOY = ["--sequences", "2", "--report-every", "2", "--checkpoint-every", "2", "--warm-up", "2", "--kernel", "fair"]


def _train(out: Path, *arguments: str, steps: int = 6) -> int:
    return main([*TOY, "--steps", str(steps), "--out", str(out), *arguments])


def _log(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / LOG).read_text().splitlines()]


def _weights(out: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(out / CHECKPOINT, weights_only=True)["model"]
    return found


def _killed_at(step: int, patch: pytest.MonkeyPatch) -> None:
    """Let the run be killed in a step."""
    loss = GPT2.loss

    def until(self: GPT2, tokens: Tensor, targets: Tensor, now: int) -> Tensor:
        if now == step:
            raise KeyboardInterrupt
        return loss(self, tokens, targets, now)

    patch.setattr(GPT2, "loss", until)


def test_a_run_tells_of_its_progress(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path / "run") == 0
    log = _log(tmp_path / "run")
    assert [entry["step"] for entry in log] == [2, 4, 6]
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("step 2  loss ")
    assert all(word in lines[0] for word in ("max logit", "drift", "sign diversity"))
    assert log[-1]["loss"] < log[0]["loss"]
    assert all(math.isfinite(value) for entry in log for value in entry.values())
    assert 0 <= log[0]["sign_diversity"] <= 1


def test_a_killed_run_resumes_to_the_bit(tmp_path: Path) -> None:
    assert _train(tmp_path / "straight") == 0
    with pytest.MonkeyPatch.context() as patch:
        _killed_at(5, patch)  # the last checkpoint is of step 4
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path / "killed")
    (tmp_path / "killed" / LOG).open("a").write(
        '{"step": 5, "loss": 1.0}\n{"step'
    )  # later than the checkpoint, and cut
    assert _train(tmp_path / "killed", "--resume") == 0
    straight, resumed = _weights(tmp_path / "straight"), _weights(tmp_path / "killed")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight)
    assert _log(tmp_path / "straight") == _log(tmp_path / "killed")


def test_a_resumed_run_remembers_the_lowest_loss(tmp_path: Path) -> None:
    """Five high losses in a row are an explosion, also with a kill between the second and the third."""
    loss, values = GPT2.loss, (3.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0, 9.0)

    def scripted(self: GPT2, tokens: Tensor, targets: Tensor, now: int) -> Tensor:
        return loss(self, tokens, targets, now) * 0 + values[now]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2, "loss", scripted)
        with pytest.MonkeyPatch.context() as kill:
            _killed_at(4, kill)
            with pytest.raises(KeyboardInterrupt):
                _train(tmp_path, steps=8)
        assert _train(tmp_path, "--resume", steps=8) == 1
    assert _log(tmp_path)[-1]["step"] == 7


def test_a_kill_while_a_checkpoint_is_written_leaves_the_former(tmp_path: Path) -> None:
    save = torch.save

    def cut(state: dict[str, Any], path: Path) -> None:
        save(state, path)
        if state["step"] == 4:
            path.write_bytes(path.read_bytes()[:1000])
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "save", cut)
        with pytest.raises(KeyboardInterrupt):
            _train(tmp_path)
    assert torch.load(tmp_path / CHECKPOINT, weights_only=True)["step"] == 2
    assert _train(tmp_path, "--resume") == 0


def test_the_rate_follows_the_schedule(tmp_path: Path) -> None:
    assert _train(tmp_path / "one", steps=2) == 0
    assert _train(tmp_path / "other", "--warm-up", "5", steps=2) == 0
    one, other = _weights(tmp_path / "one"), _weights(tmp_path / "other")
    assert not torch.equal(one["head.weight"], other["head.weight"])


def test_monitors_look_at_the_reported_steps_only(tmp_path: Path) -> None:
    looked: list[Observation] = []

    def view(observation: Observation) -> View:
        looked.append(observation)
        return View(observation)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tiebreak.cases.gpt2.training.View", view)
        assert _train(tmp_path) == 0
    assert len(looked) == 3 * 2  # reports, layers


def test_an_explosion_ends_the_run_and_keeps_its_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _train(tmp_path / "run", "--rate", "30", steps=40) == 1
    assert "the loss exploded" in capsys.readouterr().out
    last = _log(tmp_path / "run")[-1]["step"]
    assert last < 40
    kept = sorted(path.name for path in (tmp_path / "run").glob("inputs-*.npz"))
    assert kept == [f"inputs-{step:06d}.npz" for step in range(last - KEPT_STEPS + 1, last + 1)]
    with np.load(tmp_path / "run" / kept[-1]) as arrays:
        assert sorted(arrays) == [f"layer{layer}_{name}" for layer in (0, 1) for name in ("do", "k", "q", "v")]
        assert arrays["layer1_do"].shape == (1, 4, 64, 16)


def test_the_first_loss_must_be_a_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    loss = GPT2.loss
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GPT2, "loss", lambda *arguments: loss(*arguments) * math.nan)
        assert _train(tmp_path / "run") == 2
    assert "the loss of the first step is nan" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--data", "nowhere"], "train.bin: no such file"),
        (["--resume"], "checkpoint.pt: no such file; start without --resume"),
        (["--kernel", "flsh@paper"], "unknown kernel 'flsh@paper'"),
        (["--steps", "0"], "--steps must be at least 1, not 0"),
    ],
)
def test_bad_usage_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    assert _train(tmp_path / "run", *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("tiebreak train: ")
    assert told in error
    assert error.count("\n") == 1


def test_checkpoints_of_another_run_or_cut_short_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _train(tmp_path, steps=2) == 0
    assert _train(tmp_path, "--resume", "--seed", "1", steps=2) == 2
    assert "was written with seed = 0, not 1" in capsys.readouterr().err
    assert _train(tmp_path, steps=2) == 2
    assert "holds a run already" in capsys.readouterr().err
    whole = (tmp_path / CHECKPOINT).read_bytes()
    for size in (0, 100, len(whole) // 2, len(whole) - 1):
        (tmp_path / CHECKPOINT).write_bytes(whole[:size])
        assert _train(tmp_path, "--resume", steps=2) == 2
        assert "not a whole checkpoint" in capsys.readouterr().err


def test_other_data_is_another_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        np.arange(200, dtype="<u2").__mod__(len(name) + 40).tofile(tmp_path / name / "train.bin")
    assert _train(tmp_path / "run", "--data", str(tmp_path / "one"), steps=2) == 0
    assert _train(tmp_path / "run", "--data", str(tmp_path / "other"), "--resume", steps=2) == 2
    assert "was written with data = " in capsys.readouterr().err


def test_the_schedule_warms_up_and_falls_to_a_tenth() -> None:
    schedule = Schedule(steps=110, rate=1.0, warm_up=10)
    assert [schedule.at(step) for step in (0, 9, 10)] == pytest.approx([0.1, 1.0, 1.0])
    assert schedule.at(60) == pytest.approx(0.55)
    assert schedule.at(110) == pytest.approx(0.1)


def test_the_watch_waits_for_a_loss_that_stays_high() -> None:
    watch = Watch()
    assert not any(watch.exploded(loss) for loss in (9.0, 4.0, 6.5, 6.5, 6.5, 6.5, 5.0, 6.5, 6.5, 6.5, 6.5))
    assert watch.exploded(6.5)
    assert Watch().exploded(math.nan)
    assert Watch().exploded(math.inf)
