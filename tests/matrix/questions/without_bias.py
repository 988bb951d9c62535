"""Two answers that may differ in bits, but not in a bias: compared on ever more heads until it is known.

An element's signed error counts away from zero, in ulps. So the mean of the difference is the difference of both sides'
biases; its samples are heads, paired. Beyond the margin of every other verdict of the suite it is a bias that the
change has made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, in_units
from tiebreak.cases.measures import Measure
from tiebreak.cases.verdicts import Interval, Verdict, interval, judge
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.questions.answers import OF_QUERIES, WHOLE, Answers, Cut, O, exact, units
from tiebreak.matrix.questions.within_error import WORSE
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import BIASED, UNBIASED, Answer, ChangeRecord, Estimate, Shown
from tiebreak.reports.tables.changes import changes_text, worst

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


@dataclass
class PairedErrors:
    """One part of both answers on all heads drawn so far."""

    same: list[float] = field(default_factory=list)  # share of elements that have the same bits, batch by batch
    lost: int = 0  # elements that are finite in one answer alone
    #: Batch by batch, of the plain answer and of the changed one: mean signed errors in ulps and mean squared ones,
    #: fp64, (2, 2, heads).
    errors: list[Tensor] = field(default_factory=list)

    def intervals(self) -> tuple[Interval, Interval, Interval]:
        """Return the mean difference of the changed answer and the plain one, then the biases of both, plain first."""
        before, after = torch.cat(self.errors, -1)[:, 0]
        means = after - before, before, after
        difference, plain, changed = (interval(each[torch.isfinite(each)]) for each in means)
        return difference, plain, changed

    def record(self) -> ChangeRecord:
        """Return it as a record has it."""
        share, intervals = 1.0 - sum(self.same) / len(self.same), self.intervals()
        verdict = judge(intervals[0])
        squares = torch.cat(self.errors, -1)[:, 1].nanmean(-1).tolist()
        growth = max(squares) / max(min(squares), _ROUNDED_ONCE)
        grown = share > 0.0 and not self.lost and growth > WORSE and verdict is not Verdict.BIASED
        return ChangeRecord(
            share,
            *(Estimate.of(each.mean, each.half_width) for each in intervals),
            verdict=verdict.value if share else None,
            lost=self.lost,
            growth=growth if grown else None,
        )


@dataclass
class WithoutBias:
    """What came of the calls of a cell whose answers must not differ in a bias."""

    declared: bool = False  # whether the kernel says that the change alters no bit
    errors: dict[str, PairedErrors] = field(default_factory=dict)  # by what was changed, and of what
    controls: dict[str, float] = field(default_factory=dict)  # what must change O, and the share of it that it did

    def compare(self, words: str, plain: Answers, other: Answers, inputs: AttentionInputs, cut: Cut = WHOLE) -> None:
        """Take down the errors of two answers, in the parts that both have.

        Args:
            words: what was changed, and what was put in.
            plain: of the call that must be agreed with.
            other: of the changed call.
            inputs: of the plain call.
            cut: the part of all that is compared.
        """
        for part, ours, theirs in cut.pairs(plain, other):
            truth, unit = (cut.of(part, of(inputs, part)) for of in (exact, units))
            errors = [in_units(answer.double() - truth, unit) for answer in (ours, theirs)]
            groups = inputs.groups if part in OF_QUERIES else 1
            found = self.errors.setdefault(words if part == O else f"{words}, {part}", PairedErrors())
            found.same.append(equal_bits(ours, theirs))
            found.lost += int((torch.isfinite(ours) != torch.isfinite(theirs)).sum())
            sides = [torch.stack([by_key_head(each, groups), by_key_head(each.square(), groups)]) for each in errors]
            found.errors.append(torch.stack(sides))

    def control(self, words: str, before: Tensor, after: Tensor) -> None:
        """Take down whether what must change an answer has; the first batch tells."""
        self.controls.setdefault(words, 1.0 - equal_bits(before, after))

    @property
    def nothing(self) -> bool:
        """Whether no answers have been compared."""
        return not self.errors

    @property
    def settled(self) -> bool:
        """Whether more heads would tell nothing more."""
        return bool(self._dead) or all(
            each.verdict in (None, UNBIASED) or _wrong(each) for each in self._changes().values()
        )

    @property
    def result(self) -> Result:
        """What the cell measures, and whether all is as it must be, if anything must."""
        # Tables show the farthest mean, or the share, 0, where no bit differs.
        changes = self._changes()
        name = worst(changes)
        change, (difference, before, after) = changes[name], self.errors[name].intervals()
        shown = Shown.of(_DIFFERENCE, difference.mean, verdict=change.verdict, spec="+.3f")
        heads = sum(each.shape[-1] for each in self.errors[name].errors)
        answer = self._answer(changes, heads)
        return Result(
            measures={
                _DIFFERING: max(each.bits for each in changes.values()),
                _DIFFERENCE: difference,
                "bias_before": before,
                "bias_after": after,
                "control_bits": min(self.controls.values()),
            },
            shown=shown if change.bits else Shown.of(_DIFFERING, 0.0, spec=".0f"),
            agreement={} if answer is None else {KIND: answer},
            heads=heads,
            evidence={"changes": changes, "controls": self.controls},
        )

    def _changes(self) -> Mapping[str, ChangeRecord]:
        return {name: each.record() for name, each in self.errors.items()}

    @property
    def _dead(self) -> list[str]:
        """Controls that changed nothing: the change did nothing."""
        return [control for control, share in self.controls.items() if share == 0.0]

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
