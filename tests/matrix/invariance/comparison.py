"""What two answers to one question differ in: the share of other bits, and the signed mean of the difference.

An element's signed error counts away from zero, in ulps of the reference; of a gradient, whose elements cancel, in ulps
of the sum of its terms without their signs. So the mean of the difference is the
difference of both sides' biases; its samples are heads, paired. Beyond the margin of every other verdict of the suite
it is a bias that the change has made.
"""

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, signed_error_ulps
from tiebreak.cases.gradients import row_units
from tiebreak.cases.verdicts import Interval, Verdict, interval, judge
from tiebreak.kernels.inputs import AttentionInputs, sum_groups
from tiebreak.kernels.reference import Reference, reference, reference_gradients
from tiebreak.matrix.attribution import equal_bits
from tiebreak.matrix.sharing import place
from tiebreak.matrix.usage.relations import WORSE
from tiebreak.reports.records.record import ChangeRecord, Estimate

O, DQ = "O", "dQ"
GRADIENTS = (DQ, "dK", "dV")
PARTS = (O, *GRADIENTS)  # of an answer
_KEPT = 2**26  # elements of exact answers that are kept, at most: half a GB
_ROUNDED_ONCE = 1.0 / 12  # mean squared error in ulps^2 of what is rounded once: no sound side is held to less


class Effect(enum.Enum):
    """What a change does to an answer."""

    NONE = enum.auto()  # the same bits
    UNBIASED = enum.auto()  # other bits, without bias
    UNKNOWN = enum.auto()  # other bits, and too few heads to tell
    BIASED = enum.auto()  # other bits, with bias
    HARMFUL = enum.auto()  # larger errors than another way of rounding explains, or NaN and Inf


@dataclass(frozen=True)
class Errors:
    """One side's errors against the fp64 reference."""

    head_bias: Tensor  # mean signed error in ulps, fp64, (heads,)
    head_square: Tensor  # mean squared error in ulps^2, (heads,)

    @classmethod
    def of(cls, answer: Tensor, inputs: AttentionInputs, part: str) -> "Errors":
        """Those of O, or of a gradient by its name, (batch, heads, rows, d)."""
        fmt, groups = inputs.formats.output, inputs.groups if part in (O, DQ) else 1
        if part == O:
            error = signed_error_ulps(answer, _exact(inputs, O)[0], fmt)
        else:
            exact, units = _exact(inputs, part)
            error = answer.to(torch.float64, copy=True).sub_(exact).div_(units)
        return cls(*(by_key_head(each, groups) for each in (error, error.square())))

    @property
    def bias(self) -> Interval:
        """Mean signed error in ulps."""
        return interval(self.head_bias[torch.isfinite(self.head_bias)])

    def and_of(self, others: "Errors") -> "Errors":
        """Those of more heads too."""
        return Errors(torch.cat([self.head_bias, others.head_bias]), torch.cat([self.head_square, others.head_square]))


@dataclass(frozen=True)
class Comparison:
    """Both answers on all heads drawn so far."""

    same: tuple[float, ...]  # share of elements that have the same bits, batch by batch
    before: Errors  # of the plain call
    after: Errors  # of the changed one
    lost: int  # elements that are finite in one answer alone

    @classmethod
    def of(cls, before: Tensor, after: Tensor, inputs: AttentionInputs, part: str) -> "Comparison":
        """One batch.

        Args:
            before: O of the plain call or one of its gradients, (batch, heads, rows, d) in fp32 on the host.
            after: of the changed one, the same rows.
            inputs: whose exact answer is that of both.
            part: which of an answer's parts it is.
        """
        same, plain = equal_bits(before, after), _errors(before, inputs, part)
        lost = int((torch.isfinite(before) != torch.isfinite(after)).sum())
        return cls((same,), plain, plain if same == 1.0 else Errors.of(after, inputs, part), lost)

    def and_of(self, others: "Comparison") -> "Comparison":
        """Both answers on more heads."""
        sides = self.before.and_of(others.before), self.after.and_of(others.after)
        return Comparison((*self.same, *others.same), *sides, lost=self.lost + others.lost)

    @property
    def heads(self) -> int:
        """Drawn so far."""
        return len(self.before.head_bias)

    @property
    def share(self) -> float:
        """Of elements with other bits."""
        return 1.0 - sum(self.same) / len(self.same)

    @property
    def difference(self) -> Interval:
        """Signed mean of the changed answer less the plain one, in ulps; + is away from zero."""
        apart = self.after.head_bias - self.before.head_bias
        return interval(apart[torch.isfinite(apart)])

    @property
    def growth(self) -> float:
        """Mean squared error of the worse side over that of the other."""
        squares = [side.head_square.nanmean().item() for side in (self.before, self.after)]
        return max(squares) / max(min(squares), _ROUNDED_ONCE)

    @property
    def effect(self) -> Effect:
        """What the change does, as far as the data tell."""
        if self.share == 0.0:
            return Effect.NONE
        verdict = judge(self.difference)
        if self.lost or (self.growth > WORSE and verdict is not Verdict.BIASED):
            return Effect.HARMFUL
        known = {Verdict.BIASED: Effect.BIASED, Verdict.UNBIASED: Effect.UNBIASED}
        return known.get(verdict, Effect.UNKNOWN)

    @property
    def record(self) -> ChangeRecord:
        """As a record has it."""
        difference, before, after = (
            Estimate.of(each.mean, each.half_width) for each in (self.difference, self.before.bias, self.after.bias)
        )
        harmful = self.effect is Effect.HARMFUL
        return ChangeRecord(
            self.share,
            difference,
            before,
            after,
            verdict=judge(self.difference).value if self.share else None,
            lost=self.lost,
            growth=self.growth if harmful and not self.lost else None,
        )


