"""The file that a run's records go to: kept on the way, and never over those of another run."""

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run

_EVERY = 10.0  # seconds between two copies on the way, at least
_SHARE = 30.0  # times as long as the last one took: of a large file they are no load


class RecordFile:
    """Where a run's records go."""

    def __init__(self, path: Path, name: str) -> None:
        """Nothing is written yet.

        Args:
            path: the file; of an earlier run, if there is one.
            name: tells the run from every other.
        """
        self.path, self._name = path, name
        self.taken: Path | None = None  # where the records would have gone, had another run not written there
        self._seen = _stamp(path)
        self._written, self._pause = monotonic(), _EVERY

    def now_and_then(self, run: Callable[[], Run]) -> None:
        """Keep what is done, if that was long ago: not even a killed process shall cost hours of work."""
        began = monotonic()
        if began - self._written < self._pause:
            return
        with contextlib.suppress(store.UnwritableFolderError):  # said when the session ends
            self.write(run())
        self._written = monotonic()
        self._pause = max(_EVERY, _SHARE * (self._written - began))

    def write(self, run: Run) -> None:
        """Write the records; beside those of another run that has written to the same file since this one began.

        Raises:
            tiebreak.reports.records.store.UnwritableFolderError: they can't be written; the older file is left.
        """
        if _stamp(self.path) != self._seen:
            self.taken = self.taken or self.path
            self.path = self.path.with_name(f"{self.taken.stem}-{self._name[:8]}.json")
        store.write(run, self.path)
        self._seen = _stamp(self.path)

    @property
    def line(self) -> str:
        """Where the records are, for the last line."""
        taken = f", for another run has written {self.taken} meanwhile; --save names a file of its own"
        return f"records: {self.path}{taken if self.taken else ''}"


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """What is another once a file has been written anew; None: there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size
