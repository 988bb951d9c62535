"""Whether a second run on the same input gives the same bits, and what a user's kernel leaves behind at every call."""

from dataclasses import dataclass, replace

import torch

from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionOutput
from tiebreak.matrix.attribution import equal_bits
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.leaks import left_behind
from tiebreak.matrix.workbench import SharedBatch


@dataclass(frozen=True)
class Repetition:
    """What a second run on the same input gave."""

    same: bool | None = None  # whether O has the same bits; None: there was no second run
    gradients: float | None = None  # share of elements of dQ, dK and dV that have
    leaks: str | None = None  # what every call of a user's kernel leaves behind, in words


def repetition(cell: Cell, first: AttentionOutput, batch: SharedBatch) -> Repetition:
    """Run a cell's kernel once more.

    Args:
        cell: whose kernel.
        first: what it made of the inputs.
        batch: them.
    """
    if cell.backend.repeats(cell.kernel):
        return Repetition()  # unit tests show it once for all
    gradients = first.gradients is not None and not cell.kernel.o_first

    def again() -> Repetition:
        backend = batch.on(cell.backend, cell.kernel, run=1)
        output = backend.run(cell.kernel, batch.inputs, gradients=gradients)
        return Repetition(equal_bits(output.o.float(), first.o.float()) == 1.0, _equal_gradients(output, first))

    if not cell.kernel.external:
        return again()
    repeated, leaks = left_behind(again, first.o.numel() * TORCH_DTYPES[batch.inputs.formats.output].itemsize)
    return replace(repeated, leaks=leaks)


def _equal_gradients(output: AttentionOutput, first: AttentionOutput) -> float | None:
    """Share of elements of dQ, dK and dV that agree to the bit; None where one of the two has none."""
    if output.gradients is None or first.gradients is None:
        return None
    same = elements = 0.0
    for name in ("dq", "dk", "dv"):
        ours, theirs = (getattr(gradients, name) for gradients in (output.gradients, first.gradients))
        share = 1.0 if torch.equal(ours, theirs) else equal_bits(ours.float(), theirs.float())
        same, elements = same + share * ours.numel(), elements + ours.numel()
    return same / elements
