"""The threads of some blocks: their registers, and the memory that they see."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from tiebreak.backends.interpreter.memory import KernelMemory
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP, WARPGROUP, Global, Shared, SharedMemoryError
from tiebreak.backends.ptx.parsing import Instruction
from tiebreak.backends.ptx.tensor_memory import TensorMemory
from tiebreak.kernels.kernel import CannotRunError

_NOTHING = np.zeros((1, 1), np.uint64)


@dataclass(frozen=True)
class TensorMap:
    """A tensor whose boxes are copied to and from shared memory, the axis along which it is dense first."""

    start: int  # address
    lengths: tuple[int, ...]
    strides: tuple[int, ...]  # bytes, the first that of an element
    box: tuple[int, ...]  # its lengths
    swizzle: int = 0  # its mode: rows of 16, 32, 64 or 128 bytes
    nan: bool = False  # whether a box has NaN instead of zeros beyond the tensor


@dataclass(frozen=True)
class Launch:
    """A grid of blocks, and their arguments and memory."""

    grid: tuple[int, int, int]  # blocks along x, y and z
    threads: int  # of a block
    shared: int  # bytes of a block
    arguments: Sequence[int | bytes]  # the bits of every parameter; of a tensor map its number, in the first bytes
    memory: KernelMemory  # what they may touch
    maps: Sequence["TensorMap"] = ()


class Threads:
    """The registers of threads: arrays (blocks, threads), unsigned or bool, of length 1 where they don't vary."""

    def __init__(self, launch: Launch, blocks: Array, granule: int) -> None:
        """Start some blocks of a launch, (blocks, 1) numbers, those along x first; `granule` is that of `Shared`."""
        self.shape = len(blocks), launch.threads
        self.everyone = np.ones(self.shape, bool)
        self.shared = Shared(*self.shape, launch.shared, granule)
        self.memory, self.maps = Global(launch.memory), launch.maps
        self.parameters: Mapping[str, bytes] = {}
        self._warpgroup = np.minimum(np.arange(launch.threads) // WARPGROUP, self.shared.groups.shape[1] - 3)
        self._fenced = np.zeros(self.shape, bool)  # whether a wgmma.fence was executed
        self._unfenced: dict[str, Array] = {}  # registers that were written since, by which threads
        # By register the group of each warpgroup's products that brings it or reads it; 0: none.
        self._brought: dict[str, Array] = {}
        self._taken: dict[str, Array] = {}
        self.barriers: dict[int, Any] = {}  # mbarriers, by their address
        self.named: dict[int, Any] = {}  # barriers of so many threads, by their number
        self.acquired: dict[int, Array] = {}  # by line the addresses and numbers that a load found there last
        self._active = self.everyone
        self.instruction = Instruction(0, "", False, "", (), {})  # that is executed
        thread = np.arange(launch.threads, dtype=np.uint32)[None]
        # Special Registers.
        self._registers: dict[str, Array] = {"%tid.x": thread, "%laneid": thread % WARP}
        for axis, size, along in zip("xyz", launch.grid, np.unravel_index(blocks, launch.grid, "F"), strict=True):
            self._registers |= dict.fromkeys((f"%ctaid.{axis}", f"%clusterid.{axis}"), along.astype(np.uint32))
            self._registers[f"%nctaid.{axis}"] = np.full((1, 1), size, np.uint32)

    def guarded(self, active: Array, at: Instruction) -> Array:
        """Return which of these threads execute an instruction, the next one."""
        self._active, self.instruction = active, at
        if not at.guard:
            return active
        predicate = self._registers[at.guard] ^ at.negated
        return active if predicate.all() else np.logical_and(predicate, active)

    def get(self, name: str) -> Array:
        """Return a register, as unsigned integers or bool; 0 if it was never written."""
        if name in self._brought:
            self._refuse(self._brought[name], f"reads {name}, which a product is bringing")
        return self._registers.get(name, _NOTHING)

    def put(self, name: str, size: int, value: Array, mask: Array) -> None:
        """Write a register of `size` bytes: a narrower signed number is sign-extended."""
        for flying, what in ((self._brought, "is bringing"), (self._taken, "is reading")):
            if name in flying:
                self._refuse(flying[name], f"writes {name}, which a product {what}")
        everyone, before = mask is self.everyone, self._unfenced.get(name)
        self._unfenced[name] = mask if everyone or before is None else before | mask
        if value.ndim > 2:  # two in a register
            value = np.ascontiguousarray(value).view(f"u{2 * value.itemsize}")[..., 0]
        if value.dtype != bool:
            value = value if value.itemsize == size else value.astype(f"{value.dtype.kind}{size}")
            value = value.view(f"u{size}")
        if not everyone:
            value = np.where(mask, value, self._registers.get(name, value.dtype.type(0)))
        self._registers[name] = value

    def _refuse(self, group: Array, what: str) -> None:
        if ((group > 0)[:, self._warpgroup] & self._active).any():
            raise SharedMemoryError(f"{what}: nobody has waited")

    def sums(self, names: Sequence[str]) -> list[Array]:
        """Return registers that a product adds to: those that an earlier one brings, too."""
        return [self._registers.get(name, _NOTHING.astype(np.uint32)) for name in names]

    def bring(self, names: Sequence[str], values: Array, groups: Array, operands: Sequence[str]) -> None:
        """Write registers of warpgroups, uint32, that are there when somebody has waited for their products so far.

        They are read from `operands`, registers too.
        """
        mask = self.everyone if groups.all() else np.repeat(groups, WARPGROUP, 1)
        unfenced = bool((mask & ~self._fenced).any())
        for name in (*names, *operands):
            if unfenced or (name in self._unfenced and (mask & self._unfenced[name]).any()):
                raise SharedMemoryError(f"takes {name} and no wgmma.fence lies between")
        number, kept = np.where(groups, self.shared.groups[:, : groups.shape[1]] + 1, 0), dict(self._unfenced)
        earlier = {name: self._brought.pop(name) for name in names if name in self._brought}
        for name, value in zip(names, values, strict=True):
            self.put(name, 4, value, mask)
        self._unfenced = kept
        for flying, some, before in ((self._brought, names, earlier), (self._taken, operands, self._taken)):
            flying.update({name: np.maximum(number, before.get(name, 0)) for name in some})

    def fence(self, mask: Array) -> None:
        """Let products of these threads take registers as they are."""
        self._fenced |= mask
        self._unfenced = {name: late for name, who in self._unfenced.items() if (late := who & ~mask).any()}

    def complete(self, groups: Array, *, others: bool = False) -> None:
        """End groups up to a number, (blocks, columns), whose `others` may be at work until a barrier."""
        for flying in (self._brought, self._taken):
            for name, group in list(flying.items()):
                flying[name] = np.where(group <= groups[:, : group.shape[1]], 0, group)
                if not flying[name].any():
                    del flying[name]
        self.shared.complete(groups, others=others)
        if "tensor" in self.__dict__:
            self.tensor.complete(groups[:, :1])

    @cached_property
    def tensor(self) -> TensorMemory:
        """The tensor memory of the blocks, from its first use on."""
        return TensorMemory(self.shape[0])

    def full(self, x: Array) -> Array:
        """Return an array with all its blocks and threads, (blocks, threads, ...)."""
        return np.ascontiguousarray(x if x.shape == self.shape else np.broadcast_to(x, (*self.shape, *x.shape[2:])))

    def lanes(self, x: Array) -> Array:
        """Return what every thread has, warp by warp: (blocks, warps, lanes, ...)."""
        return x.reshape(self.shape[0], -1, WARP, *x.shape[2:])

    def warps(self, mask: Array) -> Array:
        """Return which warps execute an instruction; raise CannotRunError if part of one does."""
        groups = self.lanes(mask)
        some, every = groups.max(-1), groups.min(-1)
        if (some != every).any():
            raise CannotRunError(f"{self.instruction} is reached by some threads of a warp alone")
        return np.asarray(some)

    def gathered(self, mask: Array, size: int = 0) -> tuple[Array, Array | None]:
        """Return which groups of `size` threads, else blocks, execute an instruction with all their threads.

        Args:
            mask: of the threads that are there.
            size: of a group, which divides the block.

        Returns:
            bool (blocks, groups), and the threads that wait for others of their group.
        """
        shown = mask.reshape(self.shape[0], -1, size or self.shape[1])
        whole = shown.min(2)
        return whole, None if shown.max() == whole.min() else (shown & ~whole[..., None]).reshape(self.shape)


def by_number(numbers: Array, mask: Array) -> Iterator[tuple[int, Array]]:
    """Yield every number that the threads of a mask have, and which of them do."""
    for number in np.unique(numbers[mask]).tolist():
        yield number, mask & (numbers == number)
