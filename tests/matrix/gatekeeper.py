"""The gate under pytest: the run is compared with a baseline on the controller, with workers or without."""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import pytest

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import gate, step_summary
from tiebreak.reports.gate.limits import Limits, limits
from tiebreak.reports.records import store
from tiebreak.reports.records.record import MeasureRecord, Run

_USAGE = 2
_NEEDS_BASELINE = ("update_baseline", "across", "fail")


def add_options(group: pytest.OptionGroup) -> None:
    """Options of the gate."""
    group.addoption("--baseline", metavar="FILE", help="compare with these records and fail if a cell is worse")
    group.addoption("--fail", metavar="LIMITS", help="how much worse is too much: bias:0.02,max:1,share:0.1")
    group.addoption("--across", action="store_true", help="the baseline is another platform's: compare claims alone")
    group.addoption("--update-baseline", action="store_true", help="then make this run the baseline")


class Gatekeeper:
    """Checks the baseline before the run, compares after it, and tells GitHub."""

    def __init__(
        self,
        config: pytest.Config,
        options: dict[str, Any],
        platform: dict[str, Any],
        result: Callable[[], Run | None],
        measures: Mapping[str, MeasureRecord],
        cases: Collection[str] = (),
    ) -> None:
        """Read the baseline.

        Args:
            config: pytest's.
            options: the matrix's own, as the records keep them.
            platform: of this run, as the records keep it.
            result: gives the run when the session has ended; None if no cell was to run.
            measures: all that there are, which --fail may name.
            cases: names of those that the run has.

        Raises:
            UsageError: options that don't go together, or a baseline that tells nothing about this run.
            tiebreak.reports.records.store.UnreadableRecordsError: the baseline can't be read.
        """
        self.options, self.platform, self.result, self.cases = options, platform, result, cases
        self.across, self.update = (bool(config.getoption(name)) for name in ("across", "update_baseline"))
        name = config.getoption("baseline")
        self.path = None if name is None else Path(str(name))
        self.limits: Limits = limits(config.getoption("fail"), Path.cwd())
        self.limits.check(measures)
        self.baseline = self._read(config)
        self.lines: list[str] = []

    def _read(self, config: pytest.Config) -> Run | None:
        if self.path is None:
            lost = [name.replace("_", "-") for name in _NEEDS_BASELINE if config.getoption(name)]
            if lost:
                raise UsageError(f"--{lost[0]} is about a baseline: it needs --baseline FILE")
            return None
        if self.update and not self.path.exists():
            store.check_writable(self.path.parent)
            return None
        baseline = store.read(self.path)
        if self.update:
            gate.check_update(baseline, self.path, self.options, self.cases)
        else:
            try:
                gate.check_comparable(baseline, self.platform, self.options, across=self.across)
            except UsageError as error:
                raise UsageError(f"--baseline {self.path}: {error}") from error
        return baseline

    def refuse_to_overwrite(self, records: Path) -> None:
        """Refuse a baseline that is where the run's own records go: the next run would be compared with this one.

        Raises:
            UsageError: it is.
        """
        if self.path is None:
            return
        same = self.path.resolve() == records.resolve()
        if same or (self.path.exists() and records.exists() and self.path.samefile(records)):
            raise UsageError(f"--baseline {self.path}: this run's own records go there; keep the baseline elsewhere")

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Judge the run; the keeper of the records has put it together before."""
        run = self.result()
        if run is not None:
            self._summarise(step_summary.of_run(run))
        if self.path is None or session.config.getoption("collectonly"):
            return
        if run is None:
            self.lines.append(f"gate FELL: no cell ran, nothing was compared with {self.path}")
            self._fall(session, pytest.ExitCode.TESTS_FAILED)
            return
        try:
            if self.baseline is not None:
                self._judge(session, self.path, self.baseline, run)
            if self.update:
                gate.update(run, self.path)
                self.lines.append(f"baseline updated: {self.path}")
        except (UsageError, store.UnreadableRecordsError, store.UnwritableFolderError) as error:
            self.lines.append(str(error))
            self._fall(session, _USAGE)

    def _judge(self, session: pytest.Session, path: Path, baseline: Run, run: Run) -> None:
        try:
            outcome = gate.gate(baseline, run, self.limits, across=self.across)
        except UsageError as error:
            self.lines.append(f"{path}: {error}")  # of a baseline that is about to be replaced
            return
        self.lines.append(gate.report(outcome, path))
        self._summarise(step_summary.of_gate(outcome, path))
        if not outcome.held and not self.update:
            self._fall(session, pytest.ExitCode.TESTS_FAILED)

    def _fall(self, session: pytest.Session, status: int) -> None:
        """Fail a session that would have passed; one that was interrupted keeps its own exit code."""
        if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = status

    def _summarise(self, text: str) -> None:
        try:
            step_summary.append(text)
        except OSError as error:
            self.lines.append(f"GITHUB_STEP_SUMMARY: {error.strerror or error}")

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """What the gate found, below the tables."""
        for text in self.lines:
            terminalreporter.write_line("")
            terminalreporter.write_line(text)