@lru_cache(maxsize=4)  # several changes are compared with one answer
def _errors(answer: Tensor, inputs: AttentionInputs, part: str) -> Errors:
    return Errors.of(answer, inputs, part)


@lru_cache(maxsize=2)  # parts of one answer, one after the other
def _reference(inputs: AttentionInputs) -> Reference:
    return reference(inputs)


@lru_cache(maxsize=2)
def _gradients(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    return reference_gradients(inputs, _reference(inputs))


_shared: dict[Hashable, tuple[AttentionInputs, tuple[Tensor, ...]]] = {}


def _exact(inputs: AttentionInputs, part: str) -> tuple[Tensor, ...]:
    """The exact O, or a gradient and its units, computed once for all kernels of a knob.

    Calls are known by where their tensors lie: each kernel cuts its own views of what all are given.
    """
    key = part, *(place(x) if isinstance(x, Tensor) else x for x in vars(inputs).values())
    if key not in _shared:
        made = (_reference(inputs).o,) if part == O else _exact_gradient(inputs, part)
        _shared[key] = inputs, made
        while len(_shared) > 1 and sum(x.numel() for _, kept in _shared.values() for x in kept) > _KEPT:
            del _shared[next(iter(_shared))]
    return _shared[key][1]


def _exact_gradient(inputs: AttentionInputs, part: str) -> tuple[Tensor, Tensor]:
    """dQ, dK or dV, and the ulps of its elements; less than 0 where it is, so that + is away from zero.

    They are those of what it is the sum of, added up without signs: dP and delta apart, since they cancel too.
    """
    ref, do = _reference(inputs), inputs.do.double()
    if part == "dV":
        terms = sum_groups(ref.p.transpose(-1, -2) @ do.abs(), inputs.groups)
    else:
        k, v = inputs.expanded_k().double(), inputs.expanded_v().double()
        ds = inputs.scale * ref.p * ((do @ v.transpose(-1, -2)).abs() + ref.delta.abs())
        of_rows = ds @ k.abs() if part == DQ else ds.transpose(-1, -2) @ inputs.q.double().abs()
        terms = of_rows if part == DQ else sum_groups(of_rows, inputs.groups)
    exact = _gradients(inputs)[GRADIENTS.index(part)]
    units = row_units(terms[..., None], inputs.formats.output)[..., 0]
    return exact, units.copysign(exact).masked_fill_(exact == 0, torch.inf)


@dataclass(frozen=True)
class Invariance:
    """What a knob does to a kernel."""

    comparisons: Mapping[str, Comparison]  # by what was changed and what was put in
    controls: Mapping[str, float]  # what must change O, and the share of its elements that it did
    declared: bool = False  # whether the kernel says that the knob changes no bit

    @property
    def effects(self) -> frozenset[Effect]:
        """All that there are."""
        return frozenset(each.effect for each in self.comparisons.values())

    @property
    def changes(self) -> Mapping[str, ChangeRecord]:
        """As records have them."""
        return {name: each.record for name, each in self.comparisons.items()}

    @property
    def dead(self) -> list[str]:
        """Controls that changed nothing: the knob did nothing."""
        return [control for control, share in self.controls.items() if share == 0.0]

    @property
    def settled(self) -> bool:
        """Whether more heads would tell nothing more."""
        return bool(self.dead) or Effect.UNKNOWN not in self.effects
