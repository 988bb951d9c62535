"""What keeps one kernel under test from taking the run with it: a time limit, and processes that are not used again."""

import faulthandler
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tiebreak.matrix.experiment import Cell, time_limit

_FILE, _DEADLY = "tiebreak_watch", "tiebreak_deadly"  # of a worker's input
_FRAME = re.compile(r'File "([^"]+)", line (\d+) in (.+)')
_TIMEOUT = re.compile(r"Timeout \((\d+):(\d+):([\d.]+)\)")


@dataclass(frozen=True)
class Watch:
    """How one worker watches its cells."""

    file: Path | None  # where it leaves word before it ends itself; None: it is the only process, and never does
    seconds: float | None  # that a cell may take, whatever it is; None: as its experiment says
    deadly: frozenset[str]  # kernels that have ended processes: each of their cells is the last of its process

    @classmethod
    def of(cls, worker_input: Mapping[str, Any], seconds: float | None) -> "Watch":
        """The watch of a worker with this input; of the only process, with none."""
        file = worker_input.get(_FILE)
        return cls(None if file is None else Path(file), seconds, frozenset(worker_input.get(_DEADLY, ())))

    @contextmanager
    def over(self, cell: Cell) -> Iterator[None]:
        """End the process if a cell takes too long. By a thread in C: a kernel may hold Python's lock for ever."""
        limit = time_limit(cell, self.seconds)
        if self.file is None or limit is None:
            yield
            return
        with self.file.open("w") as word:
            faulthandler.dump_traceback_later(limit, exit=True, file=word)
            try:
                yield
            finally:
                faulthandler.cancel_dump_traceback_later()


def watched(file: Path, deadly: Collection[str]) -> dict[str, Any]:
    """A worker's input that its watch is made from."""
    return {_FILE: str(file), _DEADLY: sorted(deadly)}


def timed_out(file: Path) -> str | None:
    """Where a worker was when its time was over, in one line; None if that is not what ended it."""
    try:
        text = file.read_text(errors="replace")
    except OSError:
        return None
    limit = _TIMEOUT.match(text)
    if limit is None:
        return None
    hours, minutes, seconds = map(float, limit.groups())
    frame = _FRAME.search(text.rpartition("Thread 0x")[2])  # the last thread is the one that ran the cell
    at = f"; it was in {frame[3]} ({Path(frame[1]).name}, line {frame[2]})" if frame else ""
    return f"no result after {3600 * hours + 60 * minutes + seconds:g} s{at}"
