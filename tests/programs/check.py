"""`tiebreak check TARGET...`: a kernel of one's own through the matrix, from any folder; the verdict comes first."""

import argparse
import contextlib
import io
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import pytest

from tiebreak.kernels.external.adapters import ADAPTERS
from tiebreak.kernels.external.loading import EXPECTED
from tiebreak.matrix.gatekeeper import Gatekeeper
from tiebreak.matrix.options import FORWARDED, refuse_twice
from tiebreak.matrix.plugin import WATCH, faster_alone
from tiebreak.matrix.record_collector import RecordCollector
from tiebreak.matrix.scheduling import cell_id
from tiebreak.matrix.watch import timed_out
from tiebreak.programs import forked
from tiebreak.programs.levels import CELLS
from tiebreak.reports import terminal
from tiebreak.reports.cli import FELL, HELD, INTERRUPTED, USAGE, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import write_text
from tiebreak.reports.verdict import Verdict, as_json, verdicts

_AUTO = "auto"
_STDOUT = "-"  # in the place of a file
_EXIT = "Exit: "  # before the reason for which pytest was told to end
_TELL_EVERY = 0.5  # seconds between two words on how far it is
# Of the user's pytest nothing is wanted here: neither its configuration nor what is installed beside it.
_ALONE = (
    *("-c", os.devnull, "--noconftest", "--import-mode=importlib", "-q", "-p", "no:cacheprovider"),
    *("-p", "no:randomly", "-p", "no:cov", "-p", "no:rerunfailures", "-p", "no:timeout"),
)


def main(arguments: Sequence[str]) -> int:
    """The verb `check`; see `tiebreak.reports.cli.main`.

    Returns:
        0 if nothing fell, 1 if something fell or is inconclusive, 2 on bad usage, 130 after Ctrl-C.
    """
    options = _parsed(arguments)
    if forked.possible():
        with tempfile.TemporaryDirectory(prefix="tiebreak-") as folder:
            word, loaded = Path(folder) / "watch", Path(folder) / "loaded"
            spared = word if options.workers == _AUTO else None
            code = forked.in_a_fork(lambda: _check(options, _Teller(sys.stderr, spared, loaded)))
            if code is not None:
                return code
            if not loaded.exists():
                print(f"tiebreak check: {' '.join(options.targets)}: it ended the process as it was imported, without"
                      " a word", file=sys.stderr)  # fmt: skip
                return USAGE
            late = timed_out(word)
            why = late.why if late else "the process has ended, or its device is beyond use"
        print(f"tiebreak check: {why}; once more with workers, to tell which cells are to blame", file=sys.stderr)
        options.workers = _AUTO
    code = _check(options, _Teller(sys.stderr))
    assert code is not None
    return code


def _check(options: argparse.Namespace, teller: "_Teller") -> int | None:
    """Run, and print what it came to; None if a run without workers has left out cells by itself."""
    code, printed = _run(_words(options), teller)
    run = teller.run
    if run is None:
        if teller.interrupted:
            return INTERRUPTED
        print(f"tiebreak check: {_refusal(printed)}", file=sys.stderr)
        return USAGE
    if teller.alone and not teller.interrupted and not run.complete:
        return None
    if options.json is not None:
        _write(as_json(verdicts(run, options.command, teller.failures)), options.json)
    if options.json != _STDOUT:
        terminal.show("\n".join([_report(run, teller), *(teller.gate.annotations if teller.gate else ())]))
    if teller.interrupted:
        return INTERRUPTED
    return {int(pytest.ExitCode.OK): HELD, USAGE: USAGE}.get(code, FELL)


def judged(arguments: Sequence[str]) -> list[Verdict]:
    """The verdicts of the command with these words, in this process; nothing is printed.

    Raises:
        UsageError: it would end with exit code 2.
    """
    teller = _Teller(io.StringIO())
    _, printed = _run(_words(_parsed(arguments)), teller)
    if teller.run is None:
        raise UsageError("it was interrupted" if teller.interrupted else _refusal(printed))
    return verdicts(teller.run, "", teller.failures)


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    options = _parser().parse_args(arguments)
    refuse_twice(arguments)
    if options.json not in (None, _STDOUT) and not Path(options.json).parent.is_dir():
        raise UsageError(f"--json {options.json}: there is no folder {Path(options.json).parent}")
    options.command = shlex.join(["tiebreak", "check", *arguments])
    return options


def _write(text: str, where: str) -> None:
    if where == _STDOUT:
        sys.stdout.write(text)
    else:
        write_text(text, Path(where))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="tiebreak check",
        description="Run attention kernels of your own through the matrix: bias on inputs where rounding is known to"
        " fail, accuracy, gradients, repeatability, short training runs; and the rounding plan that explains them.",
        epilog=f"Adapters by name: {', '.join(ADAPTERS)}.",
        allow_abbrev=False,  # so that an option that stands twice is seen
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=EXPECTED.removeprefix("expected "))
    for option in FORWARDED.values():
        parser.add_argument(option.flag, **option.parsing | {"default": None})
    parser.add_argument(
        "-n",
        "--workers",
        type=_workers,
        default=_AUTO,
        metavar="N",
        help="worker processes; 0: none (default: none where that is faster, else as many as the machine carries)",
    )
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the verdict as JSON too (docs/your-kernel.md); -: to the terminal, and nothing else",
    )
    return parser


