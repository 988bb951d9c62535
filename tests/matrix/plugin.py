"""The pytest side of the matrix: options, workers and cells as tests; the records' way is `collector`'s."""

import gc
import os
import re
import signal
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import pytest
import torch
from xdist.scheduler import LoadScopeScheduling

from tiebreak.backends.platform import worker_count
from tiebreak.cases.case import HEADS_PER_BATCH
from tiebreak.matrix import options, scheduling
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.gatekeeper import Gatekeeper
from tiebreak.matrix.memory import keep_memory
from tiebreak.matrix.options import NO_BUDGET, OPTIONS
from tiebreak.matrix.record_collector import POISONED, RecordCollector, backends_of
from tiebreak.matrix.scheduling import CaseScheduling, cell_id
from tiebreak.matrix.selection import Selection, cells, check_usable, matching_backends
from tiebreak.matrix.watch import Budget, Watchdog
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.cli import USAGE
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import expected
from tiebreak.reports.gate.expected import Excuses
from tiebreak.reports.names import split
from tiebreak.reports.records import store

_WORKER_GIB, _WORKER_CPU = 2.0, 25.0  # a worker takes of memory, and is worth of seconds of a default budget
_PRINTED = 10_000  # characters of what a cell prints that are kept, the last
_NO_RUN = ("help", "collectonly", "markers", "showfixtures")  # pytest's options that run no cell
_ENVIRONMENT = "tiebreak_environment"  # of a worker's input: what to add to its environment, for its device

WATCH = pytest.StashKey[Watchdog]()
BENCH = pytest.StashKey[Workbench]()  # what the cells of one worker share
EXCUSES = pytest.StashKey[Excuses]()  # failures that are excused
ACCOUNT = pytest.StashKey[str]()  # a cell's own account of why it did not hold
_poisoned = pytest.StashKey[bool]()  # of the session: whether its device is beyond use for this process
_cells = pytest.StashKey[Mapping[str, Cell]]()
_FROZEN = list[pytest.Session]()  # of this process, whose items no garbage collection looks at; gc counts each anew


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the matrix' options."""
    group = parser.getgroup("tiebreak", "tiebreak: the matrix (lists are comma-separated, globs allowed)")
    for option in OPTIONS.values():
        group.addoption(option.flag, **option.parsing)


def _refuse(message: str) -> NoReturn:
    """End with one line and exit code 2, before any work."""
    pytest.exit(" ".join(message.split()), returncode=USAGE)


def _settings(config: pytest.Config) -> Settings:
    heads, cell_timeout = int(config.getoption("heads")), config.getoption("cell_timeout")
    if heads > HEADS_PER_BATCH and heads % HEADS_PER_BATCH:
        _refuse(f"--heads {heads}: expected at most {HEADS_PER_BATCH} or a multiple of {HEADS_PER_BATCH}")
    return Settings(
        seed=int(config.getoption("seed")),
        heads=heads,
        fair=bool(config.getoption("fair")),
        as_rounded=config.getoption("no_worse_than") == "rounded",
        rules=bool(config.getoption("rules", False)),
        cell_timeout=None if cell_timeout is None else float(cell_timeout),
        matrix=_cells_path(config),
    )


def _budget(config: pytest.Config) -> Budget:
    """Return the budget that is given."""
    if (text := config.getoption("budget") or NO_BUDGET) == NO_BUDGET:
        return Budget()
    if (seconds := scheduling.seconds_of(text)) is None:
        _refuse(f"--budget {text}: expected a time of a second or more, such as 60s, 1.5m or 1h, or {NO_BUDGET}")
    return Budget.of(seconds)


def _cells_path(config: pytest.Config) -> tuple[str, ...]:
    """Return the path by which pytest finds the cells: in a clone, whose pyproject.toml loads this plug-in, or a name.

    The path of a clone elsewhere would put this machine's folders into every record, and so into a user's baseline.
    """
    here, stands = Path(__file__).resolve().parent, config.invocation_params.dir.resolve()
    clone = here.parents[1]
    if not (clone / "pyproject.toml").is_file() or not stands.is_relative_to(clone):
        return ("-p", __name__, "--pyargs", __name__.rpartition(".")[0])
    return (Path(os.path.relpath(here, stands)).as_posix(),)


def selection_of(option: Callable[[str], Any]) -> Selection:
    """Return the cells that options ask for, by what gives their values."""
    return Selection(
        backends=option("backend"),
        formats=option("dtype"),
        kernel=tuple(option("kernel") or ()),
        declare=tuple(option("declare") or ()),
        card=option("as"),
        emulated_backward=option("backward") == "emulated",
        **{name: option(name) for name in ("kernels", "cases", "plan", "captured", "experiments", "features")},
    )


