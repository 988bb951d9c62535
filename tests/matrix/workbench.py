"""Whatever cells of one case share on a worker: inputs, references, error bounds and what plans make of the inputs.

What plans would each compute is computed once, the same to the bit.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch
from torch import Tensor

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.cases.bounds import ErrorBounds, lost_of_o_bar, mean_slack
from tiebreak.cases.case import Case
from tiebreak.cases.errors import Errors, by_key_head, has_no_number, in_units, measure, units_of
from tiebreak.cases.gradients import ExactGradients, GradientErrorBounds, GradientErrors
from tiebreak.cases.verdicts import Interval, interval
from tiebreak.kernels.flash import ALL, DELTA_ALONE
from tiebreak.kernels.formats import FP32, Format
from tiebreak.kernels.inputs import AttentionInputs, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration, composed, is_random, nameless, run_forward
from tiebreak.kernels.plans import Accumulator, Cast, Exponential
from tiebreak.kernels.reference import Reference, reference

Named = tuple[str, str, str]  # a backend, a kernel and a format
EQUAL = 1e-3  # difference of shares of bits up to which plans are not told apart
FIRST_HEADS = 32  # on which all candidates are tried
_REACH = 0.02  # how far behind the best in its share of equal bits a candidate may be to be tried on all heads

_FP32 = Cast(FP32)
_LARGEST = 2**20  # elements of a result that is kept: a larger one costs as much to find memory for as to compute
_WIDENED = 2**18  # elements of what is kept in fp64 too: 2 MB
_KEPT = 2**24  # elements of all of them, at most: they are forgotten beyond
_PLANS = 256  # of which O is kept: a search tries thousands
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
_Made = TypeVar("_Made")


class SharedEmulation(EmulatedArithmetic):
    """The emulation's arithmetic for some inputs, with results kept.

    Results of inputs and of earlier results, such as Q K^T, are found by the place of their operands in memory; an
    exponential, whose argument every kernel makes anew, by the argument's values.
    """

    def __init__(self, inputs: AttentionInputs) -> None:
        """Share results on inputs that outlive it."""
        self._inputs = (inputs.q, inputs.k, inputs.v, inputs.do)
        self._forget()

    def _forget(self) -> None:
        self._known = {_storage(tensor) for tensor in self._inputs}
        self._results: dict[Hashable, tuple[Tensor, int]] = {}
        self._of_values: dict[Hashable, list[tuple[Tensor, Tensor, int]]] = {}
        self._size = 0

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        """Cast, once for each operand."""
        if random is not None or not cast.narrows:
            return super().cast(x, cast, random)
        return self._once((x,), cast, partial(super().cast, x, cast))

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """Multiply exactly and cast, unless the sum is cast on the way: plans with several casts share one product."""
        if cast.every:
            return self._once((a, b), (cast, accumulator), partial(super().matmul, a, b, cast, accumulator))
        anew = super().matmul

        def product() -> Tensor:
            operands = (self._widened(a), self._widened(b)) if accumulator is Accumulator.EXACT else (a, b)
            return anew(*operands, _FP32, accumulator)

        return self.cast(self._once((a, b), accumulator, product), cast)

    def _widened(self, x: Tensor) -> Tensor:
        """Return fp64, in which an exact sum is computed; large tensors are widened piece by piece, when summed."""
        return x if x.numel() > _WIDENED else self._once((x,), torch.float64, x.double)

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        """Compute the exponential, once for equal values."""
        return self._like(x, exponential, partial(super().exp, x, exponential))

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        """Sum rows, once for each operand."""
        return self._once((x,), accumulator, partial(super().row_sum, x, accumulator))

    def _once(self, operands: tuple[Tensor, ...], how: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of operands, if they are known, else make it.

        Known operands are kept alive: in the place of a freed tensor there may be another one.
        """
        key = how, *map(_place, operands)
        if key in self._results:
            result, version = self._results[key]
            return result if result._version == version else make()
        if not self._knows(operands):
            return make()
        result = make()
        if result.numel() <= _LARGEST:
            self._make_room(result.numel())
            if self._knows(operands):  # all may have been forgotten meanwhile
                self._known.add(_storage(result))
                self._results[key] = result, result._version
        return result

    def _knows(self, operands: tuple[Tensor, ...]) -> bool:
        return all(_storage(operand) in self._known for operand in operands)

    def _like(self, x: Tensor, how: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of an operand with the same values, else make it."""
        key = how, x.shape, x.sum().item()  # a few of many plans' arguments have that sum
        for earlier, result, versions in self._of_values.get(key, ()):
            if versions == earlier._version + result._version and torch.equal(earlier, x):
                return result
        result = make()
        if x.numel() > _LARGEST:
            return result
        self._make_room(x.numel() + result.numel())
        self._known |= {_storage(x), _storage(result)}
        self._of_values.setdefault(key, []).append((x, result, x._version + result._version))
        return result

    def _make_room(self, elements: int) -> None:
        """Forget everything, if these elements would make it too much."""
        if self._size + elements > _KEPT:
            self._forget()
        self._size += elements


def _storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def _place(x: Tensor) -> tuple[Hashable, ...]:
    """Return a key that tells a part of a tensor from any other, and from itself after a write."""
    return x.data_ptr(), x.shape, x.stride(), x._version


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return which elements agree to the bit, NaN counting as equal to NaN."""
    return (ours == theirs) | (ours.isnan() & theirs.isnan())


def _identical(ours: Tensor | None, theirs: Tensor | None) -> bool:
    """Return whether tensors have the same bits, zeros their signs, in the same order in memory, by which sums add."""
    if ours is None or theirs is None:
        return ours is theirs
    (mine, bits), (other, their_bits) = (
        ((x.dtype, x.shape, x.stride()), x.detach().view(_INTEGERS[x.element_size()])) for x in (ours, theirs)
    )
    return mine == other and torch.equal(bits, their_bits)


def equal_bits(ours: Tensor, theirs: Tensor) -> float:
    """Return the share of elements that agree to the bit, NaN counting as equal to NaN."""
    if not math.isfinite(ours.sum().item()):
        return same_bits(ours, theirs).double().mean().item()
    # Nothing of ours is NaN. A comparison in place gives numbers: several times faster than one that gives bool.
    return ours.clone().eq_(theirs).sum(dtype=torch.float64).item() / ours.numel() if ours.numel() else 1.0


@dataclass(frozen=True, eq=False)
class Emulated:
    """Inputs, and the outputs of plans on them."""

    inputs: AttentionInputs

    @cached_property
    def arithmetic(self) -> SharedEmulation:
        """The arithmetic that keeps results on these inputs."""
        return SharedEmulation(self.inputs)

    def clipped(self, declaration: Declaration) -> Declaration:
        """Return the declaration in tiles no larger than the inputs: beyond their size they change nothing."""
        return _clipped(declaration, self.inputs.q.shape[-2], self.inputs.k.shape[-2])

    def output(self, declaration: Declaration) -> AttentionOutput:
        """Return the output of a declaration on these inputs."""
        return run_forward(self.clipped(declaration), self.inputs, self.arithmetic)

    def predicted(self, declaration: Declaration) -> Tensor:
        """Return O, which is kept."""
        key = self.clipped(declaration)
        if key not in self._predicted:
            if len(self._predicted) >= _PLANS:
                self._predicted.clear()
            self._predicted[key] = self.output(key).o
        return self._predicted[key]

    @cached_property
    def _predicted(self) -> dict[Declaration, Tensor]:
        return {}


@lru_cache(maxsize=1024)
def _clipped(declaration: Declaration, queries: int, keys: int) -> Declaration:
    block = declaration.block
    return replace(declaration, block=replace(block, queries=min(block.queries, queries), keys=min(block.keys, keys)))


@dataclass(frozen=True)
class Fit:
    """The agreement of a plan with an output."""

    bits: float  # share of elements of O that agree to the bit
    difference: Interval  # of bias, in ulps, paired head by head


@dataclass(frozen=True)
class SharedBatch(Emulated):
    """One batch of a case's heads with its reference, and what its cells share: each computed once."""

    ref: Reference

    @cached_property
    def units(self) -> Tensor:
        """The units of errors of O."""
        return units_of(self.ref.o, self.inputs.formats.output)

    @cached_property
    def size_units(self) -> Tensor | None:
        """The units of errors of O relative to the mean of |V| that its row sees; None: V has one sign, as `units`.

        Where O cancels, an error in its ulps shows by how much; its mean square has no finite variance.
        """
        v = self.inputs.v
        return units_of(self.ref.magnitude, self.inputs.formats.output) if (v > 0).any() and (v < 0).any() else None

    @cached_property
    def bounds(self) -> ErrorBounds:
        """The part of the error bounds that all plans share."""
        return ErrorBounds(self.inputs, self.ref)

    @cached_property
    def gradient_bounds(self) -> GradientErrorBounds:
        """The part of the error bounds of dQ, dK and dV that all plans share."""
        return GradientErrorBounds(self.bounds, self.gradients.gradients)

    @cached_property
    def gradients(self) -> ExactGradients:
        """The reference's dQ, dK and dV."""
        return ExactGradients.of(self.inputs, self.ref)

    @cached_property
    def value_range(self) -> tuple[Tensor, Tensor]:
        """The least and the largest V that a row sees, by column, fp64, each broadcastable to O.

        NaN where V has one; Inf and -Inf where a row sees no key.
        """
        hidden, v = self.inputs.hidden(), self.inputs.whole_v
        if hidden is None:
            least, largest = (self.inputs.expanded(of_keys(-2, keepdim=True)) for of_keys in (v.amin, v.amax))
        else:
            # A mask is rare and its cases are small: (batch, heads, queries, keys, d) fits.
            visible, wide = ~hidden[..., None], self.inputs.expanded(v)[:, :, None]
            least = torch.where(visible, wide, torch.inf).amin(-2)
            largest = torch.where(visible, wide, -torch.inf).amax(-2)
        if self.inputs.sink is not None:  # which has a V of 0
            least, largest = least.clamp(max=0.0), largest.clamp(min=0.0)
        return least.double(), largest.double()  # as large as O, and not as V, in fp64

    def outside_values(self, o: Tensor, declaration: Declaration) -> float:
        """Return how far O is outside the range of V that its row sees: 0 inside, 1 at the plan's rounding error.

        O is as the kernel returned it, (batch, heads, queries, d). NaN and Inf are left to another check: elements of V
        or O with one count as 0; NaN where O has nothing else.
        """
        if has_no_number(o, self.ref):
            return math.nan
        least, largest = self.value_range
        if torch.equal(o.clamp(least.float(), largest.float()), o):  # fp32 holds every V: nothing is outside
            return 0.0
        wide = o.to(torch.float64, copy=True)
        outside = torch.maximum(least - wide, wide.sub_(largest))
        slack = mean_slack(self.inputs, declaration) * torch.maximum(least.abs(), largest.abs())
        # Without a visible key both ends are infinite, and O is 0: its error bound asks for that.
        spacing = self.inputs.formats.output.smallest_subnormal + lost_of_o_bar(self.inputs, declaration)
        share = outside.div_(slack + spacing)
        return max(0.0, share.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).max().item())

    @cached_property
    def first_heads(self) -> "SharedBatch":
        """The first heads, from as many entries as there are; the whole of a small batch."""
        inputs = self.inputs
        entries = min(inputs.q.shape[0], FIRST_HEADS)
        key_heads = max(1, -(-FIRST_HEADS // (entries * inputs.groups)))
        if entries == inputs.q.shape[0] and key_heads >= inputs.k.shape[1]:
            return self
        return self.part(slice(entries), slice(key_heads))

    def part(self, entries: slice, key_heads: slice) -> "SharedBatch":
        """Return some entries of the batch, and of them some key heads with the heads that share them."""
        groups = self.inputs.groups
        heads = slice((key_heads.start or 0) * groups, key_heads.stop * groups)
        ref = Reference(**{name: tensor[entries, heads] for name, tensor in vars(self.ref).items()})
        return SharedBatch(self.inputs.part(entries, heads=heads, key_heads=key_heads), ref)

    def fits(self, o: Tensor, candidates: Mapping[str, Declaration]) -> dict[str, Fit]:
        """Return how each candidate fits an output.

        All candidates are tried on some heads. Those near the best, and those with random bits, which agree with
        nothing to the bit, are tried on all heads; for the others the result on some heads stays.
        """
        work = {name: nameless(self.clipped(declaration)) for name, declaration in candidates.items()}
        some = self.first_heads
        fitting = some._tried(o, work.values())
        if some is not self:
            best = max(fit.bits for fit in fitting.values())
            near = [plan for plan, fit in fitting.items() if fit.bits >= best - _REACH or is_random(plan)]
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
class Settings:
    """Options of the command line that apply to every cell."""

    seed: int = 1
    heads: int = 256  # query heads of one batch; a cell draws up to 8 times as many
    fair: bool = False  # hold external kernels to no bias on failure inputs
    as_rounded: bool = False  # hold them to no more bias than a correctly rounded O has
    rules: bool = False  # ask acceptance rules in public use too
    cell_timeout: float | None = None  # seconds that a cell may take; None: as its experiment and its backend say
    matrix: tuple[str, ...] = ("tests/matrix",)  # how pytest finds the cells from where it was called, for that command


class Settled(msgspec.Struct, frozen=True):
    """The knowledge of a kernel's plan before its cells."""

    rests_on: str  # what that is known from, in words
    followed: str | None = None  # the known plan that it declares, or that explains every designed input
    candidates: tuple[str, ...] = ()  # where it follows none: what normal numbers hold it to
    #: Where it follows one: the backward pass that its gradients come from, and how many of the three have its bits.
    backward: tuple[str, int] | None = None
    wrong: str = ""  # what is wrong with an O that it was asked for and that no cell judges; empty: nothing


@dataclass(frozen=True)
class CaseBench:
    """The inputs and results that the cells of one case in one format share, made when first used."""

    case: Case
    fmt: Format
    settings: Settings
    _batches: dict[int, SharedBatch] = field(default_factory=dict)
    _emulated: dict[tuple[Declaration, int], tuple[AttentionOutput, Errors]] = field(default_factory=dict)
    _measured: dict[int, list[tuple[Sequence[Tensor | None], Any]]] = field(default_factory=dict)  # by bounds

    def has_batch(self, index: int) -> bool:
        """Return whether there is such a batch."""
        return self.case.has_batch(index, self.settings.heads)

    def batch(self, index: int) -> SharedBatch:
        """Return a batch, made once."""
        if index not in self._batches:
            inputs = self.case.make(self.settings.seed, index, self.settings.heads, self.fmt)
            self._batches[index] = SharedBatch(inputs, reference(inputs))
        return self._batches[index]

    def measure(
        self, index: int, output: AttentionOutput, declaration: Declaration, *, emulated: bool = False
    ) -> Errors:
        """Return the errors of an output on a batch."""
        batch, fixed = self.batch(index), self.case.fixed_heads
        delta = output.gradients.delta if output.gradients else None
        o, bound = output.o.float(), batch.bounds.of(declaration)

        def measured() -> Errors:
            errors = replace(
                measure(o, delta, batch.inputs, batch.ref, bound, batch.units, batch.size_units),
                outside_values=batch.outside_values(o, declaration),
            )
            return errors if fixed is None else fixed.measured(errors, o, batch.inputs, batch.ref)

        return self._once(bound, (o, delta), measured, emulated=emulated)

    def gradient_errors(self, gradients: Gradients, declaration: Declaration, *, emulated: bool) -> GradientErrors:
        """Return the errors of gradients on the first batch."""
        batch = self.batch(0)
        bounds, tensors = batch.gradient_bounds.of(declaration), (gradients.dq, gradients.dk, gradients.dv)
        make = partial(batch.gradients.errors, gradients, bounds, batch.inputs.groups)
        return self._once(bounds, (*tensors, gradients.dsink), make, emulated=emulated)

    def _once(
        self, bounds: object, tensors: Sequence[Tensor | None], make: Callable[[], _Made], *, emulated: bool
    ) -> _Made:
        """Return what is made of tensors held to these bounds, or was of emulated ones with the same bits.

        Half of all outputs have the bits of an earlier one. Those of a device are not kept: a kernel may write to them.
        """
        known = self._measured.setdefault(id(bounds), [])  # which the batch keeps alive
        made: _Made
        for others, made in known:
            if all(map(_identical, tensors, others)):
                return made
        made = make()
        if emulated:
            known.append((tensors, made))
        return made

    def emulated(self, index: int, declaration: Declaration) -> tuple[AttentionOutput, Errors]:
        """Return the errors of a declaration's emulation on a batch."""
        batch = self.batch(index)
        declaration = batch.clipped(declaration)  # such declarations share one emulation
        key = (declaration, index)
        if key not in self._emulated:
            # Gradients are measured on the first batch alone.
            kernel = composed(declaration.label, declaration, ALL if index == 0 else DELTA_ALONE)
            emulation = replace(EMULATION, arithmetic=batch.arithmetic)
            output = emulation.run(kernel, batch.inputs, gradients=self.case.gradients)
            self._emulated[key] = (output, self.measure(index, output, declaration, emulated=True))
        return self._emulated[key]


@dataclass
class Workbench:
    """The place where a worker runs its cells: it keeps what those of one case share, until the next case."""

    settings: Settings
    shared: Path | None = None  # a folder of this run that all workers write to; None: this is the only process
    settled: dict[Named, Settled] = field(default_factory=dict)
    asked: dict[Named, Any] = field(default_factory=dict)  # of the resolver: what kernels gave on designed inputs
    _held: CaseBench | None = None

    def case(self, case: Case, fmt: Format) -> CaseBench:
        """Return the bench of a case in a format, which replaces that of the case before."""
        if self._held is None or (self._held.case.name, self._held.fmt.name) != (case.name, fmt.name):
            self._held = CaseBench(case, fmt, self.settings)
        return self._held
