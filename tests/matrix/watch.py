"""What keeps one kernel under test from taking the run with it: a time limit, and processes that are not used again."""

import faulthandler
import json
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tiebreak.kernels.external.isolation import CLOCK
from tiebreak.kernels.external.loading import is_users
from tiebreak.matrix.budget import WITHOUT, Budget
from tiebreak.matrix.experiment import Cell, time_limit

_HURRIED, _GIVEN_UP = 2, 5  # time-outs of a kernel: all so far; in a row
_LEFT = 0.1  # of its time limit, for each cell of a hurried kernel
_LATE = "late.json"  # beside the words of the workers
_FILE, _DEADLY = "tiebreak_watch", "tiebreak_deadly"  # of a worker's input
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (.+)')
_STACK = re.compile(r"^(?:Current thread|Thread) 0x.*$", re.MULTILINE)
_TIMEOUT = re.compile(r"Timeout \((\d+):(\d+):([\d.]+)\)")
_WALL = 10  # times the limit of CPU time: what sleeps, or waits for ever, ends then
_CALLS = str(Path("external", "call.py"))  # the module that calls a user's function


@dataclass(frozen=True)
class Watch:
    """How one worker watches its cells."""

    file: Path | None  # where it leaves word before it ends itself; None: it is the only process, and never does
    seconds: float | None  # of CPU time that a cell's kernel may take, whatever it is; None: as its experiment says
    deadly: frozenset[str]  # kernels that have ended processes: each of their cells is the last of its process
    budget: Budget = WITHOUT  # of the whole run

    @classmethod
    def of(cls, worker_input: Mapping[str, Any], seconds: float | None, budget: float | None = None) -> "Watch":
        """The watch of a worker with this input; of the only process, with none."""
        file, deadly = worker_input.get(_FILE), frozenset(worker_input.get(_DEADLY, ()))
        return cls(None if file is None else Path(file), seconds, deadly, Budget.of(worker_input, budget))

    @contextmanager
    def over(self, cell: Cell) -> Iterator[None]:
        """End the process if a cell's kernel takes too much CPU time, or the cell ten times as long by the clock.

        By a signal, and a thread in C: a kernel may hold Python's lock for ever.

        Raises:
            BudgetSpentError: it is not begun, or is ended, since the budget is spent.
        """
        limit = self.limit(cell)
        wall = self.budget.limit(None if limit is None else _WALL * limit)
        if self.file is None or wall is None:
            with self.budget.over():
                yield
            return
        with self.budget.over(), self.file.open("w") as word:
            print(limit, file=word, flush=True)
            faulthandler.dump_traceback_later(wall, exit=True, file=word)
            try:
                with nullcontext() if limit is None else CLOCK.limited(limit, word):
                    yield
            finally:
                faulthandler.cancel_dump_traceback_later()

    def limit(self, cell: Cell) -> float | None:
        """Seconds of CPU time that the kernel of a cell may take now; None: as many as it needs."""
        limit = time_limit(cell, self.seconds)
        if limit is None or self.seconds is not None or self._late(cell).ever < _HURRIED:
            return limit
        return _LEFT * limit

    def given_up(self, cell: Cell) -> str | None:
        """None, or why a cell is not run: too many cells of its kernel have timed out, one after the other."""
        late = self._late(cell)
        return f"not run: {late.in_a_row} of its cells in a row had timed out" if late.in_a_row >= _GIVEN_UP else None

    def _late(self, cell: Cell) -> "Late":
        if self.file is None:
            return Late()
        try:
            late = json.loads(self.file.with_name(_LATE).read_text())
        except OSError:  # none has been yet
            return Late()
        return Late(*late.get(cell.kernel.name, ()))


class Late(NamedTuple):
    """How often cells of a kernel have timed out."""

    ever: int = 0
    in_a_row: int = 0


def tell(folder: Path, late: Mapping[str, Late]) -> None:
    """Let all workers know, before their next cell, how often cells of each kernel have timed out."""
    part = folder / f"{_LATE}.part"
    part.write_text(json.dumps(late))
    part.replace(folder / _LATE)


def watched(file: Path, deadly: Collection[str]) -> dict[str, Any]:
    """A worker's input that its watch is made from."""
    return {_FILE: str(file), _DEADLY: sorted(deadly)}


class TimedOut(NamedTuple):
    """What ended a process whose time was over."""

    why: str  # in one line, with the line of code that it was in: the user's, where any of it was
    own: bool  # whether the user's code was running, and not the suite's


def timed_out(file: Path) -> TimedOut | None:
    """Where a worker was when its time was over; None if that is not what ended it."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    stacks = _STACK.split(text)[1:]
    if not stacks:
        return None
    # Of a signal's dump the current thread; of the clock's the last: it is the one that ran the cell.
    frames: list[tuple[str, str, str]] = _FRAME.findall(stacks[-1])
    clock = _TIMEOUT.search(text)
    named = next((frame for frame in frames if is_users(frame[0])), frames[0] if frames else None)
    at = f"; it was in {named[2]} ({Path(named[0]).name}, line {named[1]})" if named else ""
    if clock is None:
        return TimedOut(f"no result after {float(text.split()[0]):g} s of CPU time{at}", True)
    hours, minutes, seconds = map(float, clock.groups())
    own = any(file.endswith(_CALLS) for file, _, _ in frames)
    return TimedOut(f"no result after {3600 * hours + 60 * minutes + seconds:g} s{at}", own)
