"""Limits on the time of a cell and of the whole run; after one is reached a process is not used again.

No kernel under test takes the run with it: workers watch themselves, and leave word of where they were.
"""

import faulthandler
import json
import math
import re
import signal
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, NoReturn

from tiebreak.kernels.external.isolation import CLOCK
from tiebreak.kernels.external.loading import is_users
from tiebreak.matrix.experiment import Cell, time_limit
from tiebreak.matrix.scheduling import Pace, beyond, expected

_GIVEN_UP = 5  # time-outs of a kernel in a row, after which its other cells are not run
_LATE = "late.json"  # next to the words of the workers
_FILE, _DEADLINE = "tiebreak_watch", "tiebreak_deadline"  # of a worker's input
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (.+)')
_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_TIMEOUT = re.compile(r"Timeout \((\d+):(\d+):([\d.]+)\)")
_WALL = 10  # times the limit of CPU time: what sleeps, or waits for ever, ends then
_CALLS = str(Path("external", "call.py"))  # the module that calls a user's function
_SHARE = 0.9  # of a budget, for cells; the rest is for the start, and for what the records come to
# The limits that end a cell: by the clock, and by the CPU time of its process.
_ALARMS = (signal.ITIMER_REAL, signal.SIGALRM), (signal.ITIMER_VIRTUAL, signal.SIGVTALRM)
_STUCK = 5.0  # seconds after which a cell that does not end with the budget hangs

now = time.monotonic  # one clock for all processes of a machine
cpu = time.process_time


class BudgetSpentError(BaseException):
    """The end of a cell in the middle of its work; no `except Exception` of a kernel catches it."""


def _end_the_cell(signum: int, frame: FrameType | None) -> NoReturn:
    raise BudgetSpentError


@dataclass(frozen=True)
class Budget:
    """The time limit of a run."""

    deadline: float = math.inf  # on the clock
    cpu: float = math.inf  # on that of this process's CPU time
    left_out: frozenset[str] = frozenset()  # ids of cells that are left out whatever time there is

    @classmethod
    def of(cls, seconds: float) -> "Budget":
        """Return a budget of `seconds` for the whole run, which begins."""
        return cls(now() + _SHARE * seconds)

    @classmethod
    def by_default(cls, chosen: Collection[Cell], processes: int) -> "Budget":
        """Return the budget of checks that take as many seconds of CPU time as their backends say."""
        pairs = {(cell.backend.name, cell.kernel.name): cell.backend.budget or math.inf for cell in chosen}
        return cls(cpu=cpu() + _SHARE * sum(pairs.values()) / processes, left_out=beyond(chosen))

    @property
    def left(self) -> tuple[float, float]:
        """The seconds that are left, by the clock and of CPU time."""
        return self.deadline - now(), self.cpu - cpu()


@dataclass
class Progress:
    """The progress of a run, and the time to its end: by the table, at the pace that cells have shown."""

    cells: Collection[Cell]
    budget: Budget
    processes: int
    pace: Pace = field(default_factory=Pace)
    begun: dict[str, float] = field(default_factory=dict)  # when

    def __post_init__(self) -> None:
        self.left = {cell.id: expected(cell) for cell in self.cells if cell.id not in self.budget.left_out}
        self.all = len(self.left)

    def end(self, name: str, seconds: float | None) -> None:
        """Count a cell, and the seconds that it took; None: it did not run."""
        expected = self.left.pop(name)
        if seconds is not None:
            self.pace.add(expected, seconds)

    @property
    def seconds(self) -> float:
        """About how many seconds the rest takes."""
        moment = now()
        took = {name: moment - begun for name, begun in self.begun.items()}
        left = [max(self.pace.expected(expected) - took.get(name, 0.0), 0.0) for name, expected in self.left.items()]
        return min(max(sum(left) / self.processes, max(left, default=0.0)), self.budget.deadline - moment)

    def __str__(self) -> str:
        return f"{self.all - len(self.left)} of {self.all} cells, about {max(self.seconds, 0.0):.0f} s to go"


