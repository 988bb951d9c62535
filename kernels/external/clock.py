"""CPU time of the calls of a user's kernel: it is counted while one runs, and what passes a limit ends its process."""

import faulthandler
import importlib
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_IMPORTED_BY_AUTOGRAD = "torch.fx.experimental.symbolic_shapes"  # with its first dO: seconds that are not a kernel's


class Clock:
    """Counts the CPU time of this process while a user's code runs, not while the suite does.

    A signal of the kernel's ends what passes the limit: a user's code may hold Python's lock for ever.
    """

    def __init__(self) -> None:
        self.left: float | None = None  # seconds of CPU time until the limit; None: there is none
        self._running = False

    @contextmanager
    def limited(self, seconds: float, file: TextIO) -> Iterator[None]:
        """Give all calls within so much CPU time together; where it is spent, dump the stacks and end the process.

        Args:
            seconds: of CPU time.
            file: takes the stacks of all threads.
        """
        with suppress(ImportError):
            importlib.import_module(_IMPORTED_BY_AUTOGRAD)
        faulthandler.register(signal.SIGPROF, file=file, chain=True)
        self.left = seconds
        try:
            yield
        finally:
            self.left = None
            faulthandler.unregister(signal.SIGPROF)

    @contextmanager
    def running(self) -> Iterator[None]:
        """A user's code runs within, and perhaps more of it within that."""
        if self.left is None or self._running:
            yield
            return
        self._running = True
        signal.setitimer(signal.ITIMER_PROF, self.left)
        try:
            yield
        finally:
            self.left = max(signal.setitimer(signal.ITIMER_PROF, 0.0)[0], 1e-3)
            self._running = False


CLOCK = Clock()  # of this process
