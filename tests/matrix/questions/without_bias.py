"""Two answers that may differ in bits, but not in a bias: compared on ever more heads until it is known.

An element's signed error counts away from zero, in ulps. So the mean of the difference is the difference of both sides'
biases; its samples are heads, paired. Beyond the margin of every other verdict of the suite it is a bias that the
change has made.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, in_units
from tiebreak.cases.measures import Measure
from tiebreak.cases.verdicts import Interval, Verdict, interval, judge
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.attribution import equal_bits
from tiebreak.matrix.questions.answers import OF_QUERIES, WHOLE, Answers, Cut, O, exact, units
from tiebreak.matrix.questions.within_error import WORSE
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer, ChangeRecord, Estimate, Shown
from tiebreak.reports.tables.changes import changes_text, worst

_REMEDY = "raise --heads"
_ROUNDED_ONCE = 1.0 / 12  # mean squared error in ulps^2 of what is rounded once: no sound side is held to less
_DIFFERING, _DIFFERENCE = "differing_bits", "mean_difference"
_ASKED, _DECLARED = "no bias that comes of the change", "the same bits, as the kernel declares"

MEASURES = (
    Measure(
        _DIFFERING,
        "largest share of elements of O or a gradient that have other bits when the call is changed",
        worse="more",
        limit=0.0,
        share=0.1,
        term="batch invariance",
    ),
    Measure(
        _DIFFERENCE,
        "signed mean of O or a gradient of the changed call less that of the plain one, where it is farthest from 0; +"
        " is away from zero",
        unit="ulp",
        worse="farther",
        limit=0.02,
    ),
    Measure("bias_before", "bias of the plain call there", unit="ulp"),
    Measure("bias_after", "bias of the changed call there", unit="ulp"),
    Measure("control_bits", "least share of elements of O that a control changes: 0 of a knob that does nothing"),
)


class Effect(enum.Enum):
    """What a change does to an answer."""

    NONE = enum.auto()  # the same bits
    UNBIASED = enum.auto()  # other bits, without bias
    UNKNOWN = enum.auto()  # other bits, and too few heads to tell
    BIASED = enum.auto()  # other bits, with bias
    HARMFUL = enum.auto()  # larger errors than another way of rounding explains, or NaN and Inf


_EFFECTS = {Verdict.BIASED: Effect.BIASED, Verdict.UNBIASED: Effect.UNBIASED}


@dataclass(frozen=True)
class Errors:
    """One side's errors against the fp64 reference."""

    head_bias: Tensor  # mean signed error in ulps, fp64, (heads,)
    head_square: Tensor  # mean squared error in ulps^2, (heads,)

    @property
    def bias(self) -> Interval:
        """Mean signed error in ulps."""
        return interval(self.head_bias[torch.isfinite(self.head_bias)])

    def and_of(self, others: "Errors") -> "Errors":
        """Return those of more heads too."""
        return Errors(torch.cat([self.head_bias, others.head_bias]), torch.cat([self.head_square, others.head_square]))


@lru_cache(maxsize=4)  # several changes are compared with one answer
def _errors(answer: Tensor, truth: Tensor, unit: Tensor, groups: int) -> Errors:
    error = in_units(answer.double() - truth, unit)
    return Errors(by_key_head(error, groups), by_key_head(error.square(), groups))


@dataclass(frozen=True)
class Comparison:
    """One part of both answers on all heads drawn so far."""

    same: tuple[float, ...]  # share of elements that have the same bits, batch by batch
    before: Errors  # of the plain call
    after: Errors  # of the changed one
    lost: int  # elements that are finite in one answer alone

    def and_of(self, others: "Comparison") -> "Comparison":
        """Return both answers on more heads."""
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
        return _EFFECTS.get(verdict, Effect.UNKNOWN)

    @property
    def record(self) -> ChangeRecord:
        """As a record has it."""
        difference, before, after = (
            Estimate.of(each.mean, each.half_width) for each in (self.difference, self.before.bias, self.after.bias)
        )
        return ChangeRecord(
            self.share,
            difference,
            before,
            after,
            verdict=judge(self.difference).value if self.share else None,
            lost=self.lost,
            growth=self.growth if self.effect is Effect.HARMFUL and not self.lost else None,
        )


