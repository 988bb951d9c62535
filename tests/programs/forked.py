"""Work in a fork of this process: what is imported need not be imported again, and what ends the fork ends no more."""

import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn


def possible() -> bool:
    """Whether a fork is safe here: other threads would be gone in it, and macOS' own libraries take none."""
    return sys.platform == "linux" and threading.active_count() == 1


def in_a_fork(work: Callable[[], int | None]) -> int | None:
    """Do some work in a fork.

    Args:
        work: gives an exit code, or None if it was given up.

    Returns:
        What it gave; None too if it ended its process.
    """
    read, write = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of the threads of NumPy's libraries, which are ready for a fork
        child = os.fork()
    if child == 0:
        _work(work, write)
    os.close(write)
    with _signals_left_to(child):
        os.waitpid(child, 0)
    os.set_blocking(read, False)  # a process that the work has left behind may hold the other end
    try:
        answer = os.read(read, 16)
    except BlockingIOError:
        answer = b""
    finally:
        os.close(read)
    return int(answer) if answer else None


def _work(work: Callable[[], int | None], write: int) -> NoReturn:
    try:
        code = work()
        sys.stdout.flush()
        sys.stderr.flush()
        if code is not None:
            os.write(write, str(code).encode())
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


@contextmanager
def _signals_left_to(child: int) -> Iterator[None]:
    """Ctrl-C reaches the child by itself, SIGTERM through this process: what it does then is for both."""
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM)),
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
