"""Memory that a process gives back and asks for again with every large tensor, kept."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt (malloc.h)
_KEPT = 2**29  # bytes that a process may hold free at the end of its heap


def keep_memory() -> None:
    """Let glibc hold on to freed memory.

    Every operation on a large tensor makes another one. As glibc comes, each is mapped and unmapped on its own, and the
    kernel clears every page of it: up to half of a cell's time. No threshold is above the largest of them (glibc takes
    32 MiB at most), so none is mapped. Other C libraries have no such switch.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_TRIM_THRESHOLD, _KEPT)
            mallopt(_MMAP_MAX, 0)
