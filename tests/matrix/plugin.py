"""The pytest side of the matrix: options, workers, and the way of the records from the workers to the file."""

import contextlib
import functools
import json
import os
import re
import uuid
from collections.abc import Generator, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tiebreak.backends.backend import Backend
from tiebreak.backends.platform import describe, worker_count
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.case import HEADS_PER_BATCH
from tiebreak.matrix.cell import Cell, Settings, TrainingCell, blank_record, place
from tiebreak.matrix.explain import explain
from tiebreak.matrix.gating import Gatekeeper, add_options
from tiebreak.matrix.scheduling import CaseScheduling
from tiebreak.matrix.selection import Selection, SelectionError, cells, check_captured, matching_backends
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports import records, store, tables
from tiebreak.reports.errors import UsageError

_USAGE = 2
_WORKER_GIB = 2.0
_NO_RUN = ("help", "collectonly", "markers", "showfixtures")  # pytest's options that run no cell
_WORKER_DIED = re.compile(r"worker '\w+' crashed while running")  # xdist's words; which worker is chance
_CHECKPOINT = 256  # records between two checkpoints
_ENVIRONMENT = "tiebreak_environment"  # of a worker's input: what to add to its environment, for its device
PROPERTY = "tiebreak"  # name of the property that carries a cell's record from its worker to the controller
POISONED = "tiebreak.poisoned"  # name of the property that says that a cell has left its worker's device unusable

