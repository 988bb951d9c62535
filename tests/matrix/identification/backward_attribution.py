"""Which known backward pass a kernel's gradients come from, and how their errors compare with those of that pass."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head
from tiebreak.cases.slips import gradient_slips
from tiebreak.cases.verdicts import GAIN, LIMIT, WAYS, WORSE, interval
from tiebreak.kernels.backward_passes import BackwardPass, passes_after
from tiebreak.kernels.inputs import GRADIENT_NAMES, AttentionOutput, Gradients
from tiebreak.kernels.kernel import Declaration, run_backward
from tiebreak.kernels.plans import DeltaSource
from tiebreak.matrix.resolver import BackwardPasses
from tiebreak.matrix.sample import HeadErrors, Sample
from tiebreak.matrix.workbench import SharedBatch, equal_bits
from tiebreak.reports.records.record import FOLLOWED_BACKWARD

#: Gradients that must have the bits of a backward pass for the kernel to be held to it: a dV that has them says nothing
#: of dS, from which the other two come.
_SHOWN = 2
#: A kernel shows what it computes delta from if dQ and dK lie so much nearer to what follows from it: squares of
#: distances. On normal numbers FlashAttention-2's are at 0.03 to 0.05 of the other distance, autograd's in fp32 too;
#: with P and dP in 16 bits, or delta from O-bar in 16 bits, both are about as far: 0.7 to 1.6.
_NEARER = 1 / 4
_EXACT = BackwardPass({"delta_from": DeltaSource.PROBABILITIES})
_SHOWN_BY = {DeltaSource.OUTPUT: BackwardPass({}), DeltaSource.PROBABILITIES: _EXACT}
_LOOSEST = "the loosest known backward pass"
Parts = Mapping[str, Tensor]  # dQ, dK and dV


@dataclass(frozen=True)
class BackwardHeldTo(BackwardPasses):
    """The known backward passes that gradients are held to, with the plan of O."""

    forward: Declaration  # the plan that O is held to
    passes: Mapping[str, str]  # the names of those that dQ, dK and dV are held to
    like: BackwardPass  # the one whose gradients, without a rounding, errors are measured from
    alike: Sequence[str]  # the names of all that compute delta as the kernel does

    def added_to(self, sample: Sample, gradients: Gradients, o: Tensor, batch: SharedBatch) -> Sample:
        """Return the sample with the errors of a batch's gradients, and of the passes that they are held to."""
        emulation, heads = _Emulation(batch, self.forward, o), sample.backward_heads
        made = {each: emulation.after(each) for each in set(self.passes.values())}
        theirs = {name: made[each][name] for name, each in self.passes.items()}
        errors = _errors(emulation.parts(gradients), theirs, emulation.exact(self.like), batch.inputs.groups)
        joined = errors if heads is None else {name: mine.joined(errors[name]) for name, mine in heads.items()}
        worst = max(self._worst(errors, gradients, o, batch), sample.worst_gradient or 0.0)
        return replace(sample, backward_heads=joined, worst_gradient=worst)

    def _worst(self, errors: Mapping[str, HeadErrors], gradients: Gradients, o: Tensor, batch: SharedBatch) -> float:
        """Return the largest ratio, over heads, of the mean squared error to that of the pass that errs most there.

        The error of one pass in one head is a single draw, and may be near 0. So a head in which the kernel errs
        `WORSE` times as much is compared with all passes that compute delta alike.
        """
        ratios = torch.stack([each.square / each.their_square / self._ways(name) for name, each in errors.items()])
        ratios = ratios.nan_to_num(nan=0.0, posinf=0.0).amax(0)  # NaN and Inf are told elsewhere
        largest = 0.0
        for head in ratios.argsort(descending=True).tolist():
            if largest > WORSE:
                break
            if ratios[head] <= WORSE:
                return max(largest, ratios[head].item())
            entry, key_head = divmod(head, batch.inputs.k.shape[1])
            largest = max(largest, self._ratio_in_head(entry, key_head, gradients, o, batch))
        return largest

    def _ratio_in_head(self, entry: int, head: int, gradients: Gradients, o: Tensor, batch: SharedBatch) -> float:
        """Return the largest of three ratios in one key head: over the largest mean squared error of any pass."""
        entries, keys, groups = slice(entry, entry + 1), slice(head, head + 1), batch.inputs.groups
        query_heads = entries, slice(head * groups, keys.stop * groups)
        alone = Gradients(gradients.dq[query_heads], gradients.dk[entries, keys], gradients.dv[entries, keys])
        emulation = _Emulation(batch.part(entries, keys), self.forward, o[query_heads])
        ours, exact = emulation.parts(alone), emulation.exact(self.like)
        tried = [_errors(ours, emulation.after(each), exact, groups) for each in self.alike]
        largest = {name: max(errors[name].their_square.item() for errors in tried) for name in GRADIENT_NAMES}
        squares = {name: tried[0][name].square.item() / self._ways(name) for name in GRADIENT_NAMES}
        return max(squares[name] / largest[name] for name in GRADIENT_NAMES if largest[name])

    def _ways(self, name: str) -> float:
        """Return how much more another sound pass may err: where none is followed, except in dV, which has no delta."""
        return WAYS if self.name == _LOOSEST and name != "dv" else 1.0


