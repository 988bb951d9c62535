"""For all tests of this checkout: that it is this checkout which they test, and runs of the matrix inside of a test.

pyproject.toml loads the plug-ins: pytest refuses a conftest.py that does, where it is called from another folder.
"""

import contextlib
import gc
import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tiebreak.reports.records.record import Run

_CHECKOUT = Path(__file__).resolve().parent
_USAGE = 2
_CELLS = _CHECKOUT / "tests" / "matrix" / "test_cells.py"
_TOGETHER = frozenset(
    {
        "tests/ascend/test_contract.py",
        "tests/unit/test_backward_passes.py",
        "tests/unit/test_check.py",
        "tests/unit/test_debugging.py",
        "tests/unit/test_dumps.py",
        "tests/unit/test_files.py",
        "tests/unit/test_fixture.py",
        "tests/unit/test_heads.py",
        "tests/unit/test_measures.py",
        "tests/unit/test_planted_defects.py",
        "tests/unit/test_slips.py",
        "tests/unit/test_statement.py",
        "tests/unit/test_torch_device.py",
        "tests/unit/test_user_kernels.py",
    }
)
# Of what computes, or starts something that does. `reports` imports no torch (CONTRIBUTING.md), nor do made-up records.
_COMPUTING = re.compile(
    r"^(?:from|import) (?:torch|subprocess|tiebreak(?!\.reports|\.defects(?: import |\.)made_up))\b|\bpytester\b",
    re.MULTILINE,
)
# Plug-ins that take longer to import than a cell to run, and a cache that would be the repository's own.
_LEAN = ("-p", "no:cacheprovider", "-p", "no:hypothesispytest", "-p", "no:benchmark")

# As `python -m pytest`, also where the shell has put this process into the background: Ctrl-C is ignored there.
_HEEDING_CTRL_C = (
    "import signal, sys, pytest; signal.signal(signal.SIGINT, signal.default_int_handler); sys.exit(pytest.main())"
)


@pytest.hookimpl(tryfirst=True)  # before another version's plug-in refuses what this checkout's would take
def pytest_configure(config: pytest.Config) -> None:
    """Refuse to test another tiebreak than the one that lies here: a wheel, or a clone that is installed beside it."""
    config.addinivalue_line("markers", "native: its module computes, so `make test LEVELS=all` runs it at each level")
    config.addinivalue_line("markers", "quick: faults show here first, in less than a second: `make quick` runs it")
    config.addinivalue_line("markers", "processor: tells much of a processor: `make test` runs it at two more levels")
    import tiebreak.kernels

    tested = Path(tiebreak.kernels.__file__).resolve().parent
    if tested != _CHECKOUT / "kernels":
        mismatch = f"tests of {_CHECKOUT}, but `import tiebreak` finds {tested.parent}"
        pytest.exit(
            f"{mismatch}: use this checkout's environment (make venv), or install it: pip install -e {_CHECKOUT}",
            returncode=_USAGE,
        )


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_make_scheduler() -> Generator[None, Any, Any]:
    """Let one worker alone make what the tests of a file share, and the others not wait for it."""
    scheduler = yield
    if scheduler is not None:
        scheduler.together = _TOGETHER
    return scheduler


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what may touch this processor's own bits: all but modules that import nothing that computes."""
    if _computes(item.path):
        item.add_marker("native")


@cache
def _computes(module: Path) -> bool:
    return _COMPUTING.search(module.read_text(encoding="utf-8")) is not None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """On workers, put the tests first that start processes or runs of their own: a long one at the end keeps one busy.

    They take seconds, where others take milliseconds.
    """
    if hasattr(config, "workerinput"):
        items.sort(key=lambda item: not _takes_seconds(item))


def _takes_seconds(item: pytest.Item) -> bool:
    assert isinstance(item, pytest.Function)
    return "pytester" in item.fixturenames or hasattr(item.module, "subprocess")


@pytest.fixture(scope="module", autouse=True)
def _exempted() -> None:
    """Exempt all that there is from later garbage collections, which looked half a second at a million objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def imported_once() -> None:
    """What autograd imports with its first dO, sympy: pytester forgets what a run inside of a test imports."""
    importlib.import_module("torch.fx.experimental.symbolic_shapes")


@pytest.fixture
def matrix(
    imported_once: None, pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., pytest.RunResult]:
    """Runs the matrix in a folder of its own, with these options of the command line, in this process."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*options: str, plugins: Sequence[object] = ()) -> pytest.RunResult:
        # An exit code of 2 is no Ctrl-C that pytester would have to pass on.
        return pytester.runpytest_inprocess(_CELLS, *_LEAN, *options, no_reraise_ctrlc=True, plugins=plugins)

    return run


@pytest.fixture
def kept(pytester: pytest.Pytester) -> "Callable[..., Run]":
    """Reads the records that a run has kept under a name."""
    from tiebreak.reports.records import store

    return lambda name="last": store.read(pytester.path / "out" / f"{name}.json")


def _open_at_the_end(process: subprocess.Popen[str], pipe: Path) -> None:
    process.wait()
    with contextlib.suppress(OSError):  # nobody waits any more
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


@pytest.fixture
def interrupted(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str]]:
    """Runs the matrix and presses Ctrl-C once something has opened the pipe `started` for writing.

    Returns the exit code and all that was printed.
    """
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)

    def run(*options: str) -> tuple[int, str]:
        pipe = pytester.path / "started"
        os.mkfifo(pipe)
        words = [sys.executable, "-c", _HEEDING_CTRL_C, str(_CELLS), *_LEAN, *options]
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
