"""SIGTERM, which CI systems and schedulers send to end a job: what is done is kept, as after Ctrl-C."""

import signal
import threading
from types import FrameType


class SigtermHandler:
    """Makes SIGTERM an interruption of the session, unless somebody handles it already."""

    def __init__(self) -> None:
        self._ours = False

    def pytest_sessionstart(self) -> None:
        """Handle the signal from here on."""
        in_main = threading.current_thread() is threading.main_thread()
        self._ours = in_main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._ours:
            signal.signal(signal.SIGTERM, _interrupt)

    def pytest_unconfigure(self) -> None:
        """Leave it as it was."""
        if self._ours:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # one is enough: a second shall not cost the records
    raise KeyboardInterrupt("SIGTERM")
