"""Whether a second run on the same input gives the same bits, and what a user's kernel leaves behind at every call."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionOutput, Gradients
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.leaks import left_behind
from tiebreak.matrix.workbench import SharedBatch

_NAMES = ("dq", "dk", "dv")


@dataclass(frozen=True)
class Repetition:
    """What a second run on the same input gave."""

    same: bool | None = None  # whether O has the same bits; None: there was no second run
    equal_gradients: float | None = None  # share of elements of dQ, dK and dV that have
    gradients: Gradients | None = None  # of the second run, of a user's kernel
    leaks: str | None = None  # what every call of a user's kernel leaves behind, in words

    @property
    def other_gradients(self) -> Gradients | None:
        """Those of the second run, where O has the same bits and they have not: a matter of the backward pass alone."""
        return self.gradients if self.same and self.equal_gradients != 1.0 else None


def repetition(cell: Cell, first: AttentionOutput, batch: SharedBatch) -> Repetition:
    """Run a cell's kernel once more.

    Args:
        cell: whose kernel.
        first: what it made of the inputs.
        batch: them.
    """
    if cell.backend.repeats(cell.kernel):
        return Repetition()  # unit tests show it once for all
    if cell.kernel.o_first:
        first = replace(first, gradients=None)
    kept = first.gradients and replace(first.gradients, **{name: torch.empty_like(x) for name, x in _tensors(first)})

    def again() -> Repetition:
        backend = batch.on(cell.backend, cell.kernel, run=1)
        output = backend.run(cell.kernel, batch.inputs, gradients=kept is not None)
        same = equal_bits(output.o.float(), first.o.float()) == 1.0
        if kept is None or output.gradients is None:
            return Repetition(same)
        for name, x in _tensors(output):
            getattr(kept, name).copy_(x)
        return Repetition(same, _equal_gradients(output, first))

    if not cell.kernel.external:
        return again()
    repeated, leaks = left_behind(again, first.o.numel() * TORCH_DTYPES[batch.inputs.formats.output].itemsize)
    # Not what `again` returns: a tensor of a call that outlives it would count as left behind.
    return replace(repeated, leaks=leaks, gradients=None if repeated.equal_gradients is None else kept)


def _tensors(output: AttentionOutput) -> tuple[tuple[str, Tensor], ...]:
    """The dQ, dK and dV of a run that has them."""
    return () if output.gradients is None else tuple((name, getattr(output.gradients, name)) for name in _NAMES)


def _equal_gradients(output: AttentionOutput, first: AttentionOutput) -> float:
    """Share of elements of dQ, dK and dV that agree to the bit."""
    same = elements = 0.0
    for (_, ours), (_, theirs) in zip(_tensors(output), _tensors(first), strict=True):
        share = 1.0 if torch.equal(ours, theirs) else equal_bits(ours.float(), theirs.float())
        same, elements = same + share * ours.numel(), elements + ours.numel()
    return same / elements
