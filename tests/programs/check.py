"""`tiebreak check TARGET...`: a user's kernel through the matrix, from any folder; the verdict comes first."""

import argparse
import contextlib
import io
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

import pytest

from tiebreak.kernels.external.loading import ADAPTERS, EXPECTED
from tiebreak.matrix.gatekeeper import Gatekeeper
from tiebreak.matrix.options import FORWARDED, refuse_twice
from tiebreak.matrix.plugin import WATCH
from tiebreak.matrix.record_collector import RecordCollector
from tiebreak.matrix.scheduling import cell_id
from tiebreak.matrix.watch import Progress, now
from tiebreak.plugins import loaded
from tiebreak.programs.processes import CELLS
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, INTERRUPTED, PASSED, USAGE, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables import run as tables
from tiebreak.reports.verdict import Verdict, as_json, verdicts

_AUTO = "auto"
_EXIT = "Exit: "  # before the reason for which pytest was told to end
_TELL_EVERY = 0.5  # seconds between two words on how far it is
# The user's pytest set-up is not wanted here: neither its configuration nor what is installed with it.
_ALONE = (
    *("-c", os.devnull, "--noconftest", "--import-mode=importlib", "-q", "-p", "no:cacheprovider"),
    *("-p", "no:randomly", "-p", "no:cov", "-p", "no:rerunfailures", "-p", "no:timeout"),
    *("-p", "no:unraisableexception"),  # it collects garbage twice, a fifth of a short run, for what nobody sees
)


def main(arguments: Sequence[str]) -> int:
    """Run the verb `check`; see `tiebreak.reports.cli.main`."""
    options = parsed(arguments)
    if options.configs:
        code: int = loaded("tiebreak.verbs", "configs")(arguments)
        return code
    return checked(options, Follower(sys.stderr))


def checked(options: argparse.Namespace, follower: "Follower") -> int:
    """Run the matrix and say what it came to; return the exit code."""
    code, printed = run(options, follower)
    found = follower.run
    if found is None:
        if follower.interrupted:
            return INTERRUPTED
        print(f"tiebreak check: {refusal(printed)}", file=sys.stderr)
        return USAGE
    if options.json is not None:
        terminal.write(as_json(follower.verdicts(found, options.command)), options.json)
    if options.json != terminal.STDOUT:
        terminal.show(follower.report(found, verbose=options.verbose))
    if follower.interrupted:
        return INTERRUPTED
    return {int(pytest.ExitCode.OK): PASSED, USAGE: USAGE}.get(code, FAILED)


def parsed(arguments: Sequence[str], prog: str = "tiebreak check") -> argparse.Namespace:
    """Parse the arguments of the command, or of another that checks kernels."""
    parser = Parser(
        prog=prog,
        description="Run attention kernels of your own through the matrix: bias on inputs where rounding is known to"
        " fail, accuracy, gradients, repeatability, short training runs; and the rounding plan that explains them.",
        epilog=f"Adapters by name: {', '.join(ADAPTERS)}.",
        allow_abbrev=False,  # so that an option that is given twice is seen
    )
    parser.add_argument("targets", nargs="+", metavar="TARGET", help=EXPECTED.removeprefix("expected "))
    for option in FORWARDED.values():
        parser.add_argument(option.flag, **option.parsing | {"default": None})
    workers = (
        "worker processes; 0: none, a kernel that hangs or dies ends the run (default: as many as the machine carries)"
    )
    parser.add_argument("-n", "--workers", default=_AUTO, metavar="N", help=workers)
    configs = (
        "check each configuration that gives other bits: all of autotuned kernels, with --backend interpreter or ptx;"
        " or these values of a keyword"
    )
    parser.add_argument("--configs", action="append", metavar="all|NAME=V1,V2", help=configs)
    verbose = "print the tables, every cell that failed with its reasons and command, and what was skipped, too"
    parser.add_argument("-v", "--verbose", "--table", action="store_true", help=verbose)
    log = "log on standard error: debug says what every call of the kernel is given, how long it takes, what it returns"
    parser.add_argument("--log-level", metavar="LEVEL", choices=("debug", "info", "warning", "error"), help=log)
    json = "write the verdict as JSON too (docs/your-kernel.md); -: to the terminal, and nothing else"
    parser.add_argument("--json", metavar="FILE", help=json)
    options = parser.parse_args(arguments)
    refuse_twice(arguments)
    if options.workers != _AUTO and not options.workers.isdecimal():
        raise UsageError(f"argument -n/--workers: {options.workers}: expected a number of processes, or auto")
    terminal.check_folders(json=options.json)
    options.command = shlex.join(["tiebreak", "check", *arguments])
    return options


