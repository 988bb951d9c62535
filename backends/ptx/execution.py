"""A compiled kernel, executed: all threads of some blocks at once, in lock step, every register an array.

Where threads part, those that are furthest behind in the text go on alone, until the others' place is theirs too.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tiebreak.backends.interpreter.memory import Memory
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.binding import Step, bound, least_of_shared
from tiebreak.backends.ptx.memory import Global, Shared
from tiebreak.backends.ptx.parsing import parsed
from tiebreak.backends.ptx.threads import Threads

_TOGETHER = 2**13  # threads: arrays of a register that a core's cache holds


@dataclass(frozen=True)
class Launch:
    """A grid of blocks, and what they are given."""

    grid: tuple[int, int, int]  # blocks along x, y and z
    threads: int  # of a block
    shared: int  # bytes of a block
    arguments: Sequence[int]  # the bits of every parameter
    memory: Memory  # what they may touch


class Program:
    """The instructions of one kernel for one card, looked up."""

    def __init__(self, text: str, card: str) -> None:
        """From PTX.

        Raises:
            CannotRunError: it holds what is not executed here, which the message names.
        """
        taken_apart = parsed(text)
        self._parameters, self._labels = taken_apart.parameters, taken_apart.labels
        self._steps = [Step(at, bound(at, card)) for at in taken_apart.instructions]
        self._granule = least_of_shared(taken_apart.instructions)

    def run(self, launch: Launch) -> None:
        """Execute every block of a grid, as many at once as are worth it.

        Raises:
            SharedMemoryError: the threads of a block race, or read what none has written.
            OutOfBoundsError: it touches what it was not given.
            CannotRunError: some threads alone come to where a block's or a warp's have to be together.
        """
        count, at_once = int(np.prod(launch.grid)), max(1, _TOGETHER // launch.threads)
        arguments = dict(zip(self._parameters, launch.arguments, strict=False))  # Triton's scratch memory is never used
        for start in range(0, count, at_once):
            blocks = np.arange(start, min(count, start + at_once), dtype=np.uint32)[:, None]
            shared = Shared(len(blocks), launch.shared, launch.threads, self._granule)
            with np.errstate(all="ignore"):
                self._execute(Threads(blocks, launch.grid, launch.threads, arguments, shared, Global(launch.memory)))

    def _execute(self, threads: Threads) -> None:
        waiting = {0: threads.everyone}  # threads by their next instruction
        while waiting:
            at = min(waiting)
            active = waiting.pop(at)
            while at < min(waiting, default=len(self._steps)):
                step = self._steps[at]
                at += 1
                mask = threads.guarded(active, step.instruction)
                if step.run is not None:
                    step.run(threads, mask)
                elif mask.any():
                    if step.instruction.opcode != "ret":
                        _join(waiting, self._labels[str(step.instruction.operands[0])], mask, threads)
                    active = active & ~mask
                    if not active.any():
                        break
            else:
                _join(waiting, at, active, threads)
            waiting.pop(len(self._steps), None)


def _join(waiting: dict[int, Array], at: int, mask: Array, threads: Threads) -> None:
    met = waiting[at] | mask if at in waiting else mask
    waiting[at] = threads.everyone if met.all() else met
