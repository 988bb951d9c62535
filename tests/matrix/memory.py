"""Memory that a process gives back and asks for again with every large tensor, kept."""

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt (malloc.h)
_KEPT = 2**29  # bytes that a process may hold free
_MAPPED = 2**25  # bytes of a piece that is mapped on its own: the largest that every glibc takes


def keep_memory() -> None:
    """Let glibc hold on to freed memory.

    Every operation on a large tensor makes another one. As glibc comes, each is mapped and unmapped on its own, and the
    kernel clears every page of it: a tenth of the time of all cells. Other C libraries have no such switch.
    """
    if sys.platform.startswith("linux"):
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(_TRIM_THRESHOLD, _KEPT)
            mallopt(_MMAP_THRESHOLD, _MAPPED)
