"""What cells of one case share on a worker: inputs, references, error bounds and the emulation's outputs."""

from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor

from tiebreak.backends.backend import EMULATION, Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.batch import Batch
from tiebreak.cases.captured import without_cancelled
from tiebreak.cases.case import Case
from tiebreak.cases.errors import Errors, measure
from tiebreak.kernels.flash import ALL, DELTA_ALONE, Block
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput
from tiebreak.kernels.kernel import Declaration, composed
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.kernels.reference import reference
from tiebreak.matrix.settings import Settings


class _Shared(EmulatedArithmetic):
    """The emulation's arithmetic, with what depends on a batch's inputs alone computed once for all kernels.

    That is products of two of them, such as Q K^T, and where only one is an operand its values in fp64.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        """Share products of these inputs, which must outlive it: it knows them by where they lie."""
        self._inputs = {_storage(tensor) for tensor in (inputs.q, inputs.k, inputs.v, inputs.do)}
        self._products: dict[tuple[object, ...], Tensor] = {}
        self._wide: dict[tuple[object, ...], Tensor] = {}

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """As `EmulatedArithmetic.matmul`."""
        if not {_storage(a), _storage(b)} <= self._inputs:
            if accumulator is Accumulator.EXACT:
                a, b = self._widened(a), self._widened(b)
            return super().matmul(a, b, cast, accumulator)
        key = (*_place(a), *_place(b), cast, accumulator)
        if key not in self._products:
            self._products[key] = super().matmul(a, b, cast, accumulator)
        return self._products[key]

    def _widened(self, x: Tensor) -> Tensor:
        """An input in fp64, in which an exact sum is computed; anything else as it is."""
        if _storage(x) not in self._inputs:
            return x
        key = _place(x)
        if key not in self._wide:
            self._wide[key] = x.double()
        return self._wide[key]


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _place(x: Tensor) -> tuple[object, ...]:
    """What tells a part of an input from any other, and from itself once someone has written to it."""
    return x.data_ptr(), x.shape, x.stride(), x._version


@dataclass(frozen=True)
class SharedBatch(Batch):
    """A batch, and what the emulation makes of it with what its kernels share."""

    @cached_property
    def emulation(self) -> Backend:
        """The emulation for these inputs."""
        return replace(EMULATION, arithmetic=_Shared(self.inputs))

    def clipped(self, declaration: Declaration) -> Declaration:
        """The declaration in tiles no larger than the input: beyond its size they change nothing."""
        queries, keys = self.inputs.q.shape[-2], self.inputs.k.shape[-2]
        block = Block(min(declaration.block.queries, queries), min(declaration.block.keys, keys))
        return replace(declaration, block=block)


@dataclass(frozen=True)
class CaseBench:
    """What the cells of one case in one format share, a batch at a time, each made when it is first asked for."""

    case: Case
    fmt: Format
    settings: Settings
    _batches: dict[int, SharedBatch] = field(default_factory=dict)
    _emulated: dict[tuple[Declaration, int], tuple[AttentionOutput, Errors]] = field(default_factory=dict)

    def has(self, index: int) -> bool:
        """Whether the case has heads for batch `index`."""
        return self.case.has(index, self.settings.heads)

    def batch(self, index: int) -> SharedBatch:
        """Batch `index`."""
        if index not in self._batches:
            inputs = self.case.make(self.settings.seed, index, self.settings.heads, self.fmt)
            self._batches[index] = SharedBatch(inputs, reference(inputs))
        return self._batches[index]

    def measure(self, index: int, output: AttentionOutput, declaration: Declaration) -> Errors:
        """Errors of an output on one batch."""
        batch = self.batch(index)
        delta = output.gradients.delta if output.gradients else None
        o = output.o.float()
        errors = replace(
            measure(o, delta, batch.inputs, batch.ref, batch.bounds.of(declaration), batch.yardstick),
            outside_values=batch.outside_values(o, declaration),
        )
        return errors if self.case.fixed_heads is None else without_cancelled(errors, o, batch.inputs, batch.ref)

    def emulated(self, index: int, declaration: Declaration) -> tuple[AttentionOutput, Errors]:
        """What the emulation makes of a declaration on one batch."""
        batch = self.batch(index)
        declaration = batch.clipped(declaration)  # such declarations share one emulation
        key = (declaration, index)
        if key not in self._emulated:
            # Gradients are measured on the first batch alone.
            kernel = composed(declaration.label, declaration, ALL if index == 0 else DELTA_ALONE)
            output = batch.emulation.run(kernel, batch.inputs, gradients=self.case.gradients)
            self._emulated[key] = (output, self.measure(index, output, declaration))
        return self._emulated[key]


@dataclass
class Workbench:
    """Where a worker's cells are run: holds what those of one case share, and forgets it with the next case."""

    settings: Settings
    overall: dict[tuple[str, str, str], tuple[str, ...]] = field(default_factory=dict)  # by backend, kernel and format
    _held: CaseBench | None = None

    def case(self, case: Case, fmt: Format) -> CaseBench:
        """What cells of a case in a format share."""
        if self._held is None or (self._held.case.name, self._held.fmt.name) != (case.name, fmt.name):
            self._held = CaseBench(case, fmt, self.settings)
        return self._held
