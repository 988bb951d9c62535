"""The threads of some blocks: their registers, and the memory that they see."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.memory import WARP, Global, Shared
from tiebreak.backends.ptx.parsing import Instruction
from tiebreak.kernels.kernel import CannotRunError

_NOTHING = np.zeros((1, 1), np.uint64)


class Threads:
    """Every register is an array of (blocks, threads), unsigned or bool, 1 long where nothing changes along it."""

    def __init__(
        self,
        blocks: Array,
        grid: tuple[int, int, int],
        threads: int,
        arguments: Mapping[str, int],
        shared: Shared,
        memory: Global,
    ) -> None:
        """At the start of the program.

        Args:
            blocks: their numbers in the grid, those along x first: (blocks, 1).
            grid: blocks along x, y and z.
            threads: of a block.
            arguments: bits by parameter; what is not named is 0.
            shared: of these blocks.
            memory: of the host.
        """
        self.shape = len(blocks), threads
        self.everyone = np.ones(self.shape, bool)
        self.arguments, self.shared, self.memory = arguments, shared, memory
        thread = np.arange(threads, dtype=np.uint32)[None]
        # Special Registers.
        self.registers: dict[str, Array] = {"%tid.x": thread, "%laneid": thread % WARP}
        for axis, size, along in zip("xyz", grid, np.unravel_index(blocks, grid, order="F"), strict=True):
            self.registers[f"%ctaid.{axis}"] = along.astype(np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full((1, 1), size, np.uint32)
            self.registers[f"%ntid.{axis}"] = np.full((1, 1), threads if axis == "x" else 1, np.uint32)
        self.registers |= dict.fromkeys(("%tid.y", "%tid.z"), np.zeros((1, 1), np.uint32))

    def guarded(self, active: Array, at: Instruction) -> Array:
        """Which of these threads execute an instruction."""
        if not at.guard:
            return active
        predicate = self.registers[at.guard] ^ at.negated
        if predicate.all():
            return active
        guarded: Array = predicate & active
        return guarded

    def get(self, name: str) -> Array:
        """A register, as unsigned integers or bool; what was never written is 0."""
        return self.registers.get(name, _NOTHING)

    def put(self, name: str, size: int, value: Array, mask: Array) -> None:
        """Write a register of so many bytes: a narrower number is extended by its sign, if it has one."""
        if value.ndim > 2:  # two in a register
            value = np.ascontiguousarray(value).view(f"u{2 * value.itemsize}")[..., 0]
        if value.dtype != bool:
            value = value if value.itemsize == size else value.astype(f"{value.dtype.kind}{size}")
            value = value.view(f"u{size}")
        if mask is not self.everyone:
            value = np.where(mask, value, self.registers.get(name, value.dtype.type(0)))
        self.registers[name] = value

    def read(self, shared: bool, places: Array, mask: Array, dtype: np.dtype[Any], at: Instruction) -> Array:
        """Unsigned integers in the shared memory of the block, or in the host's; zeros where the mask hides them."""
        if shared:
            return self.shared.read(places, mask, dtype, at)
        return self.memory.read(places.view(np.uint64), mask, dtype)

    def write(self, shared: bool, places: Array, mask: Array, values: Array, at: Instruction) -> None:
        """Unsigned integers to the one or the other, where the mask does not hide them."""
        if shared:
            self.shared.write(places, mask, values, at)
        else:
            self.memory.write(places.view(np.uint64), mask, values)

    def full(self, x: Array) -> Array:
        """An array with all its blocks and threads."""
        return np.ascontiguousarray(np.broadcast_to(x, self.shape))

    def together(self, mask: Array, size: int, at: Instruction) -> Array:
        """Which warps, or blocks, of `size` threads execute an instruction, bool (blocks, groups).

        Raises:
            CannotRunError: part of one does, where all of its threads have to.
        """
        groups = self.full(mask).reshape(self.shape[0], -1, size)
        some, every = groups.max(-1), groups.min(-1)
        if (some != every).any():
            raise CannotRunError(f"{at} is reached by some threads of a {'warp' if size == WARP else 'block'} alone")
        return np.asarray(some)
