"""The gate under pytest: the run is compared with a baseline on the controller, with workers or without."""

import inspect
import os
from pathlib import Path
from typing import Any

import pytest

from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.matrix.options import recorded
from tiebreak.matrix.record_collector import RecordCollector, measures
from tiebreak.reports.cli import USAGE
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import gate, report
from tiebreak.reports.gate.expected import limits
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run


class Gatekeeper:
    """The pytest plug-in that judges a run by a baseline."""

    def __init__(self, config: pytest.Config, collector: RecordCollector) -> None:
        """Read the baseline; a `UsageError` where it has nothing about this run, or is where its records go."""
        self.collector = collector
        self.across, self.update = (bool(config.getoption(name)) for name in ("across", "update_baseline"))
        name = config.getoption("baseline")
        self.path = None if name is None else Path(str(name))
        self.limits = limits(config.getoption("fail"), Path.cwd())
        self.limits.check(measures())
        self.baseline = None if self.path is None else self._read(self.path)
        self.lines: list[str] = []
        self.annotations: list[str] = []  # for GitHub, which reads them off what is printed
        self.failed = False

    def _read(self, path: Path) -> Run | None:
        # Where the run's own records go, the next run would be compared with this one.
        file = self.collector.file.path
        if path.resolve() == file.resolve() or (path.exists() and file.exists() and path.samefile(file)):
            raise UsageError(f"--baseline {path}: this run's own records go there; keep the baseline elsewhere")
        if self.update and not path.exists():
            store.check_writable(path.parent)
            return None
        gate.check_kept(path)
        baseline = store.read(path)
        if self.update:
            gate.check_update(baseline, path, self.collector.narrowing())
            return baseline
        try:
            options = recorded(self.collector.config.getoption)
            gate.check_comparable(baseline, self.collector.platform(), options, across=self.across)
        except UsageError as error:
            raise UsageError(f"--baseline {path}: {error}") from error
        return baseline

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge the run; the collector has put it together before."""
        run, outcome = self.collector.run, None
        if self.path is not None and not session.config.getoption("collectonly"):
            try:
                outcome = self._compared(session, self.path, run)
            except UsageError as error:
                self.lines.append(str(error))
                self._fall(session, USAGE)
        if run is None:
            return
        summaries = [report.summary_of_run(run, list(map(str, self.collector.verdicts(run))))]
        summaries += [report.summary_of_gate(outcome, self.path)] if outcome is not None and self.path else []
        try:
            report.append_summary("\n\n".join(summaries))
        except OSError as error:
            self.lines.append(f"GITHUB_STEP_SUMMARY: {error.strerror or error}")
        if os.environ.get("GITHUB_ACTIONS") == "true":
            self.annotations = report.annotations(run, outcome, self._places())

    def _compared(self, session: pytest.Session, path: Path, run: Run | None) -> gate.Outcome | None:
        """Return the gate's findings; with --update-baseline the run becomes the baseline, and nothing fails."""
        outcome = None
        if run is None:
            self.lines.append(f"gate FAILED: no cell ran, nothing was compared with {path}")
            self._fall(session, pytest.ExitCode.TESTS_FAILED)
            return None
        if self.baseline is not None:
            try:
                entries = self.collector.excuses.entries
                outcome = gate.gate(self.baseline, run, self.limits, across=self.across, expected=entries)
            except UsageError as error:
                if not self.update:
                    raise UsageError(f"--baseline {path}: {error}") from error
                self.lines.append(f"not compared: {error}")
            else:
                self.lines.append(report.report(outcome, path))
                if not outcome.passed and not self.update:
                    self._fall(session, pytest.ExitCode.TESTS_FAILED)
        if self.update:
            gate.update(run, path)
            self.lines.append(f"baseline updated: {path}")
        return outcome

    def _fall(self, session: pytest.Session, status: int) -> None:
        """Fail a session that would have passed; one that was interrupted keeps its own exit code."""
        self.failed = True
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = status

    def _places(self) -> dict[str, report.Place]:
        """Return the places of users' kernels, in files of the repository that the workflow checked out."""
        root = Path(os.environ.get("GITHUB_WORKSPACE") or Path.cwd()).resolve()
        places = {}
        for kernel in {cell.kernel.name: cell.kernel for cell in self.collector.expected.values()}.values():
            if isinstance(kernel, UserKernel):
                code = getattr(inspect.unwrap(kernel.caller.function), "__code__", None)
                if code is not None and (path := Path(code.co_filename).resolve()).is_relative_to(root):
                    places[kernel.name] = path.relative_to(root).as_posix(), code.co_firstlineno
        return places

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the gate's report."""
        for text in self.lines:
            terminalreporter.write_line("")
            terminalreporter.write_line(text)
        for text in self.annotations:
            terminalreporter.write_line(text)
