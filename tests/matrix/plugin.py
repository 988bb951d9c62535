"""The pytest side of the matrix: options, workers, and the way of the records from the workers to the file."""

import json
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tiebreak.backends.backend import BACKENDS
from tiebreak.backends.platform import describe, worker_count
from tiebreak.matrix.cell import Cell, Settings, Workbench
from tiebreak.matrix.explain import explain
from tiebreak.matrix.selection import Selection, SelectionError, cells
from tiebreak.reports import records, store, tables

_USAGE = 2
_WORKER_GIB = 2.0
PROPERTY = "tiebreak"  # name of the property that carries a cell's record from its worker to the controller

ACCOUNT = pytest.StashKey[str]()  # a cell's own account of why it did not hold
_cells = pytest.StashKey[list[Cell]]()
_unavailable = pytest.StashKey[Mapping[str, str]]()
_bench = pytest.StashKey[Workbench]()
_keeper = pytest.StashKey["Keeper"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the matrix."""
    group = parser.getgroup("tiebreak", "tiebreak: the matrix (lists are comma-separated, globs allowed)")
    group.addoption("--backend", metavar="NAMES", help=f"backends to run: {', '.join(BACKENDS)}")
    group.addoption("--kernels", metavar="NAMES", help="kernels to run, also any rule@plan such as dithered@all_bf16")
    group.addoption("--cases", metavar="NAMES", help="cases to run, such as 'tied_maxima*'")
    group.addoption("--dtype", metavar="NAMES", default="bf16", help="formats of q, k, v and O (default: bf16)")
    group.addoption("--seed", default="0", metavar="N", help="seed of all inputs (default: 0)")
    group.addoption(
        "--heads", default="256", metavar="N", help="heads a cell draws at first; up to 8 times as many (default: 256)"
    )
    group.addoption(
        "--kernel",
        metavar="FILE.py:FUNCTION",
        help="add your own kernel, a function of (q, k, v, *, causal=False, scale=None) in (batch, heads, N, d) that"
        " returns O; package.module:function works too",
    )
    group.addoption("--plan", metavar="NAME", help="hold --kernel to what this rounding plan predicts, case by case")
    group.addoption("--fair", action="store_true", help="hold --kernel to no bias on every failure input")
    group.addoption("--save", metavar="NAME", help="keep the records as OUT/NAME.json")
    group.addoption("--out", default="out", metavar="DIR", help="folder for records (default: out)")


def _refuse(message: str) -> None:
    """End with one line and exit code 2, before any work."""
    pytest.exit(message, returncode=_USAGE)


def _positive(config: pytest.Config, option: str, least: int) -> int:
    text = str(config.getoption(option))
    if not text.isascii() or not text.isdigit() or int(text) < least:
        _refuse(f"--{option} {text}: expected an integer of at least {least}")
    return int(text)


def _settings(config: pytest.Config) -> Settings:
    options = [(name, config.getoption(name)) for name in ("kernel", "plan")]
    given = tuple(word for name, value in options if value is not None for word in (f"--{name}", str(value)))
    seed, heads = _positive(config, "seed", 0), _positive(config, "heads", 1)
    if heads > 1 and heads % 16 and heads > 16:
        _refuse(f"--heads {heads}: expected at most 16 or a multiple of 16")
    return Settings(seed, heads, bool(config.getoption("fair")), given)


def _selection(config: pytest.Config) -> Selection:
    names = ("backend", "kernels", "cases", "dtype", "kernel", "plan")
    return Selection(*(config.getoption(name) for name in names))


def pytest_configure(config: pytest.Config) -> None:
    """Check every option before any work, on the controller and again on the workers."""
    # One thread a worker, however many workers: sums are added in one order and records repeat to the bit.
    torch.set_num_threads(1)
    if config.getoption("fair") and config.getoption("kernel") is None:
        _refuse("--fair holds a user's kernel to no bias: it needs --kernel")
    config.stash[_bench] = Workbench(_settings(config))
    try:
        config.stash[_cells], config.stash[_unavailable] = cells(_selection(config))
    except SelectionError as error:
        _refuse(str(error))
    if not hasattr(config, "workerinput"):
        keeper = Keeper(config)
        config.stash[_keeper] = keeper
        config.pluginmanager.register(keeper, "tiebreak-keeper")


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers for -n auto: by cores and memory."""
    del config
    return worker_count(_WORKER_GIB)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    """Keep the cells of one case on one worker: they share inputs, references and predictions."""
    return CaseScheduling(config, log)


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Groups the matrix by case and format; every other test is a group of its own."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, cell = nodeid.partition("::test_cell[")
        if not cell:
            return nodeid
        # backend-kernel-case-format]: no name has a dash.
        return f"{path}::{'-'.join(cell.split('-')[2:])}"


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test a cell."""
    if "cell" in metafunc.fixturenames:
        chosen = metafunc.config.stash[_cells]
        metafunc.parametrize("cell", chosen, ids=[cell.id for cell in chosen])


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
        self.run: records.Run | None = None
        self.failure: str | None = None

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

    def pytest_sessionstart(self) -> None:
        """Refuse a folder that can't be written to before the work, not after it."""
        if self.config.getoption("collectonly"):
            return
        try:
            store.check_writable(self.path.parent)
        except store.UnwritableFolderError as error:
            _refuse(str(error))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take the record that a cell's report carries; a cell whose worker died has none and is marked crashed."""
        name = _cell_id(report.nodeid)
        if name not in self.expected:
            return
        carried = [value for key, value in report.user_properties if key == PROPERTY]
        if carried and name not in self.records:
            self.records[name] = records.from_dict(json.loads(str(carried[0])))
            self.seconds[name] = round(report.duration, 3)
        elif report.failed and name not in self.records:
            self.records[name] = self._crashed(name, str(report.longrepr))

    def _crashed(self, name: str, why: str) -> records.Record:
        cell, settings = self.expected[name], self.config.stash[_bench].settings
        where = f"kernel {cell.kernel.name}, case {cell.case.name}, seed {settings.seed}"
        last = why.strip().splitlines()[-1] if why.strip() else "no report"
        return records.Record(
            id=name,
            backend=cell.backend.name,
            kernel=cell.kernel.name,
            case=cell.case.name,
            case_version=cell.case.version,
            format=cell.fmt.name,
            seed=settings.seed,
            heads=0,
            outcome=records.CRASHED,
            reasons=(f"{where}: {last}",),
            command=settings.command(cell),
        )

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Remember which cells were to run (without workers; with them the controller collects nothing)."""
        self.collected = {_cell_id(item.nodeid) for item in session.items} & set(self.expected)

    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        """The same, as a worker tells it."""
        self.collected = {_cell_id(nodeid) for nodeid in ids} & set(self.expected)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Write the records; an undeclared kernel that no plan explains fails the session."""
        if not self.records or self.config.getoption("collectonly"):
            return
        explanations = explain(list(self.records.values()))
        unexplained = [found for found in explanations if not found.explained and self._external(found.kernel)]
        self.run = records.Run(
            platform=describe().as_dict(),
            options=self._options(),
            records=tuple(self.records[name] for name in self.expected if name in self.records),
            unavailable=self.config.stash[_unavailable],
            seconds=self.seconds,
            explanations={found.kernel: found.text for found in explanations},
            complete=set(self.records) >= self.collected and not session.shouldstop,
        )
        try:
            store.write(self.run, self.path)
        except store.UnwritableFolderError as error:
            self.failure = str(error)
            session.exitstatus = _USAGE
            return
        if unexplained and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _external(self, kernel: str) -> bool:
        return any(cell.kernel.external for cell in self.expected.values() if cell.kernel.name == kernel)

    def _options(self) -> dict[str, Any]:
        names = ("backend", "kernels", "cases", "dtype", "seed", "heads", "kernel", "plan", "fair")
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
        terminalreporter.write_line(f"records: {self.path}")


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