def run(options: argparse.Namespace, follower: "Follower", *more: str) -> tuple[int, str]:
    """Run pytest without output; return its exit code and what it printed."""
    words = [*_ALONE, *CELLS, "-n", str(options.workers), *more]
    words += [] if options.log_level is None else [f"--log-level={options.log_level}"]
    words += [word for target in options.targets for word in ("--kernel", target)]
    words += [word for dest, option in FORWARDED.items() for word in option.words(getattr(options, dest))]
    kept = os.environ.pop("PYTEST_ADDOPTS", None)
    try:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
            code = pytest.main(words, plugins=[follower])
    except KeyboardInterrupt:  # before there was a session: as the kernel's file was imported
        code, follower.interrupted = INTERRUPTED, True
    finally:
        follower.tell("")
        if kept is not None:
            os.environ["PYTEST_ADDOPTS"] = kept
    return int(code), printed.getvalue()


def refusal(printed: str) -> str:
    """Return the reason that pytest exits with, worded for a caller who names targets without a flag."""
    return (printed.partition(_EXIT)[2].strip() or printed.strip()).removeprefix("--kernel ")


class Follower:
    """A pytest plug-in that shows progress on a stream, and keeps the result."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.told_at = 0.0
        self.interrupted = False
        self.collector: RecordCollector | None = None
        self.gate: Gatekeeper | None = None
        self.progress: Progress | None = None
        self.judged: Callable[[Sequence[Verdict]], list[Verdict]] = list  # what there is to say of several verdicts

    @property
    def run(self) -> Run | None:
        """The records of the run; None: nothing was run."""
        return None if self.collector is None else self.collector.run

    def verdicts(self, run: Run, command: str = "") -> list[Verdict]:
        """Return the verdicts on a run, with what made it fail though no cell did."""
        assert self.collector is not None
        return self.judged(verdicts(run, command, self.collector.failures))

    def report(self, run: Run, *, verbose: bool) -> str:
        """Return the verdicts, every failed cell, and what else made the run fail; `verbose`: with the tables."""
        assert self.collector is not None
        lines, annotations = (self.gate.lines, self.gate.annotations) if self.gate else ([], [])
        judged, end = self.verdicts(run), self.collector.failure or self.collector.file.line
        if verbose:
            parts = self.collector.report(run, terminal.width(), judged, traced=True)
        else:
            parts = [*map(str, judged), *filter(None, ["\n".join(tables.brief(run.records))])]
            end = f"{tables.counts(run.records)}; -v shows tables, skips and every reason; {end}"
        return "\n".join(["\n\n".join([*parts, *self.collector.failed, *lines, end]), *annotations])

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Find the plug-ins that keep the records and that judge them as a whole."""
        plugins = session.config.pluginmanager
        self.collector, self.gate = plugins.get_plugin("tiebreak-collector"), plugins.get_plugin("tiebreak-gatekeeper")
        if self.collector is not None:
            processes = len(session.config.getoption("tx", ())) or 1
            self.progress = Progress(self.collector.expected.values(), session.config.stash[WATCH].budget, processes)
        for line in self.collector.warnings() if self.collector is not None else ():
            print(f"tiebreak check: {line}", file=self.stream)
        self.tell("starting")

    def pytest_keyboard_interrupt(self, excinfo: pytest.ExceptionInfo[BaseException]) -> None:
        """Note Ctrl-C; pytest also reports a refusal before any work this way."""
        self.interrupted = excinfo.errisinstance(KeyboardInterrupt)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note when a cell begins."""
        if self.progress is not None:
            self.progress.begun[cell_id(nodeid)] = now()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count a cell, and how long it took."""
        name = cell_id(report.nodeid)
        if report.when == "call" and report.caplog:  # with --log-level
            print(report.caplog, file=self.stream, flush=True)
        if self.collector is None or self.progress is None or name not in self.progress.left:
            return
        if report.when == "teardown" or report.failed:
            record = self.collector.records.get(name)
            ran = record is not None and record.skipped is None
            self.progress.end(name, self.collector.seconds[name] if ran else None)
        if now() > self.told_at + _TELL_EVERY:
            self.tell(str(self.progress))

    def tell(self, text: str) -> None:
        """Write on a terminal, over the last line."""
        self.told_at = now()
        terminal.say(text, self.stream)
