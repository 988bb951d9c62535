"""The way of the records: collected on the controller as tests report, written when the session ends, anyhow."""

import functools
import re
import shutil
import tempfile
import uuid
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from _pytest.junitxml import xml_key
from msgspec.structs import replace

from tiebreak.backends.backend import Backend
from tiebreak.backends.platform import describe
from tiebreak.matrix import budget, options, watch
from tiebreak.matrix.checks import checks
from tiebreak.matrix.checks.gradients import CHECK as GRADIENTS
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.explain import explain, plans
from tiebreak.matrix.record_file import RecordFile
from tiebreak.matrix.recording import crashed_record
from tiebreak.matrix.scheduling import CaseScheduling, cell_id
from tiebreak.matrix.settings import Settings
from tiebreak.reports.gate.expected import Excuses
from tiebreak.reports.names import first_few
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import decode
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as tables
from tiebreak.reports.verdict import Verdict, verdicts

_USAGE = 2
_WORKER_DIED = re.compile(r"worker '(\w+)' crashed while running")  # xdist's words; which worker is chance
_DEATHS = 2  # of workers by one kernel: from then on each of its cells has a process of its own
PROPERTY = "tiebreak"  # name of the property that carries a cell's record from its worker to the controller
_DIED = "its process died: killed by a signal, out of memory, or ended by the kernel itself"
POISONED = "tiebreak.poisoned"  # name of the property that says that a cell has left its worker's device unusable


