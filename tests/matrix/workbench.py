"""What cells of one case share on a worker: inputs, references, error bounds and the emulation's outputs."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION, Backend
from tiebreak.cases.batch import Batch
from tiebreak.cases.captured import without_cancelled
from tiebreak.cases.case import Case
from tiebreak.cases.errors import Errors, by_key_head, in_units, measure
from tiebreak.cases.verdicts import Interval, interval
from tiebreak.kernels.flash import ALL, DELTA_ALONE
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import AttentionOutput
from tiebreak.kernels.kernel import Declaration, Kernel, composed
from tiebreak.kernels.reference import Reference, reference
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.candidates import drawn, nameless
from tiebreak.matrix.identification.asking import Asked
from tiebreak.matrix.identification.known import KnownPlans
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.sharing import Emulated

_FIRST_HEADS = 32  # on which all candidates are tried
_REACH = 0.02  # how far behind the best in its share of equal bits a candidate may be to be tried on all heads


@dataclass(frozen=True)
class Fit:
    bits: float  # share of elements of O that agree to the bit
    difference: Interval  # of bias, in ulps, paired head by head


@dataclass(frozen=True)
class SharedBatch(Batch, Emulated):
    @cached_property
    def first_heads(self) -> "SharedBatch":
        """The first heads, from as many entries as there are; the whole of a small batch."""
        inputs = self.inputs
        entries = min(inputs.q.shape[0], _FIRST_HEADS)
        key_heads = max(1, -(-_FIRST_HEADS // (entries * inputs.groups)))
        if entries == inputs.q.shape[0] and key_heads >= inputs.k.shape[1]:
            return self
        return self.part(slice(entries), slice(key_heads))

    def part(self, entries: slice, key_heads: slice) -> "SharedBatch":
        """Return some entries of the batch, and of them some key heads with the heads that share them."""
        groups = self.inputs.groups
        heads = slice((key_heads.start or 0) * groups, key_heads.stop * groups)
        ref = Reference(**{name: tensor[entries, heads] for name, tensor in vars(self.ref).items()})
        return SharedBatch(self.inputs.part(entries, heads=heads, key_heads=key_heads), ref)

    @property
    def first_entries(self) -> "SharedBatch":
        """About as many heads, of whole entries: which key head a query head reads is told by all of an entry."""
        cut = slice(-(-_FIRST_HEADS // self.inputs.q.shape[1]))
        return SharedBatch(self.inputs.part(cut), Reference(**{name: x[cut] for name, x in vars(self.ref).items()}))

    def fits(self, o: Tensor, candidates: Mapping[str, Declaration]) -> dict[str, Fit]:
        """How each candidate fits an output.

        All are tried on some heads; those near the best, and those with random bits, which agree with nothing to the
        bit, on all of them. Of one that is out of reach the fit is what some heads say.
        """
        work = {name: nameless(self.clipped(declaration)) for name, declaration in candidates.items()}
        some = self.first_heads
        fitting = some._tried(o, work.values())
        if some is not self:
            best = max(fit.bits for fit in fitting.values())
            near = [plan for plan, fit in fitting.items() if fit.bits >= best - _REACH or drawn(plan)]
            fitting |= self._tried(o, near)
        return {name: fitting[plan] for name, plan in work.items()}

    def _tried(self, o: Tensor, declarations: Iterable[Declaration]) -> dict[Declaration, Fit]:
        entries, heads = self.inputs.q.shape[:2]
        ours, units = o[:entries, :heads].float(), self.units
        fitting = {}
        for declaration in dict.fromkeys(declarations):
            theirs = self.predicted(declaration)
            samples = by_key_head(in_units(ours.double() - theirs.double(), units), self.inputs.groups)
            fitting[declaration] = Fit(equal_bits(ours, theirs), interval(samples[torch.isfinite(samples)]))
        return fitting


@dataclass(frozen=True)
class CaseBench:
    """What the cells of one case in one format share, a batch at a time, each made when it is first asked for."""

    case: Case
    fmt: Format
    settings: Settings
    _batches: dict[int, SharedBatch] = field(default_factory=dict)
    _emulated: dict[tuple[Declaration, int], tuple[AttentionOutput, Errors]] = field(default_factory=dict)

    def has(self, index: int) -> bool:
        return self.case.has(index, self.settings.heads)

    def batch(self, index: int) -> SharedBatch:
        if index not in self._batches:
            inputs = self.case.make(self.settings.seed, index, self.settings.heads, self.fmt)
            self._batches[index] = SharedBatch(inputs, reference(inputs))
        return self._batches[index]

    def measure(self, index: int, output: AttentionOutput, declaration: Declaration) -> Errors:
        batch = self.batch(index)
        delta = output.gradients.delta if output.gradients else None
        o = output.o.float()
        errors = replace(
            measure(o, delta, batch.inputs, batch.ref, batch.bounds.of(declaration), batch.units, batch.size_units),
            outside_values=batch.outside_values(o, declaration),
        )
        return errors if self.case.fixed_heads is None else without_cancelled(errors, o, batch.inputs, batch.ref)

    def emulated(self, index: int, declaration: Declaration) -> tuple[AttentionOutput, Errors]:
        batch = self.batch(index)
        declaration = batch.clipped(declaration)  # such declarations share one emulation
        key = (declaration, index)
        if key not in self._emulated:
            # Gradients are measured on the first batch alone.
            kernel = composed(declaration.label, declaration, ALL if index == 0 else DELTA_ALONE)
            emulation = replace(EMULATION, arithmetic=batch.arithmetic)
            output = emulation.run(kernel, batch.inputs, gradients=self.case.gradients)
            self._emulated[key] = (output, self.measure(index, output, declaration))
        return self._emulated[key]


@dataclass
class Workbench:
    """Where a worker's cells are run: holds what those of one case share, and forgets it with the next case."""

    settings: Settings
    _held: CaseBench | None = None
    _known: dict[tuple[str, str, str], KnownPlans] = field(default_factory=dict)  # by backend, kernel and format

    def case(self, case: Case, fmt: Format) -> CaseBench:
        if self._held is None or (self._held.case.name, self._held.fmt.name) != (case.name, fmt.name):
            self._held = CaseBench(case, fmt, self.settings)
        return self._held

    def known(self, backend: Backend, kernel: Kernel, fmt: Format) -> KnownPlans:
        """What the known plans have in common with a kernel in a format: its calls are made once."""
        key = (backend.name, kernel.name, fmt.name)
        if key not in self._known:
            self._known[key] = KnownPlans(Asked(backend, kernel, fmt), self.settings.seed)
        return self._known[key]
