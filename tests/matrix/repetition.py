"""What a second run on the same input gives: the same bits or others; and what a user's kernel leaves behind each time.

A kernel may keep what it likes of its first calls: what it has compiled, tuned or looked up. It leaks if each of
`CALLS` calls of the same input in a row leaves more memory, threads or open files behind. Memory counts as left behind
if a call keeps at least as many bytes as the O that it returned: less may be a line in a log. A store that takes
`CALLS` outputs before it lets the first one go is taken for a leak; a leak of less than O a call, or of memory that is
not malloc's, such as a GPU's, is not seen.
"""

import ctypes
import gc
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs, AttentionOutput, Gradients
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.experiment import Cell

CALLS = 8
_NAMES = ("dq", "dk", "dv")
_PAGE = 4096  # bytes: a call of a few numbers returns less than the process itself may keep meanwhile
_COUNTED = {"threads": "/proc/self/task", "open files": "/proc/self/fd"}  # on Linux, one entry each
_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_Returned = TypeVar("_Returned")


@dataclass(frozen=True)
class Repetition:
    same: bool | None = None  # whether O has the same bits; None: there was no second run
    equal_gradients: float | None = None  # share of elements of dQ, dK and dV that have
    other_gradients: Gradients | None = None  # of a user's kernel, where O has the same bits and they have not
    leaks: str | None = None  # what every call of a user's kernel leaves behind, in words


def repetition(cell: Cell, first: AttentionOutput, inputs: AttentionInputs) -> Repetition:
    """Run a cell's kernel once more, on the inputs of which it has made `first`."""
    if cell.backend.repeats(cell.kernel):
        return Repetition()  # unit tests show it once for all
    if cell.kernel.o_first:
        first = replace(first, gradients=None)
    ours = _tensors(first)
    kept = first.gradients and replace(first.gradients, **{name: torch.empty_like(x) for name, x in ours.items()})

    def again() -> Repetition:
        output = cell.backend.run(cell.kernel, inputs, gradients=kept is not None)
        same = equal_bits(output.o.float(), first.o.float()) == 1.0
        if kept is None or output.gradients is None:
            return Repetition(same)
        equal = 0.0
        for name, x in _tensors(output).items():
            getattr(kept, name).copy_(x)
            share = 1.0 if torch.equal(x, ours[name]) else equal_bits(x.float(), ours[name].float())
            equal += share * x.numel()
        return Repetition(same, equal / sum(x.numel() for x in ours.values()))

    if not cell.kernel.external:
        return again()
    repeated, leaks = left_behind(again, first.o.numel() * TORCH_DTYPES[inputs.formats.output].itemsize)
    # Not what `again` returns: a tensor of a call that outlives it would count as left behind.
    differ = repeated.same and repeated.equal_gradients not in (None, 1.0)
    return replace(repeated, leaks=leaks, other_gradients=kept if differ else None)


def _tensors(output: AttentionOutput) -> dict[str, Tensor]:
    return {} if output.gradients is None else {name: getattr(output.gradients, name) for name in _NAMES}


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


@cache
def mallinfo() -> Callable[[], Any] | None:
    """glibc's count of the memory that is in use, of 2.33 and later; other C libraries have none."""
    function: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    counter: Callable[[], Any] | None = function
    return counter


def _resources() -> Mapping[str, int]:
    """Amounts that the process holds of each kind, as far as this system reports them."""
    counts = {name: len(os.listdir(folder)) for name, folder in _COUNTED.items() if os.path.isdir(folder)}
    if (count := mallinfo()) is not None:
        info = count()
        counts["bytes"] = int(info.uordblks) + int(info.hblkhd)  # in use within the heaps, and mapped on their own
    return counts


def left_behind(call: Callable[[], _Returned], returned: int) -> tuple[_Returned, str | None]:
    """Make a call of a kernel that returns so many bytes; if it leaves something behind, see whether it always does.

    What the first call returned, which must hold no tensor; and what each of `CALLS` left behind, in words, or None.
    """
    limits = {"bytes": max(returned, _PAGE), **dict.fromkeys(_COUNTED, 1)}
    first, growth = _growth(call)
    leaks = {name: least for name, least in growth.items() if least >= limits[name]}
    if leaks:
        gc.collect()
        gc.freeze()  # at all that a test process has the collector would look for half a second
        try:
            for _ in range(CALLS - 1):
                _, growth = _growth(lambda: (call(), gc.collect()))  # garbage that nobody has collected yet is no leak
                leaks = {key: min(least, growth[key]) for key, least in leaks.items() if growth[key] >= limits[key]}
                if not leaks:
                    break
        finally:
            gc.unfreeze()
    text = ", ".join(f"{least:,} {name}" for name, least in leaks.items())
    return first, f"each of {CALLS} calls in a row left at least {text} behind" if leaks else None


def _growth(call: Callable[[], _Returned]) -> tuple[_Returned, Mapping[str, int]]:
    before = _resources()
    result = call()
    after = _resources()
    return result, {name: after[name] - count for name, count in before.items() if name in after}
