"""What two answers to one question differ in: the share of other bits, and the signed mean of the difference.

An element's signed error counts away from zero, in ulps of the reference; of a gradient, whose elements cancel, in ulps
of the sum of its terms without their signs. So the mean of the difference is the
difference of both sides' biases; its samples are heads, paired. Beyond the margin of every other verdict of the suite
it is a bias that the change has made.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, signed_error_ulps
from tiebreak.cases.gradients import row_units
from tiebreak.cases.verdicts import Interval, Verdict, interval, judge
from tiebreak.kernels.inputs import AttentionInputs, sum_groups
from tiebreak.kernels.reference import reference, reference_gradients
from tiebreak.matrix.attribution import equal_bits
from tiebreak.matrix.usage.relations import WORSE
from tiebreak.reports.records.record import ChangeRecord, Estimate

O, DQ = "O", "dQ"
GRADIENTS = (DQ, "dK", "dV")
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
            error = signed_error_ulps(answer, _exact(inputs)[part], fmt)
        else:
            exact, units = _exact(inputs)[part], row_units(_terms(inputs)[part][..., None], fmt)[..., 0]
            error = torch.sign(exact) * (answer.double() - exact) / units
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
        plain, changed = (Errors.of(answer, inputs, part) for answer in (before, after))
        lost = int((torch.isfinite(before) != torch.isfinite(after)).sum())
        return cls((equal_bits(before, after),), plain, changed, lost)

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


@lru_cache(maxsize=32)  # several changes are compared with one answer, and cells of one knob share what is put in
def _exact(inputs: AttentionInputs) -> Mapping[str, Tensor]:
    ref = reference(inputs)
    return dict(zip((O, *GRADIENTS), (ref.o, *reference_gradients(inputs, ref)), strict=True))


@lru_cache(maxsize=32)
def _terms(inputs: AttentionInputs) -> Mapping[str, Tensor]:
    """What dQ, dK and dV are sums of, added up without signs: dP and delta apart, since they cancel too."""
    ref = reference(inputs)
    k, v, do = inputs.expanded_k().double(), inputs.expanded_v().double(), inputs.do.double()
    ds = inputs.scale * ref.p * ((do @ v.transpose(-1, -2)).abs() + ref.delta.abs())
    of_keys = ds.transpose(-1, -2) @ inputs.q.double().abs(), ref.p.transpose(-1, -2) @ do.abs()
    return dict(zip(GRADIENTS, (ds @ k.abs(), *(sum_groups(x, inputs.groups) for x in of_keys)), strict=True))


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