def backward_held_to(
    gradients: Gradients, o: Tensor, forward: Declaration, batch: SharedBatch, shown: tuple[str, int] | None
) -> BackwardHeldTo:
    """Return the known backward pass that gradients are compared with: the one they come from, or the nearest.

    Each pass is emulated from the kernel's own O, so that the forward pass does not matter. A pass that the kernel
    follows on normal numbers is tried first, and alone if it has as many of the gradients' bits here. The forward plan,
    whose S the backward pass recomputes, is the one that O is compared with.
    """
    passes = passes_after(forward, batch.inputs.groups)
    few = _Emulation(batch.first_heads, forward, o)
    ours = few.parts(gradients)
    name, agreeing = shown if shown is not None and shown[0] in passes else ("", 0)
    slips: Mapping[str, float] = {}
    tried = {name: few.compared(ours, passes[name])} if agreeing >= _SHOWN else {}
    source = few.shown_source(ours)
    if name in tried and tried[name].agreeing >= agreeing and tried[name].is_as_loose:
        held_to: Mapping[str, str] = dict.fromkeys(GRADIENT_NAMES, name)
        like = passes[name]
    else:
        tried = {name: few.compared(ours, each) for name, each in passes.items()}
        name, held_to, like = _chosen(passes, tried, source, forward)
        slips = _slips(ours, batch.first_heads, tried)
    alike = [each for each in passes if source is None or passes[each].shows(source) or each in held_to.values()]
    return BackwardHeldTo(
        name=name,
        bits={name: each.bits for name, each in tried.items()},
        forward=forward,
        passes=held_to,
        like=like,
        alike=alike,
        slips=slips,
    )


def backward_pass_of(gradients: Gradients, o: Tensor, forward: Declaration, batch: SharedBatch) -> tuple[str, int]:
    """Return the backward pass that gradients come from, and how many of the three have its bits."""
    emulation, passes = _Emulation(batch, forward, o), passes_after(forward, batch.inputs.groups)
    ours = emulation.parts(gradients)
    tried = {name: emulation.compared(ours, each) for name, each in passes.items()}
    best = max(passes, key=lambda name: tried[name].nearness(passes[name], forward))
    return best, tried[best].agreeing


