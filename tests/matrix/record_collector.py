"""The way of the records: collected on the controller as tests report, kept on the way, written at the end, anyhow."""

import contextlib
import functools
import os
import re
import shutil
import tempfile
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
from _pytest.junitxml import xml_key
from msgspec.structs import replace

from tiebreak.backends.backend import Backend
from tiebreak.backends.platform import describe
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import Rounding
from tiebreak.kernels.kernel import Declaration
from tiebreak.matrix import options
from tiebreak.matrix.checks import GRADIENTS, checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.resolver import resolver
from tiebreak.matrix.run import ended_record
from tiebreak.matrix.scheduling import CaseScheduling, cell_id
from tiebreak.matrix.watch import TimedOut, tell_late, timed_out
from tiebreak.matrix.workbench import Settings
from tiebreak.plugins import problems
from tiebreak.reports.cli import USAGE
from tiebreak.reports.gate.expected import Excuses
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import decode
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as tables
from tiebreak.reports.verdict import Verdict, verdicts

_WORKER_DIED = re.compile(r"worker '(\w+)' crashed while running")  # xdist's words; which worker is chance
PROPERTY = "tiebreak"  # name of the property that carries a cell's record from its worker to the controller
_DIED = "its process died: killed by a signal, out of memory, or ended by the kernel itself"
_NEVER_RUN = "never run: too many of the workers died before its turn"
POISONED = "tiebreak.poisoned"  # name of the property that says that a cell has left its worker's device unusable
_EVERY = 10.0  # seconds between two copies on the way, at least
_SHARE = 100.0  # times as long as the last one took: of a large file they are no load


