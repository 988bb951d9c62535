"""The contract of a call: the same bits each time, and nothing left behind, over shapes that take different paths.

A kernel may keep what it likes of its first calls: what it has compiled, tuned or looked up. It leaks if each of
`CALLS` calls of the same input in a row leaves more memory, threads or open files behind. Memory counts as left behind
if a call keeps at least as many bytes as the O that it returned: less may be a line in a log. A store that takes
`CALLS` outputs before it lets the first one go is taken for a leak; a leak of less than O a call, or of memory that is
not malloc's, such as a GPU's, is not seen. That O has its shape and format, and inputs and process stay as they were,
is looked at in every call of a user's kernel.
"""

import ctypes
import gc
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, NamedTuple, TypeVar

from tiebreak.cases.case import HEADS_PER_BATCH, OWN, Case, Shape, normal_numbers
from tiebreak.cases.errors import by_key_head
from tiebreak.cases.verdicts import GAIN, interval
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import GRADIENT_NAMES, TORCH_DTYPES, AttentionInputs, AttentionOutput
from tiebreak.matrix.checks import CONTRACT, REPEATABLE, contract_broken
from tiebreak.matrix.experiment import Cell, Experiment, Kind, Pair, SelectionContext
from tiebreak.matrix.experiments.call import digest
from tiebreak.matrix.result import Result
from tiebreak.matrix.trial import refusal
from tiebreak.matrix.workbench import Workbench, equal_bits
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Answer

CALLS = 8
_PAGE = 4096  # bytes: a call of a few numbers returns less than the process itself may keep meanwhile
_COUNTED = {"threads": "/proc/self/task", "open files": "/proc/self/fd"}  # on Linux, one entry each
_MALLINFO = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
_O, _GRADIENTS = "output_repeated", "gradients_repeated"
_Returned = TypeVar("_Returned")


def _case(name: str, about: str, queries: int, keys: int) -> Case:
    shape = Shape(queries=queries, keys=keys)
    return Case(f"contract_{name}", f"three runs alike, and nothing left behind: {about}", OWN,
                partial(normal_numbers, shape=shape), gradients=True)  # fmt: skip


#: Where kernels are known to take another path: one tile, a loop over tiles, and keys that are split over programs.
CASES = (
    _case("tile", "64 rows and 64 keys", 64, 64),
    _case("tiles", "64 rows and 256 keys", 64, 256),
    _case("decode", "one row and 512 keys", 1, 512),
)


@lru_cache(len(CASES))
def _made(case: Case, seed: int, heads: int, fmt: Format) -> AttentionInputs:
    """Return the input of a case, for all kernels that are given it."""
    return case.make(seed, 0, heads, fmt)


@dataclass(frozen=True)
class Contract(Experiment):
    """An experiment of three runs on one input."""

    kind: ClassVar[str] = "contract"
    case: Case

    @property
    def tags(self) -> frozenset[str]:
        return frozenset({"call"})

    def described(self) -> records.CaseRecord:
        return records.CaseRecord(self.case.about, self.case.source, group="the contract of a call")

    def input_kind(self, fmt: Format) -> str:
        return "calls"

    def pairs(self, context: SelectionContext) -> Sequence[Pair]:
        """Return all pairs except those for which a second run is certain to be the same, as unit tests show."""
        return [(backend, kernel) for backend, kernel in super().pairs(context) if not backend.repeats(kernel)]

    def _inputs(self, cell: Cell, bench: Workbench) -> AttentionInputs:
        return _made(self.case, bench.settings.seed, min(HEADS_PER_BATCH, bench.settings.heads), cell.fmt)

    def refusal(self, cell: Cell, bench: Workbench) -> str | None:
        return refusal(cell.backend, cell.kernel, self._inputs(cell, bench))

    def run(self, cell: Cell, bench: Workbench) -> Result:
        inputs, external = self._inputs(cell, bench), cell.kernel.external
        first = cell.backend.run(cell.kernel, inputs, gradients=cell.kernel.has_backward)

        def again() -> _Repeated:
            second = cell.backend.run(cell.kernel, inputs, gradients=first.gradients is not None)
            return _repeated(first, second, inputs.groups)

        returned = first.o.numel() * TORCH_DTYPES[inputs.formats.output].itemsize
        second, leaks = left_behind(again, returned) if external and cell.backend.resident else (again(), None)
        third = again()
        shares = {name: min(share, third.shares[name]) for name, share in second.shares.items()}
        drifts = {**third.drifts, **second.drifts}
        why = "" if shares[_O] == 1.0 else "runs on the same input differ in bits"
        why = why or ", ".join(f"{name} of another run is {drift:+.2%} larger" for name, drift in drifts.items())
        requirement = "bitwise equal O each time, and gradients as large"
        answers = {REPEATABLE: Answer(not why, requirement, f"not repeatable: {why}" if why else "")}
        if leaks:
            answers[CONTRACT] = contract_broken(f"leaks: {leaks}")
        return Result(
            measures=dict(shares),
            shown=records.Shown.of(_O, shares[_O], spec=".4f"),
            answers=answers,
            external=external,
            digest=hashlib.sha256("".join((digest(first), second.digest, third.digest)).encode()).hexdigest()[:16],
            heads=first.o.shape[0] * first.o.shape[1],
        )