@dataclass(frozen=True)
class _Comparison:
    """A comparison of gradients with those of one backward pass."""

    bits: Mapping[str, float]  # share of equal bits of dQ, dK and dV
    size: float  # of its mean squared errors as a share of the kernel's, the least of the three
    strays: Mapping[str, float]  # its mean squared errors, that of delta among them

    def nearness(self, backward: BackwardPass, forward: Declaration) -> tuple[int, bool, float]:
        """Return a key for sorting: gradients with its bits, whether it fits the forward pass, then its errors.

        Bits alone would mislead: if no pass is the kernel's, the one that rounds least has most bits.
        """
        return self.agreeing, self.agreeing > 0 and backward.source is forward.plan.delta_from, self.size

    @property
    def agreeing(self) -> int:
        return sum(share >= FOLLOWED_BACKWARD for share in self.bits.values())

    @property
    def is_as_loose(self) -> bool:
        """True if the backward pass errs as much as the kernel in all three gradients, up to a tolerance."""
        return self.size >= 1 / LIMIT


def _chosen(
    by_name: Mapping[str, BackwardPass],
    tried: Mapping[str, _Comparison],
    source: DeltaSource | None,
    forward: Declaration,
) -> tuple[str, Mapping[str, str], BackwardPass]:
    """Return the pass that has the bits of two gradients, else the nearest of flash attention's, else the loosest.

    Only flash attention's passes are all known: autograd has as many as there are ways to write attention. If the
    chosen pass errs less than the kernel, it is replaced by one that errs as much in all three gradients: the first of
    those that compute delta alike, FlashAttention-2's, or one that has the bits of a gradient (dS in fp16 has two of
    fp32's gradients). Returned are the name for reports, the passes for dQ, dK and dV, and the pass whose gradients
    without rounding are the reference of errors.
    """

    def nearest(names: Iterable[str]) -> str:
        return max(names, key=lambda name: tried[name].nearness(by_name[name], forward))  # the first of equals

    alike = [name for name, each in by_name.items() if source is None or each.shows(source)]
    name = nearest(by_name)
    if tried[name].agreeing < _SHOWN and source is DeltaSource.OUTPUT:
        name = nearest(alike)
    elif tried[name].agreeing < _SHOWN:
        passes = {each: max(alike, key=lambda name: tried[name].strays[each]) for each in GRADIENT_NAMES}
        return _LOOSEST, passes, _EXACT
    if not tried[name].is_as_loose:
        looser = (each for each in alike if tried[each].is_as_loose and (tried[each].agreeing or each == alike[0]))
        name = min(looser, key=lambda each: tried[each].size, default=name)
    return name, dict.fromkeys(GRADIENT_NAMES, name), by_name[name]


def _slips(ours: Parts, batch: SharedBatch, tried: Mapping[str, _Comparison]) -> dict[str, float]:
    """Return the usual mistakes that explain wrong gradients: the remaining error is as small as a sound pass's.

    An error is sound if, relative to a gradient's size, it is at most `WORSE` times that of the loosest known pass,
    with a gain error of at most `GAIN`.
    """
    exact = dict(zip(GRADIENT_NAMES, batch.gradients.gradients, strict=True))
    loosest = {name: max(each.strays[name] for each in tried.values()) for name in GRADIENT_NAMES}

    def sound(name: str, like: Tensor) -> bool:
        sharing, error = batch.inputs.groups if name == "dq" else 1, ours[name] - like
        gain = by_key_head(error * like, sharing) / by_key_head(like.square(), sharing)
        largest = WORSE * loosest[name] * like.square().mean() / exact[name].square().mean()
        return bool(error.square().mean() <= largest) and not interval(gain).is_beyond(GAIN)

    wrong = [name for name in GRADIENT_NAMES if not sound(name, exact[name])]
    named: dict[str, list[str]] = {}
    explained: dict[str, float] = {}
    for slip in gradient_slips(batch.inputs, batch.ref) if wrong else ():
        made = dict(zip(GRADIENT_NAMES, slip.gradients, strict=True))
        if names := [name for name in wrong if sound(name, made[name])]:
            left = [(ours[name] - made[name]).norm() / (ours[name] - exact[name]).norm() for name in names]
            about = f"{slip.about} in {', '.join(f'd{name[1].upper()}' for name in names)}"
            named[about], explained[about] = names, 1.0 - max(left).square().item()
    most = max(map(len, named.values()), default=0)
    return {about: share for about, share in explained.items() if len(named[about]) == most}