class RecordFile:
    """The file of a run's records."""

    def __init__(self, path: Path, name: str) -> None:
        """Set the path and the run's name; nothing is written yet."""
        self.path, self._name = path, name
        self.taken: Path | None = None  # where the records would have gone, had another run not written there
        self.removed = False  # whether the file was there, and then no more
        self._seen = _stamp(path)
        self._written, self._pause = monotonic(), _EVERY

    def checkpoint(self, run: Callable[[], records.Run]) -> None:
        """Write the results so far if the last time was long ago: a killed process shall not cost hours of work."""
        began = monotonic()
        if began - self._written < self._pause:
            return
        with contextlib.suppress(store.UnwritableFolderError):  # said when the session ends
            self.write(run())
        self._written = monotonic()
        self._pause = max(_EVERY, _SHARE * (self._written - began))

    def write(self, run: records.Run) -> None:
        """Write the records; under another name if another run has written to the file since this one began."""
        now = _stamp(self.path)
        self.removed = self.removed or (now is None and self._seen is not None)
        if now not in (self._seen, None):
            self.taken = self.taken or self.path
            self.path = self.path.with_name(f"{self.taken.stem}-{self._name[:8]}.json")
        store.write(run, self.path)
        self._seen = _stamp(self.path)

    @property
    def line(self) -> str:
        """Where the records are, in one line."""
        removed = ", written anew: while the run went on, something removed what was there" if self.removed else ""
        taken = f", for another run has written {self.taken} meanwhile; --save names another file"
        return f"records: {self.path}{taken if self.taken else removed}"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return a value that changes when a file is rewritten; None: there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class RecordCollector:
    """The pytest plug-in that collects the records of all workers, writes them and reports."""

    def __init__(
        self,
        config: pytest.Config,
        cells: Iterable[Cell],
        settings: Settings,
        unavailable: Mapping[str, str],
        excuses: Excuses,
        missing: Collection[str] = (),
    ) -> None:
        self.config, self.settings, self.excuses = config, settings, excuses
        self.unavailable = unavailable  # backends that can't run, and why
        self.missing = missing  # those of them that were asked for by name, and must not be missing
        self.expected = {cell.id: cell for cell in cells}
        self.backends = backends_of(self.expected.values())
        self.records: dict[str, records.Record] = {}
        self.seconds: dict[str, float] = {}
        self.collected: set[str] = set()
        self.begun: set[str] = set()
        self.name = uuid.uuid4().hex
        path = Path(str(config.getoption("out"))) / f"{config.getoption('save') or 'last'}.json"
        self.file = RecordFile(path, self.name)
        self.run: records.Run | None = None
        self.failure: str | None = None  # why the records could not be written
        self.late: dict[str, list[str]] = {}  # by kernel: why its last cells have timed out, one after the other
        self.first_late: dict[str, TimedOut] = {}  # cells that passed their limit once, and run again
        self.failed: list[str] = []  # what fails the session though no single cell failed

    def narrowing(self) -> tuple[records.Narrowing, ...]:
        """Return which cells the command line left out."""
        return options.narrowing(self.config.getoption, self.expected.values(), self.collected)

    def platform(self) -> dict[str, Any]:
        """Return the platform of the run."""
        described = describe()
        for backend in self.backends:
            described |= backend.describe()
        return described | {"evidence": {backend.name: backend.evidence for backend in self.backends}}

    def pytest_report_header(self) -> list[str]:
        """Return the first lines of the report."""
        platform = describe()
        return [
            f"tiebreak: {len(self.expected)} cells in the matrix; records go to {self.file.path}",
            f"platform: {platform['cpu']}, level {platform['level']}, torch {platform['torch']}",
            *(f"backend {each.name}: {notice}" for each in self.backends if (notice := each.notice()) is not None),
            *(f"backend {name} can't run: {reason}" for name, reason in self.unavailable.items()),
            *self.warnings(),
        ]

    def warnings(self) -> list[str]:
        """Return options that have no effect, and plug-ins that can't be used, one line each."""
        if self.config.getoption("cell_timeout") is None or self.config.getoption("dist", "no") != "no":
            return problems()
        why = "it would end the only process that there is; give -n 1"
        return [*problems(), f"--cell-timeout has no effect without workers: {why}"]

    @functools.cached_property
    def _fingerprints(self) -> dict[str, Mapping[str, str | float]]:
        return {backend.name: backend.fingerprint() for backend in self.backends}

    @pytest.hookimpl(tryfirst=True)  # before JUnit's XML takes the properties, and pytest counts what failed
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the first record of a cell; one whose worker died has none and is marked crashed."""
        if any(key == POISONED for key, _ in report.user_properties):
            # The worker will end itself, and not by fault of its next cell.
            session = self.config.pluginmanager.get_plugin("dsession")
            if session is not None and isinstance(session.sched, CaseScheduling):
                session.sched.leaving.add(getattr(report, "node", None))
        name = cell_id(report.nodeid)
        if name not in self.expected:
            return
        carried = next((str(value) for key, value in report.user_properties if key == PROPERTY), None)
        if name not in self.records and (carried or report.failed):
            if carried:
                record = decode(carried, records.Record)
            else:
                record = self.excuses.excuse(self._without_record(name, report))
                if record.excused is not None:
                    report.outcome, report.wasxfail = "skipped", record.excused
            self.records[name], self.seconds[name] = record, round(report.duration, 3)
            late = record.answers.get(records.IN_TIME)
            if late is None or not carried:  # a cell that was given up took no time
                self._note_time(record.kernel, late.why if late else None)
            self.file.checkpoint(lambda: self._as_run(complete=False))
        if carried:
            # The whole record was for the way here; a report in JUnit's XML gets the numbers.
            report.user_properties = [pair for pair in report.user_properties if pair[0] != PROPERTY]
            report.user_properties += properties(self.records[name]) if xml_key in self.config.stash else ()

    @functools.cached_property
    def words(self) -> Path:
        """The folder where workers leave messages before their watch ends them."""
        return Path(tempfile.mkdtemp(prefix="tiebreak-"))

    def pytest_unconfigure(self) -> None:
        """Remove the folder of workers' messages."""
        if "words" in vars(self):
            shutil.rmtree(self.words, ignore_errors=True)

    def _without_record(self, name: str, report: pytest.TestReport) -> records.Record:
        """Return the record of a cell whose test failed before it gave one: mostly its process has ended."""
        why, cell = _why(report), self.expected[name]
        died = _WORKER_DIED.match(why)
        if died is None:
            check = records.IN_TIME if why.startswith("Failed: Timeout") else records.RUNS
            return ended_record(cell, self.settings, check, why)
        late, first = timed_out(self.words / died[1]), self.first_late.get(name)
        if late is None:
            return ended_record(cell, self.settings, records.RUNS, _DIED)
        why = f"twice: {late.why}" if first else late.why
        return ended_record(cell, self.settings, records.IN_TIME, why, passed=False if late.own and first else None)

    def another_try(self, worker: str, nodeid: str) -> bool:
        """Return whether the cell of a worker that died runs again: once, since a busy machine may be the cause."""
        name = cell_id(nodeid)
        late = timed_out(self.words / worker)
        if late is None or name not in self.expected or name in self.first_late:
            return False
        self.first_late[name] = late
        self._note_time(self.expected[name].kernel.name, late.why)
        return True

    def _note_time(self, kernel: str, late: str | None) -> None:
        """Tell workers which kernels' cells time out, one after the other, and which no longer do."""
        before = self.late.get(kernel, [])
        self.late[kernel] = [] if late is None else [*before, late]
        if before or late is not None:
            tell_late(self.words, self.late)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Note that a cell has begun."""
        self.begun.add(cell_id(nodeid))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which cells were to run (without workers; with them the controller collects nothing)."""
        self.collected = {cell_id(item.nodeid) for item in session.items} & set(self.expected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """Remember the cells to run that a worker reports."""
        self.collected = {cell_id(nodeid) for nodeid in ids} & set(self.expected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records. A run of skips fails the session, and so does an excuse that excuses nothing any more."""
        if not (self.records or self.collected) or self.config.getoption("collectonly"):
            return
        self.failed = list(self._failures())
        interrupted = bool(session.shouldstop) or session.exitstatus == pytest.ExitCode.INTERRUPTED
        lost = [name for name in self.expected if name in self.collected - self.records.keys()]
        if lost and not interrupted and not self.config.getoption("maxfail"):
            for name in lost:
                self.records[name] = ended_record(self.expected[name], self.settings, records.RUNS, _NEVER_RUN)
            self.failed.append(f"failed: {tables.counted(len(lost), 'cell')} never ran: too many workers died")
        self.run = self._as_run(complete=set(self.records) >= self.collected and not session.shouldstop)
        if (xml := self.config.stash.get(xml_key, None)) is not None:
            for verdict in self.verdicts(self.run):
                xml.add_global_property("tiebreak.verdict", verdict.headline)
        try:
            self.file.write(self.run)
        except store.UnwritableFolderError as error:
            self.failure = str(error)
            session.exitstatus = USAGE
            return
        if session.exitstatus == pytest.ExitCode.OK:
            # Failures in records that the session would pass over, as with a plug-in that runs again what failed.
            failed = [record for record in self.records.values() if record.fails]
            self.failed += [f"failed: {record.id} {record.outcome} at first, whatever came of it when it was run again"
                            for record in failed]  # fmt: skip
            if self.failed:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _failures(self) -> Iterator[str]:
        """Yield the reasons why the session fails though no cell does."""
        whole = options.is_whole(self.config.getoption, of_subject=True) and self.expected.keys() <= self.records.keys()
        yield from self.excuses.stale(self.records.values(), whole=whole)
        for name in self.missing:
            why = self.unavailable[name]
            yield f"failed: {name} was asked for and can't run here: {why}; --allow-missing {name} lets the rest pass"
        ran = [record for record in self.records.values() if record.outcome != records.SKIPPED]
        if self.config.getoption("backward") == "own":  # and who has no gradients is not even wrong
            users = [record for record in ran if self.expected[record.id].kernel.external]
            trained = {record.kernel for record in users if self.expected[record.id].experiment.described().backward}
            given = {record.kernel for record in users if GRADIENTS in record.answers}
            for name in sorted(trained - given):
                yield f"failed: {name} gave no gradients, and --backward own asks for them"
        if not ran:
            yield "failed: no cell ran, and what did not run does not pass"

    def _as_run(self, *, complete: bool) -> records.Run:
        left = self.collected - self.records.keys()
        waiting, running = left - self.begun, left & self.begun
        run = records.Run(
            platform=self.platform() | {"fingerprint": self._fingerprints},
            options=options.recorded(self.config.getoption),
            narrowing=self.narrowing(),
            records=tuple(self.records[name] for name in self.expected if name in self.records),
            unavailable=self.unavailable,
            seconds=self.seconds,
            not_run=tuple(name for name in self.expected if name in waiting),
            running=tuple(name for name in self.expected if name in running),
            complete=complete,
            run=self.name,
        )
        return described(run, self.expected)

    def verdicts(self, run: records.Run) -> list[Verdict]:
        """Return the verdicts on kernels, if a user's are among them."""
        return verdicts(run, failures=self.failures) if run.has_users_kernel else []

    @property
    def failures(self) -> list[str]:
        """The reasons why the session fails though no cell does: its own, the gate's, unwritable records."""
        gate = self.config.pluginmanager.get_plugin("tiebreak-gatekeeper")
        lines = gate.lines if gate is not None and gate.failed else ()
        return [*self.failed, *lines, *([self.failure] if self.failure else [])]

    def report(
        self, run: records.Run, width: int | None, judged: Sequence[Verdict] = (), *, traced: bool = False
    ) -> list[str]:
        """Return the report: the verdict on users' kernels, the tables, every cell that failed, the counts."""
        table, failed = grids.text(tables.tables(run), width=width), tables.failures(run.records, traced=traced)
        texts = map(str, judged or self.verdicts(run))
        return list(filter(None, [*texts, table, "\n".join(failed), tables.summary(run)]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Print the report."""
        if self.failure:
            terminalreporter.write_line(self.failure, red=True)
        if self.run is None:
            return
        terminalreporter.section("tiebreak")
        for text in self.report(self.run, terminalreporter._tw.fullwidth):
            terminalreporter.write_line("")
            terminalreporter.write_line(text)
        terminalreporter.write_line("")
        for text in self.failed:
            terminalreporter.write_line(text, red=True)
        if not self.failure:
            terminalreporter.write_line(self.file.line)


def described(run: records.Run, cells: Mapping[str, Cell]) -> records.Run:
    """Return a run with the descriptions of its records' parts, each once, and explanations of undeclared kernels."""
    ran = {record.experiment for record in run.records}
    measured = {name for record in run.records for name in record.measures}
    used = {name: check for name, check in checks().items() if any(name in record.answers for record in run.records)}
    cases = {record.case: cells[record.id].experiment for record in run.records}
    explanations = resolver().explained(run.records)
    declared = (cells[record.id].kernel.declaration for record in run.records)
    return replace(
        run,
        measures={name: measure for name, measure in measures().items() if name in measured},
        checks={name: check.described for name, check in used.items()},
        cases={name: each.described() for name, each in cases.items()},
        experiments={name: kind.described for name, kind in kinds().items() if name in ran},
        explanations=explanations,
        plans=plans(filter(None, declared), explanations),
    )


def plans(
    declared: Iterable[Declaration], explanations: Mapping[str, records.Explanation]
) -> dict[str, records.PlanRecord]:
    """Describe the plans that kernels declare or that explanations name: rule or algorithm, and whether a fix."""
    named = {declaration.label: declaration for declaration in declared}
    named |= {plan: parse_declaration(plan) for explanation in explanations.values() for plan in explanation.plans}
    described = {}
    for name, declaration in named.items():
        away = tuple(point for point, cast in declaration.plan.casts() if cast.rounding is Rounding.RTNA)
        rule = re.split("[@,]", declaration.label)[0]
        described[name] = records.PlanRecord(rule, not declaration.shift_rule.is_plain, away)
    return described


def measures() -> dict[str, records.MeasureRecord]:
    """Return every measure's description, by name."""
    return {name: measure for kind in kinds().values() for name, measure in kind.measured.items()}


def backends_of(cells: Iterable[Cell]) -> list[Backend]:
    """Return the backends of these cells."""
    return list({cell.backend.name: cell.backend for cell in cells}.values())


def properties(record: records.Record) -> list[tuple[str, object]]:
    """Return the properties of a cell's entry in JUnit's XML: its outcome, measures and answers."""
    entries: dict[str, object] = {"outcome": record.outcome, "verdict": record.verdict, "plan": record.plan}
    for name, value in record.measures.items():
        entries[name] = record.number(name)
        if isinstance(value, records.Estimate):
            entries[f"{name}_half_width"] = value.half_width
    entries |= {f"{name}_passed": answer.passed for name, answer in record.answers.items()}
    return [(f"tiebreak.{name}", value) for name, value in entries.items() if value is not None]


def _why(report: pytest.TestReport) -> str:
    """Return why a test failed that gave no record, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines() or ["no report"]
    return lines[0] if crash and not _WORKER_DIED.match(lines[-1]) else lines[-1]