@dataclass(frozen=True)
class Watchdog:
    """A limit on a cell's time that ends the process."""

    file: Path | None  # where it leaves word before it ends itself; None: it is the only process, and never does
    seconds: float | None  # of CPU time that a cell's kernel may take, whatever it is; None: as its experiment says
    budget: Budget = Budget()
    pace: Pace = field(default_factory=Pace)  # of this process

    @classmethod
    def of(cls, worker_input: Mapping[str, Any], seconds: float | None, budget: Budget = Budget()) -> "Watchdog":
        """Return the watchdog of a worker with this input, or of the only process, with none."""
        file, deadline = worker_input.get(_FILE), worker_input.get(_DEADLINE, budget.deadline)
        return cls(None if file is None else Path(file), seconds, replace(budget, deadline=deadline))

    def worker_input(self, file: Path) -> dict[str, Any]:
        """Return a worker's input, from which its watchdog is made."""
        return {_FILE: str(file), _DEADLINE: self.budget.deadline}

    @contextmanager
    def over(self, cell: Cell) -> Iterator[None]:
        """End the process if a cell's kernel takes too much CPU time, or the cell ten times as long by the clock.

        A signal, or a thread in C, ends it: a kernel may hold Python's lock for ever. BudgetSpentError: it is not
        begun, or is ended, since the budget is spent, or leaves it out.
        """
        left = self.budget.left
        if cell.id in self.budget.left_out or (min(left) < math.inf and self.pace.expected(expected(cell)) > min(left)):
            raise BudgetSpentError
        limit = time_limit(cell, self.seconds)
        wall = min(math.inf if limit is None else _WALL * limit, left[0] + _STUCK)
        with ExitStack() as ends:
            for (timer, word), seconds in zip(_ALARMS, left, strict=True):
                if seconds < math.inf and threading.current_thread() is threading.main_thread():
                    ends.callback(signal.signal, word, signal.signal(word, _end_the_cell))
                    ends.callback(signal.setitimer, timer, 0)
                    signal.setitimer(timer, seconds)
            if self.file is not None and wall < math.inf:
                file = ends.enter_context(self.file.open("w"))
                print(limit, file=file, flush=True)
                faulthandler.dump_traceback_later(wall, exit=True, file=file)
                ends.callback(faulthandler.cancel_dump_traceback_later)
                if limit is not None:
                    ends.enter_context(CLOCK.limited(limit, file))
            yield

    def given_up(self, cell: Cell) -> str | None:
        """Return None, or why a cell is not run: too many cells of its kernel have timed out, one after the other."""
        try:
            late = json.loads(self.file.with_name(_LATE).read_text()) if self.file is not None else {}
        except OSError:  # none has been yet
            return None
        whys = late.get(cell.kernel.name, ())
        if len(whys) < _GIVEN_UP:
            return None
        return f"not run: {len(whys)} of its cells in a row had timed out: {whys[-1]}"


def tell_late(folder: Path, late: Mapping[str, Sequence[str]]) -> None:
    """Let all workers know, before their next cell, why the last cells of each kernel have timed out in a row."""
    part = folder / f"{_LATE}.part"
    part.write_text(json.dumps(late))
    part.replace(folder / _LATE)


class TimedOut(NamedTuple):
    """The cause of a process' end whose time was over."""

    why: str  # in one line, with the line of code that it was in: the user's, where any of it was
    own: bool  # whether the user's code was running, and not the suite's


def timed_out(file: Path) -> TimedOut | None:
    """Return where a worker was when its time was over; None if that did not end it."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    stacks = _STACK.split(text)[1:]
    if not stacks:
        return None
    # The thread that ran the cell: the current one in a signal's dump, the last one in the clock's.
    frames: list[tuple[str, str, str]] = _FRAME.findall(stacks[-1])
    clock = _TIMEOUT.search(text)
    named = next((frame for frame in frames if is_users(frame[0])), frames[0] if frames else None)
    at = f"; it was in {named[2]} ({Path(named[0]).name}, line {named[1]})" if named else ""
    if clock is None:
        return TimedOut(f"no result after {float(text.split()[0]):g} s of CPU time{at}", True)
    hours, minutes, seconds = map(float, clock.groups())
    in_users_code = any(file.endswith(_CALLS) for file, _, _ in frames)
    return TimedOut(f"no result after {3600 * hours + 60 * minutes + seconds:g} s{at}", in_users_code)
