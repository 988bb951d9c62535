"""A compiled kernel, executed: all threads of some blocks at once, in lock step, every register an array.

Where threads part, those that are furthest behind in the text go on alone, until the others' place is theirs too, or
until they have to wait for the others.
"""

import re
from collections.abc import Iterator, Mapping

import numpy as np

from tiebreak.backends.absent import count_launch
from tiebreak.backends.interpreter.numbers import Array
from tiebreak.backends.ptx.binding import bound
from tiebreak.backends.ptx.fusing import fused
from tiebreak.backends.ptx.memory import SharedMemoryError
from tiebreak.backends.ptx.parsing import parsed
from tiebreak.backends.ptx.threads import Launch, Threads

_TOGETHER = 2**14  # threads: arrays of a register that a core's cache holds
_SMALL = re.compile(r"(?:ld|st)\..*shared.*\.[bsu](?:8|16)")  # accesses of shared memory to less than four bytes


class Program:
    """The instructions of one kernel for one card, decoded."""

    def __init__(self, text: str, card: str, name: str = "") -> None:
        """Parse a kernel of a PTX text, the first without a name, for a card that may have an assembler behind a slash.

        Raises:
            CannotRunError: it holds what is not executed here, which the message names.
        """
        self.entry = parsed(text, name)
        instructions, self._labels = self.entry.instructions, self.entry.labels
        card, _, fuses = card.partition("/")
        ways = {str(name) for at in instructions if at.branches for name in at.operands}
        targets = {place for label, place in self._labels.items() if label in ways}
        instructions = fused(instructions, targets) if fuses else instructions
        effects = bound(instructions, targets, card)
        self._steps = list(zip(instructions, effects, strict=True))
        self._granule = 1 if any(_SMALL.fullmatch(at.opcode) for at in instructions) else 4

    def run(self, launch: Launch) -> None:
        """Execute every block of a grid, in batches of a size that pays.

        Raises:
            SharedMemoryError: the threads of a block race, read what none has written, or wait for ever.
            OutOfBoundsError: it touches what it was not given.
            CannotRunError: some threads alone come to where a warp's have to be together.
        """
        count_launch()
        count, at_once = int(np.prod(launch.grid)), max(1, _TOGETHER // launch.threads)
        for start in range(0, count, at_once):
            blocks = np.arange(start, min(count, start + at_once), dtype=np.uint32)[:, None]
            threads = Threads(launch, blocks, self._granule)
            given = [x if isinstance(x, bytes) else (x % 2**64).to_bytes(8, "little") for x in launch.arguments]
            threads.parameters = dict(zip((each.name for each in self.entry.parameters), given, strict=False))
            for name, held in threads.parameters.items():  # where code takes its address
                threads.put(name, 8, np.frombuffer(held.ljust(8, b"\0"), np.uint64, 1)[None], threads.everyone)
            with np.errstate(all="ignore"):
                self._execute(threads)

    def _execute(self, threads: Threads) -> None:
        """Run the threads at the lowest instruction first, so that threads that parted join again.

        Who can't go on is parked at its place, and asked again when others have come there, or nobody else can go on.
        """
        ready, parked, moved = {0: threads.everyone}, dict[int, Array](), True  # threads by their next instruction
        while ready or parked:
            if not ready:
                if not moved:
                    raise SharedMemoryError(f"threads wait for one another: {self._places(parked)}")
                ready, parked, moved = parked, {}, False
            at = min(ready)
            active = ready.pop(at)
            while at < min(ready, default=len(self._steps)):
                instruction, run = self._steps[at]
                if at in parked:
                    active = active | parked.pop(at)
                    active = threads.everyone if active.all() else active
                mask = threads.guarded(active, instruction)
                try:
                    leaving = run(threads, mask) if run is not None else mask
                except SharedMemoryError as error:
                    raise SharedMemoryError(f"{instruction} {error}") from error
                if leaving is not None and leaving.any():
                    if run is not None:
                        parked[at] = leaving
                    elif instruction.branches:
                        for label, who in _ways(threads, mask):
                            _join(ready, self._labels[label], who, threads)
                    active = active & ~leaving
                moved = moved or run is None or bool(active.any())
                at += 1
                if leaving is not None and not active.any():
                    break
            else:
                _join(ready, at, active, threads)
            ready.pop(len(self._steps), None)

    def _places(self, parked: Mapping[int, Array]) -> str:
        return ", ".join(f"{int(mask.sum())} at {self._steps[at][0]}" for at, mask in sorted(parked.items()))


def _ways(threads: Threads, mask: Array) -> Iterator[tuple[str, Array]]:
    """Yield where threads go at a branch, and who (PTX ISA, Control Flow Instructions).

    Raises:
        CannotRunError: a number is beyond the table, which the manual leaves open.
    """
    at = threads.instruction
    if at.opcode.startswith("bra"):
        yield str(at.operands[0]), mask
        return
    *labels, index = map(str, at.operands)
    chosen = threads.get(index)
    if (mask & (chosen >= len(labels))).any():
        raise at.refused()
    for number, label in enumerate(labels):
        if (who := mask & (chosen == number)).any():
            yield label, who


def _join(waiting: dict[int, Array], at: int, mask: Array, threads: Threads) -> None:
    met = waiting[at] | mask if at in waiting else mask
    waiting[at] = threads.everyone if met.all() else met
