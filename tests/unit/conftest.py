"""Runs of the matrix inside a test, and shapes that a kernel must take."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run

CELLS = Path(__file__).parents[1] / "matrix" / "test_cells.py"
# Plug-ins that take longer to import than a cell to run, and a cache that would be the repository's own.
LEAN = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:benchmark")

# As `python -m pytest`, also where the shell has put this process into the background: Ctrl-C is ignored there.
HEEDING_CTRL_C = (
    "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main())"
)

# Queries, keys, d, query heads, key heads, causal.
SHAPES = {
    "one_of_each": (1, 1, 16, 1, 1, False),
    "d32": (33, 70, 32, 2, 2, False),
    "d256": (5, 70, 256, 2, 1, False),
    "d20_odd_heads": (37, 37, 20, 3, 3, True),
    "grouped_causal": (70, 70, 16, 6, 2, True),
    "fewer_queries_causal": (19, 150, 16, 2, 2, True),
    "fewer_keys_causal": (150, 19, 16, 2, 2, True),  # the first 131 queries see no key
}


@pytest.fixture(params=SHAPES.values(), ids=list(SHAPES))
def attention_shape(request: pytest.FixtureRequest) -> tuple[int, int, int, int, int, bool]:
    """Sizes of a call of attention: queries, keys, d, query heads, key heads, and whether it is causal."""
    shape: tuple[int, int, int, int, int, bool] = request.param
    return shape


def _open_at_the_end(process: subprocess.Popen[str], pipe: Path) -> None:
    process.wait()
    with contextlib.suppress(OSError):  # nobody waits any more
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture
def matrix(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., pytest.RunResult]:
    """Runs the matrix in a folder of its own, with these options of the command line.

    In this process, where torch has been imported, unless it is told to run `apart`.
    """
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*options: str, apart: bool = False, plugins: Sequence[object] = ()) -> pytest.RunResult:
        if apart:
            return pytester.runpytest_subprocess(CELLS, *LEAN, *options, timeout=120)
        # An exit code of 2 is no Ctrl-C that pytester would have to pass on.
        return pytester.runpytest_inprocess(CELLS, *LEAN, *options, no_reraise_ctrlc=True, plugins=plugins)

    return run


@pytest.fixture
def kept(pytester: pytest.Pytester) -> Callable[..., Run]:
    """Reads the records that a run has kept under a name."""
    return lambda name="last": store.read(pytester.path / "out" / f"{name}.json")


@pytest.fixture
def interrupted(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the matrix and presses Ctrl-C once something has opened the pipe `started` for writing.

    Returns the exit code and all that was printed.
    """
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*options: str) -> tuple[int, str]:
        pipe = pytester.path / "started"
        os.mkfifo(pipe)
        words = [sys.executable, "-c", HEEDING_CTRL_C, str(CELLS), *LEAN, *options]
        # A session of its own: as from a terminal, Ctrl-C goes to the whole process group, workers and all.
        with subprocess.Popen(
            words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        ) as process:
            # Should pytest end before the cell runs, the pipe is opened in its place: nothing waits forever.
            threading.Thread(target=_open_at_the_end, args=(process, pipe), daemon=True).start()
            pipe.open("rb").close()
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        return process.returncode, output

    return run
