"""Memory that a process gives back and asks for again with every large tensor, kept."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # of glibc's mallopt (malloc.h)
_KEPT = 2**29  # bytes that a process may hold free at the end of its heap


def keep_memory() -> None:
    """Let glibc hold on to freed memory.

    Every operation on a large tensor allocates another one. By default glibc maps and unmaps each separately, and the
    kernel clears every page: up to half of a cell's time. No threshold can be above the largest of them (glibc takes at
    most 32 MiB), so mapping is switched off. Other C libraries have no such switch.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_TRIM_THRESHOLD, _KEPT)
            mallopt(_MMAP_MAX, 0)
