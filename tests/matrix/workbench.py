"""What cells of one case share on a worker: inputs, references, error bounds and the emulation's outputs."""

from dataclasses import dataclass, field, replace

from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.cases.bounds import error_bound
from tiebreak.cases.captured import without_cancelled
from tiebreak.cases.case import Case
from tiebreak.cases.measures import Measures, measure
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.reference import Reference, reference
from tiebreak.matrix.cell import Cell, Settings


@dataclass(frozen=True)
class Batch:
    """One batch of a case's heads with its reference."""

    inputs: AttentionInputs
    ref: Reference


@dataclass
class Workbench:
    """What cells of one case share: inputs, references, and the emulation's outputs. Holds one case at a time."""

    settings: Settings
    _key: tuple[str, str] = ("", "")
    _batches: dict[int, Batch] = field(default_factory=dict)
    _bounds: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    _emulated: dict[tuple[Declaration, int], tuple[AttentionOutput, Measures]] = field(default_factory=dict)

    def batch(self, case: Case, fmt: Format, index: int) -> Batch:
        """Batch `index` of a case."""
        if self._key != (case.name, fmt.name):
            self._key = (case.name, fmt.name)
            for cache in (self._batches, self._bounds, self._emulated):
                cache.clear()
        if index not in self._batches:
            inputs = case.make(self.settings.seed, index, self.settings.heads, fmt)
            self._batches[index] = Batch(inputs, reference(inputs))
        return self._batches[index]

    def bound(self, cell: Cell, index: int, declaration: Declaration) -> Tensor:
        """Error bound of every element of O under a declaration."""
        key = (f"{declaration.label}/{declaration.block}", index)
        if key not in self._bounds:
            batch = self.batch(cell.case, cell.fmt, index)
            self._bounds[key] = error_bound(batch.inputs, batch.ref, declaration)
        return self._bounds[key]

    def measure(self, cell: Cell, index: int, output: AttentionOutput, declaration: Declaration) -> Measures:
        """Measures of an output on one batch."""
        batch = self.batch(cell.case, cell.fmt, index)
        delta = output.gradients.delta if output.gradients else None
        o = output.o.float()
        found = measure(o, delta, batch.inputs, batch.ref, self.bound(cell, index, declaration))
        return found if cell.case.stock is None else without_cancelled(found, o, batch.inputs, batch.ref)

    def emulated(self, cell: Cell, index: int, declaration: Declaration) -> tuple[AttentionOutput, Measures]:
        """What the emulation makes of a declaration on one batch."""
        batch = self.batch(cell.case, cell.fmt, index)
        # Tiles beyond the input's size change nothing: such declarations share one emulation.
        queries, keys = batch.inputs.q.shape[-2], batch.inputs.k.shape[-2]
        block = Block(min(declaration.block.queries, queries), min(declaration.block.keys, keys))
        declaration = replace(declaration, block=block)
        key = (declaration, index)
        if key not in self._emulated:
            kernel = composed(declaration.label, declaration)
            output = EMULATION.run(kernel, batch.inputs, gradients=cell.case.gradients)
            self._emulated[key] = (output, self.measure(cell, index, output, declaration))
        return self._emulated[key]