ACCOUNT = pytest.StashKey[str]()  # a cell's own account of why it did not hold
_poisoned = pytest.StashKey[bool]()  # of the session: whether its device is beyond use for this process
_cells = pytest.StashKey[list[Cell | TrainingCell]]()
_unavailable = pytest.StashKey[Mapping[str, str]]()
_bench = pytest.StashKey[Workbench]()
_keeper = pytest.StashKey["Keeper"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the matrix."""
    group = parser.getgroup("tiebreak", "tiebreak: the matrix (lists are comma-separated, globs allowed)")
    group.addoption("--backend", metavar="NAMES", help=f"backends to run: {', '.join(BACKENDS)}")
    group.addoption("--kernels", metavar="NAMES", help="kernels to run, also any rule@plan such as dithered@all_bf16")
    group.addoption("--cases", metavar="NAMES", help="cases to run, such as 'tied_maxima*'")
    group.addoption(
        "--dtype", metavar="NAMES", default="bf16", help="formats of q, k, v and O: bf16, fp16 (default: bf16)"
    )
    group.addoption("--seed", default="1", metavar="N", help="seed of all inputs (default: 1)")
    group.addoption(
        "--heads", default="256", metavar="N", help="heads a cell draws at first; up to 8 times as many (default: 256)"
    )
    group.addoption(
        "--kernel",
        metavar="FILE.py:FUNCTION",
        help="add your own kernel, a function of (q, k, v, *, causal=False, scale=None) in (batch, heads, N, d) that"
        " returns O; package.module:function works too; it runs alone unless --kernels names others",
    )
    group.addoption("--plan", metavar="NAME", help="hold --kernel to what this rounding plan predicts, case by case")
    group.addoption(
        "--captured",
        metavar="DIR",
        help="add the q, k, v, dO in DIR/inputs-STEP.safetensors (docs/captured.md) as cases, in the format that they"
        " are in, fp32 rounded to --dtype; they run alone unless --cases is given",
    )
    group.addoption("--fair", action="store_true", help="hold --kernel to no bias on every failure input")
    group.addoption("--save", metavar="NAME", help="keep the records as OUT/NAME.json")
    group.addoption("--out", default="out", metavar="DIR", help="folder for records (default: out)")
    add_options(group)


def _refuse(message: str) -> NoReturn:
    """End with one line and exit code 2, before any work."""
    pytest.exit(" ".join(message.split()), returncode=_USAGE)


def _positive(config: pytest.Config, option: str) -> int:
    text = str(config.getoption(option))
    if not re.fullmatch("0*[1-9][0-9]{0,17}", text):
        _refuse(f"--{option} {text}: expected a positive integer")
    return int(text)


def _settings(config: pytest.Config) -> Settings:
    options = [(name, config.getoption(name)) for name in ("kernel", "plan")]
    given = tuple(word for name, value in options if value is not None for word in (f"--{name}", str(value)))
    seed, heads = _positive(config, "seed"), _positive(config, "heads")
    if heads > HEADS_PER_BATCH and heads % HEADS_PER_BATCH:
        _refuse(f"--heads {heads}: expected at most {HEADS_PER_BATCH} or a multiple of {HEADS_PER_BATCH}")
    here = os.path.relpath(Path(__file__).resolve().parent, config.invocation_params.dir)
    return Settings(seed, heads, bool(config.getoption("fair")), given, Path(here).as_posix())


def _selection(config: pytest.Config) -> Selection:
    names = ("backend", "kernels", "cases", "dtype", "kernel", "plan", "captured")
    return Selection(*(config.getoption(name) for name in names))


def pytest_configure(config: pytest.Config) -> None:
    """Check every option before any work, on the controller and again on the workers."""
    # One thread a worker, however many workers: sums are added in one order and records repeat to the bit.
    torch.set_num_threads(1)
    os.environ.update(getattr(config, "workerinput", {}).get(_ENVIRONMENT, {}))
    if config.getoption("fair") and config.getoption("kernel") is None:
        _refuse("--fair holds your own kernel to no bias: it needs --kernel")
    config.stash[_bench] = Workbench(_settings(config))
    try:
        found, config.stash[_unavailable] = cells(_selection(config))
        config.stash[_cells] = found
        for backend in backends_of(found):
            backend.set_up()
        if not hasattr(config, "workerinput"):
            check_captured(config.stash[_cells])
    except SelectionError as error:
        _refuse(str(error))
    if not hasattr(config, "workerinput"):
        keeper = Keeper(config)
        config.stash[_keeper] = keeper
        keeper.check_path()
        config.pluginmanager.register(keeper, "tiebreak-keeper")
        try:
            platform = platform_of(keeper.expected.values())
            gatekeeper = Gatekeeper(config, keeper.options(), platform, lambda: keeper.run)
        except (UsageError, store.UnreadableRecordsError, store.UnwritableFolderError) as error:
            _refuse(str(error))
        config.pluginmanager.register(gatekeeper, "tiebreak-gatekeeper")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Workers for -n auto: by cores, memory and what the devices carry, unless xdist's own variable says how many."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        chosen = matching_backends(_selection(config))
    except SelectionError:  # which pytest_configure tells
        return None
    limits = [backend.worker_limit() for backend in chosen if backend.unavailable() is None]
    return min([worker_count(_WORKER_GIB), *(limit for limit in limits if limit is not None)])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Spread the workers over the devices, before a worker has used any."""
    number = re.search("[0-9]+$", node.gateway.id)
    worker = int(number[0]) if number else 0
    spread = [backend.worker_environment(worker) for backend in backends_of(node.config.stash[_cells])]
    node.workerinput[_ENVIRONMENT] = {name: value for each in spread for name, value in each.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Keep the cells of one case on one worker, unless --dist asks for another way than the default."""
    return CaseScheduling(config, log) if config.getoption("dist") == "load" else None


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a cell."""
    if "cell" in metafunc.fixturenames:
        chosen = metafunc.config.stash[_cells]
        metafunc.parametrize("cell", chosen, ids=[cell.id for cell in chosen])


def poison(item: pytest.Item) -> None:
    """Note that a cell has left the device unusable for its process: no other cell runs there."""
    item.user_properties.append((POISONED, True))
    item.session.stash[_poisoned] = True
    if not hasattr(item.config, "workerinput"):
        item.session.shouldstop = "the device is beyond use for this process; -n 1 puts another in its place"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> None:
    """End a worker whose device is beyond use before it spoils another cell; xdist puts a new one in its place."""
    if item.session.stash.get(_poisoned, False) and hasattr(item.config, "workerinput"):
        os._exit(0)


@pytest.fixture
def bench(pytestconfig: pytest.Config) -> Workbench:
    """What the cells of one worker share."""
    return pytestconfig.stash[_bench]


class Keeper:
    """Collects records on the controller as tests report, and writes them when the session ends, however it ends."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.records: dict[str, records.Record] = {}
        self.seconds: dict[str, float] = {}
        self.expected = {cell.id: cell for cell in config.stash[_cells]}
        self.collected: set[str] = set()
        self.name = uuid.uuid4().hex
        self.run: records.Run | None = None
        self.failure: str | None = None
        self.fallen: list[str] = []  # what fails the session though no single cell fell

    @property
    def path(self) -> Path:
        """Where the records go."""
        return Path(str(self.config.getoption("out"))) / f"{self.config.getoption('save') or 'last'}.json"

    def pytest_report_header(self) -> list[str]:
        """What runs here, what doesn't and why."""
        unavailable = self.config.stash[_unavailable]
        lines = [f"tiebreak: {len(self.expected)} cells in the matrix; records go to {self.path}"]
        platform = describe()
        lines.append(f"platform: {platform.cpu}, level {platform.level}, torch {platform.torch}")
        return [*lines, *(f"backend {name} can't run: {reason}" for name, reason in unavailable.items())]

    @functools.cached_property
    def _fingerprints(self) -> dict[str, Mapping[str, str | float]]:
        """What the arithmetic of every backend that ran does, by backend."""
        return {backend.name: backend.fingerprint() for backend in backends_of(self.expected.values())}

    def check_path(self) -> None:
        """Refuse a place that can't be written to before the work, not after it."""
        name = self.config.getoption("save")
        if name is not None and (not name or {"/", "\\"} & set(name) or name.startswith(".")):
            _refuse(f"--save {name}: expected a plain name such as main; its folder is --out")
        if any(self.config.getoption(option) for option in _NO_RUN):
            return
        try:
            store.check_writable(self.path.parent)
        except store.UnwritableFolderError as error:
            _refuse(f"--out: {error}; name another folder")
        if self.path.is_dir():
            _refuse(f"--save {name}: {self.path} is a folder; take another name")

    @pytest.hookimpl(tryfirst=True)  # before JUnit's XML takes the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the record that a cell's report carries; a cell whose worker died has none and is marked crashed."""
        if any(key == POISONED for key, _ in report.user_properties):
            self._expect_to_leave(getattr(report, "node", None))
        name = _cell_id(report.nodeid)
        if name not in self.expected:
            return
        carried = [value for key, value in report.user_properties if key == PROPERTY]
        if name not in self.records and (carried or report.failed):
            self.records[name] = (
                records.from_dict(json.loads(str(carried[0]))) if carried else self._crashed(name, _why(report))
            )
            self.seconds[name] = round(report.duration, 3)
            self._checkpoint()
        if carried:
            # The whole record was for the way here; a report in JUnit's XML gets the numbers.
            report.user_properties = [pair for pair in report.user_properties if pair[0] != PROPERTY]
            report.user_properties += properties(self.records[name])

    def _expect_to_leave(self, worker: Any) -> None:
        """Tell the scheduler, if there is one, that a worker will end itself, and not by fault of its next cell."""
        session = self.config.pluginmanager.get_plugin("dsession")
        if session is not None and isinstance(session.sched, CaseScheduling):
            session.sched.leaving.add(worker)

    def _checkpoint(self) -> None:
        """Now and then keep what is done: not even a killed process or a full disk shall cost hours of work."""
        if len(self.records) % _CHECKPOINT == 0:
            with contextlib.suppress(store.UnwritableFolderError):  # said when the session ends
                store.write(self._as_run(complete=False), self.path)

    def _crashed(self, name: str, why: str) -> records.Record:
        cell, settings = self.expected[name], self.config.stash[_bench].settings
        outcome = records.TIMED_OUT if why.startswith("Failed: Timeout") else records.CRASHED
        return blank_record(cell, settings, outcome, (f"{place(cell, settings)}: {why}",))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which cells were to run (without workers; with them the controller collects nothing)."""
        self.collected = {_cell_id(item.nodeid) for item in session.items} & set(self.expected)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The same, as a worker tells it."""
        self.collected = {_cell_id(nodeid) for nodeid in ids} & set(self.expected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records; a user's kernel that no plan explains fails the session, and so does a run of skips."""
        if not (self.records or self.collected) or self.config.getoption("collectonly"):
            return
        explanations = explain(list(self.records.values()))
        unexplained = [found for found in explanations if not found.explained and self._external(found.kernel)]
        self.fallen = [f"fell {found.backend}-{found.kernel}: {found.text}" for found in unexplained]
        if all(record.outcome == records.SKIPPED for record in self.records.values()):
            self.fallen.append("fell: no cell ran, and what did not run does not pass")
        complete = set(self.records) >= self.collected and not session.shouldstop
        self.run = replace(
            self._as_run(complete=complete),
            explanations={f"{found.backend}-{found.kernel}": found.text for found in explanations},
        )
        try:
            store.write(self.run, self.path)
        except store.UnwritableFolderError as error:
            self.failure = str(error)
            session.exitstatus = _USAGE
            return
        if self.fallen and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _as_run(self, *, complete: bool) -> records.Run:
        return records.Run(
            platform=platform_of(self.expected.values()) | {"fingerprint": self._fingerprints},
            options=self.options(),
            records=tuple(self.records[name] for name in self.expected if name in self.records),
            unavailable=self.config.stash[_unavailable],
            seconds=self.seconds,
            complete=complete,
            run=self.name,
        )

    def _external(self, kernel: str) -> bool:
        return any(cell.kernel.external for cell in self.expected.values() if cell.kernel.name == kernel)

    def options(self) -> dict[str, Any]:
        """Those of the command line that decide what runs."""
        names = ("backend", "kernels", "cases", "dtype", "seed", "heads", "kernel", "plan", "captured", "fair")
        return {name: self.config.getoption(name) for name in names}

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """The table, then what fell with the commands that rerun it."""
        if self.failure:
            terminalreporter.write_line(self.failure, red=True)
        if self.run is None:
            return
        width = terminalreporter._tw.fullwidth
        terminalreporter.section("tiebreak")
        for text in (tables.tables(self.run.records, width), tables.summary(self.run), tables.fallen(self.run.records)):
            if text:
                terminalreporter.write_line("")
                terminalreporter.write_line(text)
        terminalreporter.write_line("")
        for text in self.fallen:
            terminalreporter.write_line(text, red=True)
        terminalreporter.write_line(f"records: {self.path}")


def platform_of(cells: Iterable[Cell | TrainingCell]) -> dict[str, Any]:
    """This machine, with the devices that cells run on."""
    described = describe().as_dict()
    for backend in backends_of(cells):
        described |= backend.describe()
    return described


def backends_of(cells: Iterable[Cell | TrainingCell]) -> list[Backend]:
    """Every backend that cells run on, once."""
    return list({cell.backend.name: cell.backend for cell in cells}.values())


def properties(record: records.Record) -> list[tuple[str, object]]:
    """What a cell's entry in JUnit's XML carries: its outcome and its numbers."""
    found: dict[str, object] = {"outcome": record.outcome, "verdict": record.verdict, "plan": record.plan}
    if measures := record.measures:
        found |= {"bias_ulps": measures.bias.mean, "bias_half_width_ulps": measures.bias.half_width}
        found |= {"rms_ulps": measures.rms_ulps, "max_ulps": measures.max_ulps, "nonfinite": measures.nonfinite}
        found |= {"delta_bias": measures.delta_bias.mean, "repeatable": measures.repeatable}
    return [(f"tiebreak.{name}", value) for name, value in found.items() if value is not None]


def _why(report: pytest.TestReport) -> str:
    """Why a test failed that gave no record, in one line."""
    crash = getattr(report.longrepr, "reprcrash", None)
    lines = str(crash.message if crash else report.longrepr).strip().splitlines()
    if lines and _WORKER_DIED.match(lines[-1]):
        return "its process died: killed by a signal, out of memory, or ended by the kernel itself"
    return (lines[0] if crash else lines[-1]) if lines else "no report"


def _cell_id(nodeid: str) -> str:
    _, separator, name = nodeid.partition("::test_cell[")
    return name.removesuffix("]") if separator else ""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep a cell's own account of why it fell as the failure's text; a traceback into the suite tells nobody more."""
    report = yield
    account = item.stash.get(ACCOUNT, None)
    if account is not None and report.when == "call" and report.failed:
        report.longrepr = account
    return report
