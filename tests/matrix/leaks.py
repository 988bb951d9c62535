"""What a kernel under test leaves behind in its process, call after call: memory, threads, open files.

A kernel may keep what it likes of its first calls: what it has compiled, tuned or looked up. It leaks if each of
`CALLS` calls of the same input in a row leaves more behind. Memory counts as left behind if a call keeps at least as
many bytes as the O that it returned: less may be a line in a log. A store that takes `CALLS` outputs before it lets the
first one go is taken for a leak; a leak of less than O a call, or of memory that is not malloc's, such as a GPU's, is
not seen.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, TypeVar

CALLS = 8
_PAGE = 4096  # bytes: a call of a few numbers returns less than the process itself may keep meanwhile
_COUNTED = {"threads": "/proc/self/task", "open files": "/proc/self/fd"}  # on Linux, one entry each
_SIZE = ctypes.c_size_t
_Returned = TypeVar("_Returned")


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h)."""

    _fields_ = [
        (name, _SIZE)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


@cache
def _mallinfo() -> Callable[[], _Mallinfo] | None:
    """Return glibc's count of the memory that is in use, of 2.33 and later; other C libraries have none."""
    function: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    counter: Callable[[], _Mallinfo] | None = function
    return counter


def _resources() -> Mapping[str, int]:
    """Return amounts that the process holds of each kind, as far as this system reports them."""
    counts = {name: len(os.listdir(folder)) for name, folder in _COUNTED.items() if os.path.isdir(folder)}
    if (mallinfo := _mallinfo()) is not None:
        info = mallinfo()
        counts["bytes"] = int(info.uordblks) + int(info.hblkhd)  # in use within the heaps, and mapped on their own
    return counts


def left_behind(call: Callable[[], _Returned], returned: int) -> tuple[_Returned, str | None]:
    """Make a call; if it leaves something behind, repeat it to see whether it always does.

    Args:
        call: of the same kernel and input, which have met before; what it returns must hold no tensor.
        returned: bytes of the O that the kernel returns.

    Returns:
        What the first call returned; and what each of `CALLS` calls left behind, in words, None where there is nothing.
    """
    limits = {"bytes": max(returned, _PAGE), **dict.fromkeys(_COUNTED, 1)}
    first, growth = _growth(call)
    leaks = {name: least for name, least in growth.items() if least >= limits[name]}
    if leaks:
        with _young_heap():
            for _ in range(CALLS - 1):
                _, growth = _growth(lambda: (call(), gc.collect()))  # garbage that nobody has collected yet is no leak
                leaks = {key: min(least, growth[key]) for key, least in leaks.items() if growth[key] >= limits[key]}
                if not leaks:
                    break
    text = ", ".join(f"{least:,} {name}" for name, least in leaks.items())
    return first, f"each of {CALLS} calls in a row left at least {text} behind" if leaks else None


@contextmanager
def _young_heap() -> Iterator[None]:
    """Let the collector look at what comes from now on alone: at all of a test process it looks for half a second."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _growth(call: Callable[[], _Returned]) -> tuple[_Returned, Mapping[str, int]]:
    before = _resources()
    result = call()
    after = _resources()
    return result, {name: after[name] - count for name, count in before.items() if name in after}