def _workers(text: str) -> str:
    if text != _AUTO and not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: expected a number of processes, or auto")
    return text


def _words(options: argparse.Namespace) -> list[str]:
    """The words for pytest."""
    words = [*_ALONE, *CELLS, "-n", str(options.workers)]
    for target in options.targets:
        words += ["--kernel", target]
    for dest, option in FORWARDED.items():
        words += option.words(getattr(options, dest))
    return words


def _run(words: list[str], teller: "_Teller") -> tuple[int, str]:
    """Run pytest in silence; its exit code and what it printed."""
    kept = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = pytest.main(words, plugins=[teller])
    except KeyboardInterrupt:  # before there was a session: as the kernel's file was imported
        code, teller.interrupted = INTERRUPTED, True
    finally:
        teller.close()
        if kept is not None:
            os.environ["PYTEST_ADDOPTS"] = kept
    return int(code), printed.getvalue()


def _refusal(printed: str) -> str:
    """What pytest was told to exit with, as who has named targets without a flag reads it."""
    return (printed.partition(_EXIT)[2].strip() or printed.strip()).removeprefix("--kernel ")


def _report(run: Run, teller: "_Teller") -> str:
    """The verdicts, then the tables, every cell that fell, and what else made the run fall."""
    assert teller.collector is not None
    parts = [*teller.collector.report(run, terminal.width()), *teller.collector.fallen]
    parts += teller.gate.lines if teller.gate else ()
    return "\n\n".join([*parts, teller.collector.failure or teller.collector.file.line])


class _Teller:
    """Says on a stream how far the run is: a plug-in of the pytest that runs in silence."""

    def __init__(self, stream: TextIO, word: Path | None = None, loaded: Path | None = None) -> None:
        """Begin.

        Args:
            stream: to say it on.
            word: where this process, which may be ended, leaves word if a cell takes too long; None: it must go on.
            loaded: a file to make when all kernels have been imported; None: nobody looks.
        """
        self.stream, self.began, self.told_at = stream, time.monotonic(), 0.0
        self.word, self.loaded, self.alone = word, loaded, False
        self.collector: RecordCollector | None = None
        self.gate: Gatekeeper | None = None
        self.interrupted = False
        self.ended: set[str] = set()

    @property
    def run(self) -> Run | None:
        """What was run; None: nothing was."""
        return None if self.collector is None else self.collector.run

    @property
    def failures(self) -> list[str]:
        """What made the run fall though no cell did."""
        assert self.collector is not None
        return self.collector.failures

    @pytest.hookimpl(wrapper=True)
    def pytest_xdist_auto_num_workers(self, config: pytest.Config) -> Generator[None, int | None, int | None]:
        """None where that is faster, unless cells are to be ended one by one."""
        workers = yield
        limited = any(config.getoption(name) is not None for name in ("cell_timeout", "budget"))
        expendable = self.word is not None and not limited
        self.alone = expendable and workers is not None and faster_alone(config, workers)
        return 0 if self.alone else workers

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self, config: pytest.Config) -> None:
        """Say that the kernels' files are imported, and let a cell that takes too long end a process to spare."""
        if self.loaded is not None:
            self.loaded.touch()
        if self.alone:
            config.stash[WATCH] = replace(config.stash[WATCH], file=self.word)

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Get hold of what keeps the records, and of what judges them as a whole."""
        plugins = session.config.pluginmanager
        self.collector, self.gate = plugins.get_plugin("tiebreak-collector"), plugins.get_plugin("tiebreak-gatekeeper")
        if self.collector is not None:
            for line in self.collector.warnings():
                print(f"tiebreak check: {line}", file=self.stream)
        self._tell("starting")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Ctrl-C; what ends a run before its work comes this way too."""
        self.interrupted = excinfo.errisinstance(KeyboardInterrupt)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a cell."""
        if self.collector is None or cell_id(report.nodeid) not in self.collector.expected:
            return
        if report.when == "teardown" or report.failed:
            self.ended.add(report.nodeid)
        if time.monotonic() > self.told_at + _TELL_EVERY:
            done, cells = len(self.ended), len(self.collector.expected)
            left = (time.monotonic() - self.began) * (cells - done) / max(done, 1)
            self._tell(f"{done} of {cells} cells" + (f", about {left:.0f} s to go" if done > 3 else ""))

    def _tell(self, text: str) -> None:
        self.told_at = time.monotonic()
        if self.stream.isatty():
            self.stream.write(f"\r{text:60}")
            self.stream.flush()

    def close(self) -> None:
        """Leave the line as it was."""
        if self.stream.isatty():
            self.stream.write(f"\r{'':60}\r")