class _Emulation:
    """The backward passes that start from a kernel's O and the log-sum-exp of the plan it is held to."""

    def __init__(self, batch: SharedBatch, forward: Declaration, o: Tensor) -> None:
        entries, heads = batch.inputs.q.shape[:2]
        self._batch, self._forward = batch, forward
        self._output = AttentionOutput(o[:entries, :heads].float(), batch.output(forward).lse)
        self._exact: dict[Declaration, Parts] = {}

    def after(self, name: str) -> Parts:
        """Return the gradients of a known backward pass."""
        return self.gradients(passes_after(self._forward, self._batch.inputs.groups)[name].after(self._forward))

    def gradients(self, declaration: Declaration) -> Parts:
        batch = self._batch
        gradients = run_backward(batch.clipped(declaration), batch.inputs, self._output, batch.arithmetic)
        return self.parts(gradients)

    def parts(self, gradients: Gradients) -> Parts:
        """Return dQ, dK and dV of the heads that the batch has, in fp32."""
        inputs = self._batch.inputs
        tensors = zip(GRADIENT_NAMES, (inputs.q, inputs.k, inputs.v), strict=True)
        return {name: getattr(gradients, name)[: like.shape[0], : like.shape[1]].float() for name, like in tensors}

    def exact(self, like: BackwardPass) -> Parts:
        """Return the gradients without a rounding, from which errors are measured."""
        declaration = like.exact_after(self._forward)
        if declaration not in self._exact:
            self._exact[declaration] = self.gradients(declaration)
        return self._exact[declaration]

    def shown_source(self, ours: Parts) -> DeltaSource | None:
        """Return the source of a kernel's delta, O or the exact product; None: neither, or unknown."""
        distances = {}
        for source, like in _SHOWN_BY.items():
            exact = self.exact(like)
            errors = {name: (ours[name] - exact[name]).square().nanmean() for name in ("dq", "dk")}
            distances[source] = sum((error / exact[name].square().nanmean()).item() for name, error in errors.items())
        near, far = sorted(distances, key=distances.__getitem__)
        return near if distances[near] < _NEARER * distances[far] else None

    def compared(self, ours: Parts, backward: BackwardPass) -> _Comparison:
        theirs, exact = self.gradients(backward.after(self._forward)), self.exact(_EXACT)
        errors = _errors(ours, theirs, self.exact(backward), self._batch.inputs.groups)
        sizes = [error.their_square.nanmean().item() / error.square.nanmean().item() for error in errors.values()]
        bits = {name: equal_bits(ours[name], theirs[name]) for name in GRADIENT_NAMES}
        strays = {name: (theirs[name] - exact[name]).square().nanmean().item() for name in GRADIENT_NAMES}
        return _Comparison(bits, min(sizes), strays)


def _errors(ours: Parts, theirs: Parts, exact: Parts, groups: int) -> dict[str, HeadErrors]:
    """Return the errors by key head of the kernel and of a backward pass."""

    def mean(x: Tensor, y: Tensor, sharing: int) -> Tensor:
        # fp32 has enough digits for errors of normal numbers; in fp64 a tensor as large as K takes three times as
        # long.
        return (x * y).reshape(x.shape[0] * x.shape[1] // sharing, -1).mean(1).double()

    errors = {}
    for name in GRADIENT_NAMES:
        sharing = groups if name == "dq" else 1  # K and V have key heads alone
        size = mean(exact[name], exact[name], sharing)
        off = [x[name] - exact[name] for x in (ours, theirs)]
        squares = [mean(x, x, sharing) / size for x in off]
        errors[name] = HeadErrors(*squares, *(mean(x, exact[name], sharing) / size for x in off))
    return errors
