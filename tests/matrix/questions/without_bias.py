"""Two answers that may differ in bits, but not in a bias: compared on ever more heads until it is known.

An element's signed error counts away from zero, in ulps. So the mean of the difference is the difference of both sides'
biases; its samples are heads, paired. Beyond the margin of every other verdict of the suite it is a bias that the
change has made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, in_units
from tiebreak.cases.measures import Measure
from tiebreak.cases.verdicts import Interval, Verdict, interval, judge
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.questions.answers import OF_QUERIES, Cut, O, exact, units
from tiebreak.matrix.questions.comparison import Comparison
from tiebreak.matrix.questions.within_error import WORSE
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import BIASED, UNBIASED, Answer, ChangeRecord, Estimate, Shown
from tiebreak.reports.tables.texts import changes_text, worst

KIND = "invariance"  # of experiment, and the name of its check
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


@lru_cache(maxsize=4)  # several changes are compared with one answer
def _errors(answer: Tensor, truth: Tensor, unit: Tensor, groups: int) -> Tensor:
    """Return mean signed errors in ulps and mean squared ones, fp64, (2, heads)."""
    error = in_units(answer.double() - truth, unit)
    return torch.stack([by_key_head(error, groups), by_key_head(error.square(), groups)])


def _mean(of_heads: Tensor) -> Interval:
    return interval(of_heads[torch.isfinite(of_heads)])


@dataclass(frozen=True)
class PairedErrors:
    """One part of both answers on all heads drawn so far."""

    same: tuple[float, ...]  # share of elements that have the same bits, batch by batch
    lost: int  # elements that are finite in one answer alone
    before: Tensor  # errors of the plain call, (2, heads)
    after: Tensor  # of the changed one

    def and_of(self, others: "PairedErrors") -> "PairedErrors":
        """Return both answers on more heads."""
        sides = torch.cat([self.before, others.before], 1), torch.cat([self.after, others.after], 1)
        return PairedErrors((*self.same, *others.same), self.lost + others.lost, *sides)

    @property
    def difference(self) -> Interval:
        """Signed mean of the changed answer less the plain one, in ulps; + is away from zero."""
        return _mean(self.after[0] - self.before[0])

    @property
    def biases(self) -> tuple[Interval, Interval]:
        """Mean signed error in ulps of the plain answer and of the changed one."""
        return _mean(self.before[0]), _mean(self.after[0])

    @property
    def record(self) -> ChangeRecord:
        """As a record has it."""
        share, verdict = 1.0 - sum(self.same) / len(self.same), judge(self.difference)
        squares = [side[1].nanmean().item() for side in (self.before, self.after)]
        growth = max(squares) / max(min(squares), _ROUNDED_ONCE)
        grown = share > 0.0 and not self.lost and growth > WORSE and verdict is not Verdict.BIASED
        difference, before, after = (
            Estimate.of(each.mean, each.half_width) for each in (self.difference, *self.biases)
        )
        return ChangeRecord(
            share,
            difference,
            before,
            after,
            verdict=verdict.value if share else None,
            lost=self.lost,
            growth=growth if grown else None,
        )


@dataclass(kw_only=True)
class WithoutBias(Comparison):
    """Answers that must not differ in a bias."""

    declared: bool = False  # whether the kernel says that the change alters no bit
    errors: dict[str, PairedErrors] = field(default_factory=dict)  # by what was changed, and of what

    def take(
        self, words: str, part: str, plain: Tensor, other: Tensor, inputs: AttentionInputs, cut: Cut, to_the_bit: bool
    ) -> None:
        del to_the_bit  # other bits are what is looked at here
        truth, unit = (cut({part: x(inputs, part)})[part] for x in (exact, units))
        groups = inputs.groups if part in OF_QUERIES else 1
        before, same = _errors(plain, truth, unit, groups), equal_bits(plain, other)
        after = before if same == 1.0 else _errors(other, truth, unit, groups)
        lost = int((torch.isfinite(plain) != torch.isfinite(other)).sum())
        paired, name = PairedErrors((same,), lost, before, after), words if part == O else f"{words}, {part}"
        self.errors[name] = self.errors[name].and_of(paired) if name in self.errors else paired

    @property
    def changes(self) -> Mapping[str, ChangeRecord]:
        """As records have them."""
        return {name: each.record for name, each in self.errors.items()}

    @property
    def _dead(self) -> list[str]:
        """Controls that changed nothing: the change did nothing."""
        return [control for control, share in self.controls.items() if share == 0.0]

    @property
    def settled(self) -> bool:
        return bool(self._dead) or not any(map(_unknown, self.changes.values()))

    @property
    def result(self) -> Result:
        # Tables show the farthest mean, or the share, 0, where no bit differs.
        changes = self.changes
        name = worst(changes)
        at, change = self.errors[name], changes[name]
        shown = Shown.of(_DIFFERENCE, at.difference.mean, verdict=change.verdict, spec="+.3f")
        before, after = at.biases
        heads = at.before.shape[1]
        answer = self._answer(changes, heads)
        return Result(
            measures={
                _DIFFERING: max(each.bits for each in changes.values()),
                _DIFFERENCE: at.difference,
                "bias_before": before,
                "bias_after": after,
                "control_bits": min(self.controls.values()),
            },
            shown=shown if change.bits else Shown.of(_DIFFERING, 0.0, spec=".0f"),
            agreement={} if answer is None else {KIND: answer},
            heads=heads,
            evidence={"changes": changes, "controls": self.controls},
        )

    def _answer(self, changes: Mapping[str, ChangeRecord], heads: int) -> Answer | None:
        """Return whether all is as it must be; None where other bits have no bias: nobody has said there are none."""
        asked, differs = _DECLARED if self.declared else _ASKED, any(each.bits for each in changes.values())
        if any(map(_wrong, changes.values())) or (self.declared and differs):
            return Answer(False, asked, changes_text(changes))
        if self._dead:
            return Answer(None, asked, f"the knob did nothing: no bit changed by {', '.join(self._dead)}")
        if not self.settled:
            return Answer(None, asked, f"{heads} heads do not settle it: {changes_text(changes)}; raise --heads")
        return None if differs else Answer(True, asked)


def _wrong(change: ChangeRecord) -> bool:
    """Tell a bias, larger errors than another way of rounding explains, NaN and Inf."""
    return change.verdict == BIASED or change.lost > 0 or change.growth is not None


def _unknown(change: ChangeRecord) -> bool:
    """Tell other bits of which too few heads say whether they have a bias."""
    return change.verdict not in (None, UNBIASED) and not _wrong(change)
