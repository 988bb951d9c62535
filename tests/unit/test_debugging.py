"""From a cell that failed to the line that did it: tracebacks, the debugger, a log of calls, a script."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiebreak.kernels.external.loading import users_part, users_traceback
from tiebreak.reports import cli
from tiebreak.reports.gate.gate import update
from tiebreak.reports.records import store
from tiebreak.reports.records.record import SCRIPT, TRACEBACK

pytestmark = pytest.mark.usefixtures("shared_cases")
KERNEL = """
import torch

def deep(x):
    secret = 41
    return torch.nn.functional.softmax(x, dim=99) + secret

def raising(q, k, v):
    local = "here"
    return deep(q)

class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    @staticmethod
    def backward(ctx, do):
        found = {}
        return found["nothing"]

def backward_raises(q, k, v):
    return Function.apply(q, k, v)

def too_large(q, k, v):
    return torch.nn.functional.scaled_dot_product_attention(q, k, v) * 1.5
"""


@pytest.fixture
def folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("COLUMNS", "120")
    return folder


ONE_CALL = ("--experiments", "call", "-n", "0", "--heads", "16", "--json", "v.json")


def check(name: str, *words: str) -> dict[str, Any]:
    """The one verdict on a kernel, as JSON."""
    cli.main(["check", f"mine.py:{name}", *ONE_CALL, *words])
    verdict: dict[str, Any] = json.loads(Path("v.json").read_text())["verdicts"][0]
    return verdict


def test_a_crash_keeps_its_traceback_from_the_users_first_frame_on(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (cell,) = check("raising", "--cases", "no_tail", "-v")["failed"]
    lines = cell["traceback"].splitlines()
    assert lines[:2] == ["Traceback (most recent call last):", f'  File "{folder / "mine.py"}", line 10, in raising']
    assert "in softmax" in cell["traceback"], "it goes on into what the user called"
    assert any(line.startswith("IndexError: Dimension out of range") for line in lines)
    assert "in raising\n" in capsys.readouterr().out
    kept = store.read(Path("out/last.json")).records[0]
    assert kept.evidence[TRACEBACK] == cell["traceback"]
    check("raising", "--cases", "no_tail")
    assert "in raising\n" not in capsys.readouterr().out, "it is long, and -v asks for it"


def test_so_does_a_backward_pass_and_no_baseline_keeps_it(folder: Path) -> None:
    (cell,) = check("backward_raises", "--cases", "random")["failed"]
    assert f'File "{folder / "mine.py"}", line 20, in backward' in cell["traceback"].splitlines()[1]
    assert cell["outcome"] == "failed"
    run = store.read(Path("out/last.json"))
    assert TRACEBACK in run.records[0].evidence
    update(run, Path("baseline.json"))
    assert TRACEBACK not in store.read(Path("baseline.json")).records[0].evidence


def test_the_command_that_is_printed_ends_in_the_debugger_in_the_users_frame(folder: Path) -> None:
    (cell,) = check("raising", "--cases", "random")["failed"]
    assert cell["debug"] == f"{cell['command']} --pdb"
    assert cell["command"].endswith(" -n 0")
    words = shlex.split(cell["debug"][cell["debug"].index("pytest ") :])
    both = [*words, "--kernel", "mine.py:backward_raises"]  # to spare a process
    typed = "p 'secret', secret\nup\np local\nc\np 'found', found\nq\n"
    environment = {word: value for word, value in os.environ.items() if not word.startswith("PYTEST")}
    command = [sys.executable, "-m", *both]
    done = subprocess.run(command, input=typed, env=environment, capture_output=True, text=True, check=False)
    for printed in ("('secret', 41)", "'here'", "('found', {})"):
        assert printed in done.stdout, done.stdout
    assert [record.fails for record in store.read(Path("out/last.json")).records] == [True, True], "what ran is kept"


def test_a_wrong_kernel_names_the_script_that_shows_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (cell,) = check("too_large", "--cases", "no_tail", "-v")["failed"]
    assert cell["script"] in capsys.readouterr().out
    assert (cell["debug"], cell["traceback"]) == ("", "")
    words = shlex.split(cell["script"])
    assert words[:2] == ["tiebreak", "shrink"]
    assert cli.main([*words[1:], "-o", "shown.py"]) == cli.PASSED
    assert "wrong" in Path("shown.py").read_text()
    assert SCRIPT not in store.read(Path("out/last.json")).records[0].measures
    (declared,) = check("too_large", "--cases", "no_tail", "--declare", "contiguous=true")["failed"]
    assert declared["script"] == "", "which has no words for what is declared"


def test_a_log_has_every_call_of_the_kernel(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quiet = check("too_large", "--cases", "random")
    assert "too_large(" not in capsys.readouterr().err
    logged = check("too_large", "--cases", "random", "--log-level", "debug")
    calls = [line for line in capsys.readouterr().err.splitlines() if " too_large(" in line]
    assert "tiebreak.calls" in calls[0]
    q, k = "bfloat16[1, 16, 4, 64]", "bfloat16[1, 16, 128, 64]"
    given = f"too_large({q}, {k}, {k}) -> {q} "
    assert sum(given in line for line in calls) > 1
    digests = [line.split()[-4] for line in calls]
    assert len(digests) > len(set(digests)) > 1, "of equal inputs, of which it is asked its plan twice, and of others"
    assert calls[-1].endswith(" ms")
    assert logged["headline"] == quiet["headline"]


def test_an_error_of_the_suites_own_is_no_users() -> None:
    def error_of(code: str, file: str) -> Exception:
        with pytest.raises(ZeroDivisionError) as caught:
            exec(compile(code, file, "exec"), {})
        return caught.value

    ours = error_of("1 / 0", __file__)
    assert users_part(ours) is None
    assert users_traceback(ours) == ""
    theirs = error_of("def f():\n    return 1 / 0\nf()", "/somewhere/theirs.py")
    part = users_part(theirs, to_the_last=True)
    assert part is not None
    assert part.__traceback__ is not None
    assert part.__traceback__.tb_frame.f_code.co_filename == "/somewhere/theirs.py"
    from_theirs = RuntimeError("told")
    from_theirs.__cause__ = theirs
    assert "theirs.py" in users_traceback(from_theirs)
