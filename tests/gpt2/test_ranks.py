"""Two processes of torchrun: the steps of one process to the bit, also after a kill, and errors told once."""

import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tiebreak.laboratory import train
from tiebreak.laboratory.ranks import Ranks
from tiebreak.laboratory.train import main
from tiebreak.laboratory.training import CHECKPOINT, LOG

TOY = ["--sequences", "4", "--report-every", "2", "--checkpoint-every", "2", "--warm-up", "2", "--kernel", "fair"]
# As `tiebreak lab train`, but for a SIGKILL of the second process in the middle of step 5.
KILLED = """
import os, signal, sys
from tiebreak.cases.gpt2.model import GPT2
from tiebreak.laboratory.train import main
loss = GPT2.loss
def until(self, tokens, targets, now):
    if os.environ["RANK"] == "1" and now // 2 == 4:
        print("about to die", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    return loss(self, tokens, targets, now)
GPT2.loss = until
sys.exit(main(sys.argv[1:]))
"""
TRAIN = ("-m", "tiebreak.reports.cli", "lab", "train")


def _torchrun(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=120)


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


def test_two_processes_take_the_steps_of_one_also_after_a_kill(tmp_path: Path) -> None:
    script, run = tmp_path / "killed.py", [*TOY, "--steps", "6"]
    script.write_text(KILLED)
    assert main([*run, "--at-once", "2", "--out", str(tmp_path / "one")]) == 0
    killed = _torchrun(str(script), *run, "--out", str(tmp_path / "two"))
    assert killed.returncode != 0
    assert killed.stdout.count("about to die") == 1
    assert torch.load(tmp_path / "two" / CHECKPOINT, weights_only=True)["step"] == 4
    resumed = _torchrun(*TRAIN, *run, "--out", str(tmp_path / "two"), "--resume")
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