class _Repeated(NamedTuple):
    """A comparison of two runs."""

    shares: dict[str, float]  # of elements that both gave to the bit, of O and of all gradients that there are
    digest: str  # of O of the second
    drifts: dict[str, float]  # by how much a gradient is larger on the whole, where that is more than `GAIN`


def _repeated(first: AttentionOutput, second: AttentionOutput, groups: int) -> _Repeated:
    shares, drifts = {_O: equal_bits(second.o.float(), first.o.float())}, dict[str, float]()
    if first.gradients is None or second.gradients is None:
        return _Repeated(shares, digest(second), drifts)
    bits = size = 0.0
    for name, sharing in zip(GRADIENT_NAMES, (groups, 1, 1), strict=True):  # K and V have key heads alone
        ours, theirs = (getattr(each.gradients, name).float() for each in (first, second))
        bits, size = bits + equal_bits(ours, theirs) * ours.numel(), size + ours.numel()
        drift = interval(by_key_head((theirs - ours) * ours, sharing) / by_key_head(ours.square(), sharing))
        if drift.is_beyond(GAIN):
            drifts[f"d{name[1].upper()}"] = drift.mean
    return _Repeated({**shares, _GRADIENTS: bits / size}, digest(second), drifts)


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2` (malloc.h)."""

    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO.split()]


@cache
def mallinfo() -> Callable[[], Any] | None:
    """Return glibc's count of the memory in use, from 2.33 on; other C libraries have none."""
    function: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if function is not None:
        function.restype = _Mallinfo
    counter: Callable[[], Any] | None = function
    return counter


def _resources() -> Mapping[str, int]:
    """Return the amounts of each kind that the process holds, as far as this system reports them."""
    counts = {name: len(os.listdir(folder)) for name, folder in _COUNTED.items() if os.path.isdir(folder)}
    if (count := mallinfo()) is not None:
        info = count()
        counts["bytes"] = int(info.uordblks) + int(info.hblkhd)  # in use within the heaps, and mapped on their own
    return counts


def left_behind(call: Callable[[], _Returned], returned: int) -> tuple[_Returned, str | None]:
    """Call a kernel that returns `returned` bytes; if it leaves something behind, see whether it always does.

    Return what the first call returned, which must hold no tensor, and what each of `CALLS` left behind, or None.
    """
    limits = {"bytes": max(returned, _PAGE), **dict.fromkeys(_COUNTED, 1)}
    first, growth = _growth(call)
    leaks = {name: least for name, least in growth.items() if least >= limits[name]}
    if leaks:
        gc.collect()
        if thawed := not gc.get_freeze_count():
            gc.freeze()  # at all that a process has the collector would look for half a second
        try:
            for _ in range(CALLS - 1):
                _, growth = _growth(lambda: (call(), gc.collect()))  # garbage that nobody has collected yet is no leak
                leaks = {key: min(least, growth[key]) for key, least in leaks.items() if growth[key] >= limits[key]}
                if not leaks:
                    break
        finally:
            if thawed:
                gc.unfreeze()
    text = ", ".join(f"{least:,} {name}" for name, least in leaks.items())
    return first, f"each of {CALLS} calls in a row left at least {text} behind" if leaks else None


def _growth(call: Callable[[], _Returned]) -> tuple[_Returned, Mapping[str, int]]:
    before = _resources()
    result = call()
    after = _resources()
    return result, {name: after[name] - count for name, count in before.items() if name in after}


KIND = Kind(
    Contract.kind,
    records.ExperimentRecord("three runs of one call", "share of elements of O that all runs give to the bit."),
    experiments=tuple(map(Contract, CASES)),
    measured={
        _O: records.MeasureRecord("share of elements of O that another run gives to the bit", worse=records.LESS),
        # No check and no limit: most kernels add up dQ by atomics.
        _GRADIENTS: records.MeasureRecord(
            "share of elements of dQ, dK, dV that another run gives to the bit: chance where atomics add them up",
            worse=records.LESS,
        ),
    },
)
