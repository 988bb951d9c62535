"""Two processes of torchrun: the steps of one process to the bit, also resumed, and errors told once."""

import os
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.cases.gpt2.model import GPT2
from tiebreak.laboratory import train
from tiebreak.laboratory.train import main
from tiebreak.laboratory.training import CHECKPOINT, LOG, Ranks

TOY = ["--sequences", "4", "--report-every", "2", "--checkpoint-every", "2", "--warm-up", "2", "--kernel", "fair"]


class _Two(Ranks):
    """Stands in for one of two processes, of which the other says what it is told to say."""

    def gather(self, value: Any) -> list[Any]:
        said.append(value)
        return [value, OTHER] if self.first else [OTHER, value]


OTHER, said = "", list[str]()


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_tell_once_what_is_wrong_and_leave_no_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rank: int
) -> None:
    """And none ends before it is told: torchrun stops all as soon as one does."""
    monkeypatch.setattr(train, "joined", lambda: nullcontext(_Two(rank, 2)))
    said.clear()
    assert main([*TOY, "--sequences", "3", "--out", str(tmp_path / "wrong")]) == 2
    problem = "--sequences 3 must be a multiple of the 2 processes"
    assert capsys.readouterr().err == (f"tiebreak lab train: {problem}\n" if rank == 0 else "")
    assert said == [problem, problem]
    assert not (tmp_path / "wrong").exists()


def test_two_processes_go_on_as_one_would_to_the_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, loss = [*TOY, "--steps", "6", "--at-once", "2"], GPT2.loss

    def killed(self: GPT2, tokens: Tensor, targets: Tensor, now: int) -> Tensor:
        if now // 2 == 4:  # the fifth step's first part of two
            raise KeyboardInterrupt
        return loss(self, tokens, targets, now)

    with monkeypatch.context() as patch:
        patch.setattr(GPT2, "loss", killed)
        with pytest.raises(KeyboardInterrupt):
            main([*run, "--out", str(tmp_path / "one")])
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    assert main([*run, "--out", str(tmp_path / "one"), "--resume"]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "tiebreak.reports.cli", "lab", "train", *run, "--out", str(tmp_path / "two"), "--resume"]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    resumed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)
    assert resumed.returncode == 0, resumed.stderr
    assert "on 2 processes;" in resumed.stdout
    assert resumed.stdout.count("step 6  loss") == 1
    single, double = (torch.load(tmp_path / name / CHECKPOINT, weights_only=True)["model"] for name in ("one", "two"))
    assert all(torch.equal(single[name], double[name]) for name in single)
    assert (tmp_path / "one" / LOG).read_text() == (tmp_path / "two" / LOG).read_text()


def test_processes_share_the_parts_of_a_batch() -> None:
    shares = [list(Ranks(rank, 3).share(12)) for rank in range(3)]
    assert shares == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]


def test_an_environment_that_torchrun_did_not_make_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("RANK", raising=False)
    assert main(TOY) == 2
    error = capsys.readouterr().err
    assert error.startswith("tiebreak lab train: ")
    assert "RANK" in error
    assert error.count("\n") == 1
