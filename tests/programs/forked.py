"""Work in a fork of this process: what is imported need not be imported again, and what ends the fork ends no more."""

import multiprocessing
import os
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection


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
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    fork = context.Process(target=_answer, args=(work, writer))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python's, of the threads of NumPy's libraries, which are ready for a fork
        fork.start()
    writer.close()
    # Ctrl-C reaches the fork by itself, SIGTERM through this process: what it does then is for both.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, lambda *_: fork.terminate())
    try:
        fork.join()
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    with reader:  # whose other end a process that the work has left behind may hold
        try:
            code: int | None = reader.recv() if reader.poll() else None
        except EOFError:
            code = None
    return code


def _answer(work: Callable[[], int | None], writer: Connection) -> None:
    try:
        code = work()
        sys.stdout.flush()
        sys.stderr.flush()
        writer.send(code)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)  # whatever threads the work has left
