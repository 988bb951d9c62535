"""A kernel that hangs, dies or talks without end: told apart, each in its own cell, and every other cell runs."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tiebreak.matrix.watch import timed_out
from tiebreak.reports.records import CRASHED, MEASURED, TIMED_OUT, Run

MatrixRun = Callable[..., pytest.RunResult]
Kept = Callable[..., Run]

CASES = ("--cases", "random,random_odd,random_causal", "--heads", "16", "--backend", "cpu")
# The regular expression holds Python's lock, so that no thread of Python could end it.
KERNEL = """
import os
import re

def mine(q, k, v, *, causal=False, scale=None):
    if q.shape[2] == 7:
        re.fullmatch("(a+)+b", "a" * 64)
    if q.shape[2] == 48:
        os.kill(os.getpid(), 11)
    return (q.float() @ k.float().mT * scale).softmax(-1).matmul(v.float()).to(q.dtype)

def talks(q, k, v):
    print("word " * 10**6)
    return q[:, :, :1]
"""
DUMP = """Timeout (0:01:02.500000)!
Thread 0x00007fab36bff6c0 (most recent call first):
  File "/lib/gateway.py", line 534 in read

Thread 0x00007fab37fe4b80 (most recent call first):
  File "/my/attention.py", line 8 in hang
  File "/lib/calling.py", line 159 in _one
"""


@pytest.fixture
def mine(pytester: pytest.Pytester) -> str:
    (pytester.path / "mine.py").write_text(KERNEL)
    return "mine.py:mine"


def test_a_kernel_that_hangs_or_dies_has_its_own_outcome_and_every_cell_its_record(
    matrix: MatrixRun, kept: Kept, mine: str
) -> None:
    assert matrix("--kernel", mine, *CASES, "--cell-timeout", "6", "-n", "1", apart=True).ret == 1
    found = {record.case: record for record in kept().records}
    assert {case: record.outcome for case, record in found.items()} == {
        "random": MEASURED,
        "random_odd": TIMED_OUT,
        "random_causal": CRASHED,
    }
    assert found["random_odd"].met("in_time") is False
    assert "no result after 6 s; it was in fullmatch" in found["random_odd"].reasons[0]
    assert "its process died" in found["random_causal"].reasons[0]


def test_where_a_kernel_was_is_read_off_the_thread_that_ran_it(tmp_path: Path) -> None:
    file = tmp_path / "gw0"
    assert timed_out(file) is None
    file.write_text("")
    assert timed_out(file) is None
    file.write_text(DUMP)
    assert timed_out(file) == "no result after 62.5 s; it was in hang (attention.py, line 8)"


@pytest.mark.parametrize("seconds", ["0", "-1", "soon"])
def test_a_time_limit_that_is_none_is_refused(matrix: MatrixRun, seconds: str) -> None:
    result = matrix(f"--cell-timeout={seconds}", "-n", "0")
    assert result.ret == 2
    result.stderr.fnmatch_lines([f"Exit: --cell-timeout {seconds}: expected a positive number of seconds"])


def test_what_a_kernel_prints_without_end_is_cut(matrix: MatrixRun, mine: str) -> None:
    result = matrix("--kernel", mine.replace(":mine", ":talks"), "--cases", "random", "--heads", "16", "-n", "0")
    assert result.ret == 1
    assert 1_000 < len(result.stdout.str()) < 30_000