class RecordCollector:
    """Collects records, writes them, and says what they are."""

    def __init__(
        self,
        config: pytest.Config,
        cells: Iterable[Cell],
        settings: Settings,
        unavailable: Mapping[str, str],
        excuses: Excuses,
        missing: Collection[str] = (),
    ) -> None:
        """Begin with nothing.

        Args:
            config: pytest's.
            cells: of the run.
            settings: of every cell.
            unavailable: backends that can't run, and why.
            excuses: for failures.
            missing: those of the unavailable backends that were asked for by name, and must not be missing.
        """
        self.config, self.settings, self.unavailable, self.excuses = config, settings, unavailable, excuses
        self.missing = missing
        self.expected = {cell.id: cell for cell in cells}
        self.backends = backends_of(self.expected.values())
        self.records: dict[str, records.Record] = {}
        self.seconds: dict[str, float] = {}
        self.collected: set[str] = set()
        self.begun: set[str] = set()
        self.run_again: set[str] = set()  # cells of which a second report came: something has rerun what failed
        self.name = uuid.uuid4().hex
        path = Path(str(config.getoption("out"))) / f"{config.getoption('save') or 'last'}.json"
        self.file = RecordFile(path, self.name)
        self.run: records.Run | None = None
        self.failure: str | None = None  # why the records could not be written
        self.late: dict[str, watch.Late] = {}  # by kernel
        self.first_late: dict[str, watch.TimedOut] = {}  # cells that passed their limit once, and run again
        self.deaths = Counter[str]()  # of workers, by the kernel that they ran
        self.fallen: list[str] = []  # what fails the session though no single cell fell

    def options(self) -> dict[str, Any]:
        """Those of the command line that decide what runs."""
        return options.recorded(self.config.getoption)

    def narrowing(self) -> tuple[records.Narrowing, ...]:
        """What they leave out."""
        return options.narrowing(self.config.getoption, self.expected.values(), self.collected)

    def platform(self) -> dict[str, Any]:
        """This machine, with the devices that cells run on."""
        described = describe().as_dict()
        for backend in self.backends:
            described |= backend.describe()
        return described

    def pytest_report_header(self) -> list[str]:
        """What runs here, what doesn't and why."""
        platform = describe()
        return [
            f"tiebreak: {len(self.expected)} cells in the matrix; records go to {self.file.path}",
            f"platform: {platform.cpu}, level {platform.level}, torch {platform.torch}",
            *(f"backend {each.name}: {notice}" for each in self.backends if (notice := each.notice()) is not None),
            *(f"backend {name} can't run: {reason}" for name, reason in self.unavailable.items()),
            *self.warnings(),
        ]

    def warnings(self) -> list[str]:
        """What was asked for and has no effect, one line each."""
        if self.config.getoption("cell_timeout") is None or self.config.getoption("dist", "no") != "no":
            return []
        return ["--cell-timeout has no effect without workers: it would end the only process that there is; give -n 1"]

    @functools.cached_property
    def _fingerprints(self) -> dict[str, Mapping[str, str | float]]:
        """What the arithmetic of every backend that ran does, by backend."""
        return {backend.name: backend.fingerprint() for backend in self.backends}

    @pytest.hookimpl(wrapper=True)  # before JUnit's XML takes the properties, and pytest counts what failed
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> Generator[None, None, None]:
        """Take the record that a cell's report carries; a cell whose worker died has none and is marked crashed."""
        self._take(report)
        yield

    def _take(self, report: pytest.TestReport) -> None:
        if any(key == POISONED for key, _ in report.user_properties):
            self._expect_to_leave(getattr(report, "node", None))
        name = cell_id(report.nodeid)
        if name not in self.expected:
            return
        carried = [value for key, value in report.user_properties if key == PROPERTY]
        if name in self.records and carried:
            self.run_again.add(name)
        if name not in self.records and (carried or report.failed):
            if carried:
                record = self._with_first_try(decode(str(carried[0]), records.Record))
            else:
                record = self.excuses.excuse(self._without_record(name, report))
                if record.excused is not None:
                    report.outcome, report.wasxfail = "skipped", record.excused
            self.records[name], self.seconds[name] = record, round(report.duration, 3)
            in_time = records.IN_TIME not in record.answers
            if in_time or not carried:  # a cell that was given up took no time
                self._note_time(record.kernel, in_time=in_time)
            self.file.now_and_then(lambda: self._as_run(complete=False))
        if carried:
            # The whole record was for the way here; a report in JUnit's XML gets the numbers.
            report.user_properties = [pair for pair in report.user_properties if pair[0] != PROPERTY]
            report.user_properties += properties(self.records[name])

    def _expect_to_leave(self, worker: Any) -> None:
        """Tell the scheduler, if there is one, that a worker will end itself, and not by fault of its next cell."""
        session = self.config.pluginmanager.get_plugin("dsession")
        if session is not None and isinstance(session.sched, CaseScheduling):
            session.sched.leaving.add(worker)

    @functools.cached_property
    def _watches(self) -> Path:
        """Where workers leave word before their watch ends them."""
        return Path(tempfile.mkdtemp(prefix="tiebreak-"))

    def watched(self, worker: str) -> dict[str, Any]:
        """What a worker, which is about to start, is told of its watch."""
        return watch.watched(self._watches / worker, [name for name, n in self.deaths.items() if n >= _DEATHS])

    def pytest_unconfigure(self) -> None:
        """Leave nothing behind."""
        if "_watches" in vars(self):
            shutil.rmtree(self._watches, ignore_errors=True)

    def _without_record(self, name: str, report: pytest.TestReport) -> records.Record:
        """Return the record of a cell whose test failed before it gave one: mostly its process has ended."""
        why, cell = _why(report), self.expected[name]
        died = _WORKER_DIED.match(why)
        if died is None:
            return crashed_record(cell, self.settings, why, in_time=not why.startswith("Failed: Timeout"))
        self.deaths[cell.kernel.name] += 1
        late, first = watch.timed_out(self._watches / died[1]), self.first_late.get(name)
        if late is None:
            return crashed_record(cell, self.settings, _DIED)
        why = f"twice: {late.why}" if first else late.why
        return crashed_record(cell, self.settings, why, in_time=False, own=late.own and first is not None)

    def _with_first_try(self, record: records.Record) -> records.Record:
        """Say of a cell that had no second try, since its kernel was given up, where it was in the first."""
        answer, first = record.answers.get(records.IN_TIME), self.first_late.get(record.id)
        if answer is None or first is None:
            return record
        return replace(record, answers={records.IN_TIME: replace(answer, why=f"{first.why}; {answer.why}")})

    def another_try(self, worker: str, nodeid: str) -> bool:
        """Whether what a worker ran as it died is run again: a cell that passed its limit for the first time.

        A busy machine may be why, once.
        """
        name = cell_id(nodeid)
        late = watch.timed_out(self._watches / worker)
        if late is None or name not in self.expected or name in self.first_late:
            return False
        kernel = self.expected[name].kernel.name
        self.first_late[name] = late
        self.deaths[kernel] += 1
        self._note_time(kernel, in_time=False)
        return True

    def _note_time(self, kernel: str, *, in_time: bool) -> None:
        """Let workers know of a kernel whose cells time out, and of one whose cells do so no more."""
        late = self.late.get(kernel, watch.Late())
        now = watch.Late(late.ever, 0) if in_time else watch.Late(late.ever + 1, late.in_a_row + 1)
        if now != late:
            self.late[kernel] = now
            watch.tell(self._watches, self.late)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Remember which cells have begun."""
        self.begun.add(cell_id(nodeid))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which cells were to run (without workers; with them the controller collects nothing)."""
        self.collected = {cell_id(item.nodeid) for item in session.items} & set(self.expected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The same, as a worker tells it."""
        self.collected = {cell_id(nodeid) for nodeid in ids} & set(self.expected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records. A run of skips fails the session, and so does an excuse that excuses nothing any more."""
        if not (self.records or self.collected) or self.config.getoption("collectonly"):
            return
        self.fallen = list(self._failures())
        interrupted = bool(session.shouldstop) or session.exitstatus == pytest.ExitCode.INTERRUPTED
        if not interrupted and not self.config.getoption("maxfail"):
            self._account_for_lost()
        explanations = explain(self.records.values())
        declared = [self.expected[name].kernel.declaration for name in self.records]
        run = self._as_run(complete=set(self.records) >= self.collected and not session.shouldstop)
        self.run = replace(run, explanations=explanations, plans=plans(filter(None, declared), explanations))
        if (xml := self.config.stash.get(xml_key, None)) is not None:
            for verdict in self.verdicts(self.run):
                xml.add_global_property("tiebreak.verdict", verdict.headline)
        try:
            self.file.write(self.run)
        except store.UnwritableFolderError as error:
            self.failure = str(error)
            session.exitstatus = _USAGE
            return
        left_out = [record.case for record in self.records.values() if record.skipped == records.NO_TIME]
        if needed := [case for case in dict.fromkeys(left_out) if case in budget.needed()]:
            advice = "raise --budget, or name fewer with --cases"
            self.fallen.append(f"fell: too little was run for a verdict, without {first_few(needed, 8)}; {advice}")
        if session.exitstatus == pytest.ExitCode.OK:
            # What a record says and the session would pass over, as with a plug-in that runs again what failed.
            again = dict.fromkeys(self.run_again, " at first, whatever came of it when it was run again")
            failed = [record for record in self.records.values() if record.fails]
            self.fallen += [f"fell: {record.id} {record.outcome}{again.get(record.id, '')}" for record in failed]
            if self.fallen:
                session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _failures(self) -> Iterator[str]:
        """Yield what fails the session though no single cell fell."""
        whole = options.is_whole(self.config.getoption, of_subject=True) and self.expected.keys() <= self.records.keys()
        yield from self.excuses.stale(self.records.values(), whole=whole)
        for name in self.missing:
            why = self.unavailable[name]
            yield f"fell: {name} was asked for and can't run here: {why}; --allow-missing {name} lets the rest pass"
        ran = [record for record in self.records.values() if record.outcome != records.SKIPPED]
        if self.config.getoption("backward") == "own":  # and who has no gradients is not even wrong
            own = [record for record in ran if self.expected[record.id].kernel.external]
            asked = {record.kernel for record in own if self.expected[record.id].experiment.described().backward}
            given = {record.kernel for record in own if GRADIENTS.name in record.answers}
            for name in sorted(asked - given):
                yield f"fell: {name} gave no gradients, and --backward own asks for them"
        if not ran:
            yield "fell: no cell ran, and what did not run does not pass"

    def _account_for_lost(self) -> None:
        """Put a cell that was asked for into the records, also where all workers died before its turn."""
        lost = [name for name in self.expected if name in self.collected - self.records.keys()]
        why = "never run: too many of the workers died before its turn"
        self.records |= {name: crashed_record(self.expected[name], self.settings, why) for name in lost}
        if lost:
            self.fallen.append(f"fell: {tables.counted(len(lost), 'cell')} never ran: too many workers died")

    def _as_run(self, *, complete: bool) -> records.Run:
        left = self.collected - self.records.keys()
        run = records.Run(
            platform=self.platform() | {"fingerprint": self._fingerprints},
            options=self.options(),
            narrowing=self.narrowing(),
            records=tuple(self.records[name] for name in self.expected if name in self.records),
            unavailable=self.unavailable,
            seconds=self.seconds,
            not_run=tuple(name for name in self.expected if name in left - self.begun),
            running=tuple(name for name in self.expected if name in left & self.begun),
            complete=complete,
            run=self.name,
        )
        return described(run, self.expected)

    def verdicts(self, run: records.Run) -> list[Verdict]:
        """What there is to say of the kernels, if one's own are among them."""
        return verdicts(run, failures=self.failures) if run.own else []

    @property
    def failures(self) -> list[str]:
        """What fails the session though no single cell fell: by itself, by the gate, by records that can't be kept."""
        gate = self.config.pluginmanager.get_plugin("tiebreak-gatekeeper")
        lines = gate.lines if gate is not None and gate.fell else ()
        return [*self.fallen, *lines, *([self.failure] if self.failure else [])]

    def report(self, run: records.Run, width: int | None) -> list[str]:
        """What the run came to: the verdict on kernels of one's own, the tables, every cell that fell, the counts."""
        table, fallen = grids.text(tables.tables(run), width=width), "\n".join(tables.fallen(run.records))
        judged = list(map(str, self.verdicts(run)))
        return list(filter(None, [*judged, table, fallen, tables.summary(run)]))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The report, and what fails the session though no single cell fell."""
        if self.failure:
            terminalreporter.write_line(self.failure, red=True)
        if self.run is None:
            return
        terminalreporter.section("tiebreak")
        for text in self.report(self.run, terminalreporter._tw.fullwidth):
            terminalreporter.write_line("")
            terminalreporter.write_line(text)
        terminalreporter.write_line("")
        for text in self.fallen:
            terminalreporter.write_line(text, red=True)
        if not self.failure:
            terminalreporter.write_line(self.file.line)


def described(run: records.Run, cells: Mapping[str, Cell]) -> records.Run:
    """Return a run with the descriptions of what its records have, each once."""
    ran = {record.experiment for record in run.records}
    measured = {name for record in run.records for name in record.measures}
    asked = {name: check for name, check in checks().items() if any(name in record.answers for record in run.records)}
    cases = {record.case: cells[record.id].experiment for record in run.records}
    return replace(
        run,
        measures={name: measure for name, measure in measures().items() if name in measured},
        checks={name: records.CheckRecord(check.about, check.judges, check.wrong) for name, check in asked.items()},
        cases={name: replace(each.described(), needed=name in budget.needed()) for name, each in cases.items()},
        experiments={name: kind.described for name, kind in kinds().items() if name in ran},
    )


def measures() -> dict[str, records.MeasureRecord]:
    """Return every measure of every kind of experiment, for the file of records."""
    return {
        name: records.MeasureRecord(*(getattr(measure, each) for each in records.MeasureRecord.__struct_fields__))
        for kind in kinds().values()
        for name, measure in kind.measures().items()
    }


def backends_of(cells: Iterable[Cell]) -> list[Backend]:
    """Return every backend that cells run on, once."""
    return list({cell.backend.name: cell.backend for cell in cells}.values())


def properties(record: records.Record) -> list[tuple[str, object]]:
    """Return what a cell's entry in JUnit's XML carries: its outcome, measures and answers."""
    entries: dict[str, object] = {"outcome": record.outcome, "verdict": record.verdict, "plan": record.plan}
    for name, value in record.measures.items():
        entries[name] = record.number(name)
        if isinstance(value, records.Estimate):
            entries[f"{name}_half_width"] = value.half_width
    entries |= {f"{name}_met": answer.met for name, answer in record.answers.items()}
    return [(f"tiebreak.{name}", value) for name, value in entries.items() if value is not None]


def _why(report: pytest.TestReport) -> str:
    """Return why a test failed that gave no record, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    if lines and _WORKER_DIED.match(lines[-1]):
        return lines[-1]
    return (lines[0] if crash else lines[-1]) if lines else "no report"