@dataclass
class WithoutBias:
    """What came of comparing answers that must not differ in a bias."""

    declared: bool  # whether the kernel says that the change alters no bit
    comparisons: dict[str, Comparison] = field(default_factory=dict)  # by what was changed, and of what
    controls: dict[str, float] = field(default_factory=dict)  # what must change O, and the share of it that it did

    def compare(self, words: str, plain: Answers, other: Answers, inputs: AttentionInputs, cut: Cut = WHOLE) -> None:
        """Take down what one batch of two answers differs in, of the parts that both have.

        Args:
            words: what was changed, and what was put in.
            plain: of the plain call.
            other: of the changed one.
            inputs: of the plain call.
            cut: the part of all that is compared.
        """
        plain, other = cut(plain), cut(other)
        for part in (part for part in plain if part in other):
            truth, unit = (cut({part: x(inputs, part)})[part] for x in (exact, units))
            groups = inputs.groups if part in OF_QUERIES else 1
            before, same = _errors(plain[part], truth, unit, groups), equal_bits(plain[part], other[part])
            after = before if same == 1.0 else _errors(other[part], truth, unit, groups)
            lost = int((torch.isfinite(plain[part]) != torch.isfinite(other[part])).sum())
            compared, name = Comparison((same,), before, after, lost), words if part == O else f"{words}, {part}"
            self.comparisons[name] = self.comparisons[name].and_of(compared) if name in self.comparisons else compared

    def control(self, words: str, before: Tensor, after: Tensor) -> None:
        """Take down whether what must change an answer has; the first batch tells."""
        self.controls.setdefault(words, 1.0 - equal_bits(before, after))

    @property
    def changes(self) -> Mapping[str, ChangeRecord]:
        """As records have them."""
        return {name: each.record for name, each in self.comparisons.items()}

    @property
    def _worst(self) -> Comparison:
        return self.comparisons[worst(self.changes)]

    @property
    def result(self) -> Result:
        """What the cell measures; it shows the farthest mean, or the share, 0, where no bit differs."""
        at = self._worst
        shown = Shown.of(_DIFFERENCE, at.difference.mean, verdict=at.record.verdict, spec="+.3f")
        return Result(
            measures={
                _DIFFERING: max(each.share for each in self.comparisons.values()),
                _DIFFERENCE: at.difference,
                "bias_before": at.before.bias,
                "bias_after": at.after.bias,
                "control_bits": min(self.controls.values()),
            },
            shown=Shown.of(_DIFFERING, 0.0, spec=".0f") if at.effect is Effect.NONE else shown,
            heads=at.heads,
            remedy=_REMEDY,
            evidence={"changes": self.changes, "controls": self.controls},
        )

    @property
    def nothing(self) -> bool:
        """Whether no answers have been compared."""
        return not self.comparisons

    @property
    def _effects(self) -> frozenset[Effect]:
        return frozenset(each.effect for each in self.comparisons.values())

    @property
    def _dead(self) -> list[str]:
        """Controls that changed nothing: the change did nothing."""
        return [control for control, share in self.controls.items() if share == 0.0]

    @property
    def settled(self) -> bool:
        """Whether more heads would tell nothing more."""
        return bool(self._dead) or Effect.UNKNOWN not in self._effects

    @property
    def answer(self) -> Answer | None:
        """Whether all is as it must be; None where other bits have no bias: nobody has said that there are none."""
        asked, differs = _DECLARED if self.declared else _ASKED, self._effects != {Effect.NONE}
        if self._effects & {Effect.BIASED, Effect.HARMFUL} or (self.declared and differs):
            return Answer(False, asked, changes_text(self.changes))
        if self._dead:
            return Answer(None, asked, f"the knob did nothing: no bit changed by {', '.join(self._dead)}")
        if Effect.UNKNOWN in self._effects:
            why = f"{self._worst.heads} heads do not settle it: {changes_text(self.changes)}; {_REMEDY}"
            return Answer(None, asked, why)
        return None if differs else Answer(True, asked)