def pytest_configure(config: pytest.Config) -> None:
    """Check every option before any work, on the controller and again on the workers."""
    # One thread a worker, however many workers: sums are added in one order and records repeat to the bit.
    torch.set_num_threads(1)
    keep_memory()
    os.environ.pop("PYTEST_VERSION", None)  # Triton's tutorial has one configuration where it is set
    on_controller, worker_input = not hasattr(config, "workerinput"), getattr(config, "workerinput", {})
    os.environ.update(worker_input.get(_ENVIRONMENT, {}))
    try:
        options.refuse_twice(config.invocation_params.args if on_controller else ())
        options.refuse_wrong(config.getoption)
        settings, budget = _settings(config), _budget(config)
        chosen, unavailable = cells(selection_of(config.getoption))
        if options.is_default(config.getoption):
            processes = worker_input.get("workercount", max(1, len(config.getoption("tx", ()))))
            budget = Budget.by_default(chosen, processes)
        config.stash[WATCH] = watch = Watchdog.of(worker_input, settings.cell_timeout, budget)
        config.stash[BENCH] = Workbench(settings, None if watch.file is None else watch.file.parent)
        if on_controller:
            check_usable(chosen)
        for backend in backends_of(chosen):
            backend.set_up()
        config.stash[_cells] = named = {cell.id: cell for cell in chosen}
        entries = expected.read(config.getoption("expected"), Path.cwd(), checks())
        if on_controller and options.is_whole(config.getoption):
            expected.check_used(entries, named, unavailable)
        # Failures that are in the baseline of a gated run are excused: the gate says whether they got worse.
        kept = None if (name := config.getoption("baseline")) is None else Path(str(name))
        before = expected.of_baseline(store.read(kept), kept) if kept is not None and kept.exists() else {}
        config.stash[EXCUSES] = Excuses(entries, before)
        if on_controller:
            _keep(config, chosen, unavailable)
    except UsageError as error:
        _refuse(str(error))


def _keep(config: pytest.Config, chosen: Sequence[Cell], unavailable: Mapping[str, str]) -> None:
    """Set up what keeps the records and what judges them as a whole."""
    named, allowed = (split(config.getoption(option) or "") for option in ("backend", "allow_missing"))
    for name in set(allowed) - set(named):
        _refuse(f"--allow-missing {name}: --backend does not name it")
    missing = [name for name in unavailable if name in named and name not in allowed]
    settings, excuses = config.stash[BENCH].settings, config.stash[EXCUSES]
    collector = RecordCollector(config, chosen, settings, unavailable, excuses, missing)
    path = collector.file.path
    if not any(config.getoption(option) for option in _NO_RUN):  # what can't be written to is refused before the work
        try:
            store.check_writable(path.parent)
        except store.UnwritableFolderError as error:
            _refuse(f"--out: {error}; name another folder")
        if path.is_dir():
            _refuse(f"--save {config.getoption('save')}: {path} is a folder; take another name")
    config.pluginmanager.register(collector, "tiebreak-collector")
    config.pluginmanager.register(Gatekeeper(config, collector), "tiebreak-gatekeeper")
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:  # else somebody handles it
        signal.signal(signal.SIGTERM, _interrupt)
        config.add_cleanup(_let_sigterm_end)
    if getattr(config.option, "maxworkerrestart", "") is None:
        # A kernel may kill the worker of each of its cells twice, and every other cell still has its turn.
        config.option.maxworkerrestart = 2 * len(chosen) + 1


def _let_sigterm_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    """Treat SIGTERM, which CI systems and schedulers send to end a job, as an interruption."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: a second shall not cost the records
    raise KeyboardInterrupt("SIGTERM")


@pytest.hookimpl(optionalhook=True, tryfirst=True)  # before xdist's own, whenever it was loaded
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int | None:
    """Return the workers for -n auto: by cores, memory and devices, unless xdist's own variable says how many."""
    if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ:
        return None
    try:
        chosen = matching_backends(selection_of(config.getoption))
    except UsageError:  # which pytest_configure tells
        return None
    limits = [backend.worker_limit() for backend in chosen if backend.unavailable() is None]
    if options.is_default(config.getoption):  # the start of a worker costs of the time that cells have
        limits += [int(backend.budget // _WORKER_CPU) for backend in chosen if backend.budget]
    return min([worker_count(_WORKER_GIB), *(limit for limit in limits if limit is not None)])


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Spread the workers over the devices, before a worker has used any."""
    number = re.search("[0-9]+$", node.gateway.id)
    environment: dict[str, str] = {}
    for backend in backends_of(node.config.stash[_cells].values()):
        environment |= backend.worker_environment(int(number[0]) if number else 0)
    node.workerinput[_ENVIRONMENT] = environment
    collector = node.config.pluginmanager.get_plugin("tiebreak-collector")
    node.workerinput |= node.config.stash[WATCH].worker_input(collector.words / node.gateway.id)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling | None:
    """Keep the cells of one case on one worker, unless --dist asks for another way than the default."""
    if config.getoption("dist") != "load":
        return None
    by_rank = scheduling.rank if config.stash[WATCH].budget != Budget() else None
    collector = config.pluginmanager.get_plugin("tiebreak-collector")
    assert isinstance(collector, RecordCollector)
    return CaseScheduling(config, log, config.stash[_cells], by_rank, collector.another_try)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one test a cell."""
    if "cell" in metafunc.fixturenames:
        chosen = metafunc.config.stash[_cells]
        metafunc.parametrize("cell", list(chosen.values()), ids=list(chosen))


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the cells that tell most first, if there is a budget."""
    if config.stash[WATCH].budget != Budget():
        named = config.stash[_cells]
        ranks = {item: scheduling.rank(cell) for item in items if (cell := named.get(cell_id(item.nodeid))) is not None}
        items.sort(key=lambda item: ranks.get(item, (-1, 0.0)))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Exempt thousands of items, which last as long as the session, from every later garbage collection."""
    if not _FROZEN:  # else it is a run inside of a test, whose session has done so
        _FROZEN.append(session)
        gc.freeze()
        session.config.add_cleanup(_thaw)


def _thaw() -> None:
    _FROZEN.clear()
    gc.unfreeze()


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Keep a cell's own reason for a failure as the failure's text; a traceback into the suite adds nothing."""
    report = yield
    report.sections = [
        (name, text if len(text) <= _PRINTED else f"...{text[-_PRINTED:]}") for name, text in report.sections
    ]
    account = item.stash.get(ACCOUNT, None)
    if account is not None and report.when == "call" and report.failed:
        report.longrepr = account
    return report
