"""The answers of a question's calls, O and gradients, and two rules by which they are held to each other.

Answers that must be one are equal to the bit, or have errors of the same size: where strides differ, or what a view is
a view of, a sound kernel may take another path and add up in another order. Its bits differ then, and its errors
against fp64 hardly do. What is compared is the mean squared error of the worst head, as a share of the reference's mean
square: on normal numbers heads are alike, so that one wrong head shows. Over that of the plain call it came, where two
sound kernels represent the two paths, to at most 1.33 if both round alike (FlashAttention in tiles of 32 and 64, split,
PyTorch's fused kernel), and to 3.7 if the plain one computes in fp32 all through and the other casts P (seeds 1 to 40,
bf16 and fp16). `WORSE` lies above both. A limit of 2 blamed none of nine sound kernels in 18,000 cells; what reads
wrong numbers comes to a hundred and more.

Answers that may differ in bits must not differ in a bias. An element's signed error counts away from zero, in ulps. So
the mean of the difference is the difference of both sides' biases; its samples are heads, paired. Beyond the margin of
every other verdict of the suite it is a bias that the change has made.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from tiebreak.cases.errors import by_key_head, in_units, units_of
from tiebreak.cases.gradients import row_units
from tiebreak.cases.verdicts import ROUNDED_ONCE, WORSE, BiasVerdict, Interval, interval, judge
from tiebreak.kernels.formats import Format, ulp
from tiebreak.kernels.inputs import AttentionInputs, sum_groups
from tiebreak.kernels.reference import reference, reference_gradients
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import equal_bits
from tiebreak.reports.records.record import BIASED, UNBIASED, Answer, ChangeRecord, Estimate, MeasureRecord, Shown
from tiebreak.reports.tables.texts import changes_text, worst

O, DQ, DK, DV = "O", "dQ", "dK", "dV"
PARTS = (O, DQ, DK, DV)
OF_QUERIES = (O, DQ)  # parts that have a row for every query
#: By part, (batch, heads, N, d) in fp32 on the host, as far as a kernel gives them.
Answers = Mapping[str, Tensor]
USAGE, INVARIANCE = "usage", "invariance"  # kinds of experiment, and the names of their checks
BATCH, HEADS = 2, 4  # of a call whose answer must be one with another
_ALL: Mapping[str, float] = {}
_DIFFERING, _DIFFERENCE = "differing_bits", "mean_difference"
_ASKED, _DECLARED = "no bias that comes of the change", "bitwise equal, as the kernel declares"
WITHIN_ERROR = {
    "other_bits": MeasureRecord("largest share of elements of O or a gradient that have other bits in the other call"),
    "difference_ulps": MeasureRecord("largest difference between the two calls", "ulp"),
    "error_ratio": MeasureRecord(
        "mean squared error of the worst head over that of the plain call", worse="more", limit=1.0
    ),
    "nan_let_in": MeasureRecord("largest share of O, dQ, dK or dV that a NaN or Inf makes one which a mask hides"),
    "lse_ulps": MeasureRecord("largest error of the log-sum-exp, in fp32 ulps", "ulp"),
    "lse_error_over_bound": MeasureRecord("largest error of the log-sum-exp as a share of what rounding allows"),
}
WITHOUT_BIAS = {
    _DIFFERING: MeasureRecord(
        "largest share of elements with other bits after a change", worse="more", limit=0.0, share=0.1
    ),
    _DIFFERENCE: MeasureRecord(
        "changed answer less the plain one, + away from 0, where largest", "ulp", "farther", 0.02
    ),
    "bias_before": MeasureRecord("bias of the plain call there", unit="ulp"),
    "bias_after": MeasureRecord("bias of the changed call there", unit="ulp"),
    "control_bits": MeasureRecord("least share of elements of O that a control changes: 0 of a knob that does nothing"),
}


def joined(answers: Iterable[Answers], dimension: int, parts: Iterable[str] = PARTS) -> Answers:
    """Return the answer of a call that was cut along a dimension, in the parts that all its pieces have."""
    pieces = list(answers)
    return {part: torch.cat([piece[part] for piece in pieces], dimension) for part in parts if part in pieces[0]}


@dataclass(frozen=True)
class Cut:
    """The part of an answer that is compared; the same cut of an answer that has no more is all of it."""

    batch: slice | None = None  # None: all
    rows: slice | None = None  # of O and dQ
    keys: slice | None = None  # of dK and dV

    def of(self, part: str, x: Tensor) -> Tensor:
        """Return the elements of one part of an answer, (batch, heads, rows or keys, d), that the cut leaves."""
        rows, every = self.rows if part in OF_QUERIES else self.keys, slice(None)
        return x[self.batch or every, :, rows or every]

    def pairs(self, plain: Answers, other: Answers) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the name of each part that both answers have, and what the cut leaves of either."""
        for part in plain:
            if part in other:
                yield part, self.of(part, plain[part]), self.of(part, other[part])


WHOLE = Cut()
_reference = lru_cache(maxsize=2)(reference)  # parts of one answer, one after the other


@lru_cache(maxsize=2)
def _gradients(inputs: AttentionInputs) -> tuple[Tensor, ...]:
    return reference_gradients(inputs, _reference(inputs))


def exact(inputs: AttentionInputs, part: str) -> Tensor:
    """Return the exact O, dQ, dK or dV, fp64; computed once for all comparisons with a call."""
    return _reference(inputs).o if part == O else _gradients(inputs)[PARTS.index(part) - 1]


@lru_cache(maxsize=len(PARTS))
def units(inputs: AttentionInputs, part: str) -> Tensor:
    """Return the factor that turns an error into ulps, + away from zero; NaN or 0 where the answer is 0.

    For O the unit is the ulp of the element. The elements of a gradient cancel, so the unit there is an ulp of the sum
    of the terms' magnitudes, with dP and delta counted separately, since these cancel too.
    """
    ref, fmt, truth = _reference(inputs), inputs.formats.output, exact(inputs, part)
    if part == O:
        return units_of(truth, fmt)
    do = inputs.do.double()
    if part == DV:
        terms = sum_groups(ref.p.transpose(-1, -2) @ do.abs(), inputs.groups)
    else:
        k, v = inputs.expanded_k().double(), inputs.expanded_v().double()
        ds = inputs.scale * ref.p * ((do @ v.transpose(-1, -2)).abs() + ref.delta.abs())
        of_rows = ds @ k.abs() if part == DQ else ds.transpose(-1, -2) @ inputs.q.double().abs()
        terms = of_rows if part == DQ else sum_groups(of_rows, inputs.groups)
    return truth.sign() / row_units(terms[..., None], fmt)[..., 0]


@dataclass(frozen=True)
class OutputDifference:
    """The differences between the O, or one gradient, of two answers."""

    share: float  # of elements with other bits
    ulps: float  # largest difference, in ulps of the plain call's, or of its head's root mean square if that is larger
    lost: int  # elements that are NaN or Inf where the plain call's are not
    worse: float  # mean squared error of the worst head over that of the plain call

    @classmethod
    def between(
        cls, plain: Tensor, other: Tensor, exact: Tensor, fmt: Format, level: float = 1.0
    ) -> "OutputDifference":
        """Measure the differences; `exact` is in fp64, `level` how much of the plain call's mean squared error counts.

        Neither side's error counts as less than that of one rounding.
        """
        wide = plain.double()
        size = torch.maximum(wide.abs(), wide.square().nanmean((-1, -2), keepdim=True).sqrt())
        return cls(
            1.0 - equal_bits(other, plain),
            _largest_finite((other.double() - wide) / ulp(size, fmt)),
            lost=int((torch.isfinite(plain) & ~torch.isfinite(other)).sum()),
            worse=worst_head(other, exact) / max(level * worst_head(plain, exact), fmt.unit_roundoff**2),
        )

    @property
    def text(self) -> str:
        """The differences as the end of a sentence."""
        if self.lost:
            return f"is NaN or Inf in {self.lost} elements"
        return f"differs in {100 * self.share:.3g} % of its elements, by up to {self.ulps:.3g} ulp"


def worst_head(x: Tensor, exact: Tensor) -> float:
    """Return the mean squared error of the worst head as a share of the reference's mean square."""
    return _largest_finite((x.double() - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2)))


def _largest_finite(x: Tensor) -> float:
    if x.numel() and math.isfinite(largest := max(abs(end.item()) for end in x.aminmax())):  # as almost always
        return largest
    finite = x[torch.isfinite(x)].abs()
    return finite.max().item() if len(finite) else 0.0


@dataclass
class WithinError:
    """The comparisons of a cell whose answers must agree but for rounding."""

    fmt: Format  # of O and the gradients
    requirements: dict[str, str] = field(default_factory=dict)  # and what is so instead; empty where one passed
    differences: list[OutputDifference] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)  # that a question takes itself, in place of differences
    unit: str = ""  # behind the first of them in tables
    settled: bool = True  # a few heads always tell
    where: str = ""  # what the comparisons that failed have in common; empty: not known

    def compare(
        self,
        words: str,
        plain: Answers,
        other: Answers,
        inputs: AttentionInputs,
        cut: Cut = WHOLE,
        same: bool = False,
        levels: Mapping[str, float] = _ALL,
    ) -> None:
        """Add a comparison with a plain call on these inputs; `words` name the change that must not matter.

        If plain calls have the `same` O, `other` must have its bits. Gradients need not: atomics add them up in any
        order, so two calls agree by chance. `levels`: how much of the plain call's mean squared error counts, by part.
        """
        for part, ours, theirs in cut.pairs(plain, other):
            failure = self.requirements.setdefault(words, "")
            if equal_bits(theirs, ours) < 1.0:
                differs = OutputDifference.between(
                    ours, theirs, cut.of(part, exact(inputs, part)), self.fmt, levels.get(part, 1.0)
                )
                self.differences.append(differs)
                if (same and part == O) or differs.lost or differs.worse > WORSE:
                    why = f"{failure}, {part} too" if failure else f"{words}: {part} {differs.text}"
                    self.requirements[words] = why

    @property
    def is_empty(self) -> bool:
        """True if no comparison was made."""
        return not (self.requirements or self.measures)

    @property
    def result(self) -> Result:
        """The cell's result: its measures, and the answer of its check."""
        measures = self.measures or {
            "other_bits": max((difference.share for difference in self.differences), default=0.0),
            "difference_ulps": max((each.ulps for each in self.differences), default=0.0),
            "error_ratio": max((each.worse for each in self.differences), default=1.0),
        }
        name, why = next(iter(measures)), [text for text in self.requirements.values() if text]
        more = f"; and {len(why) - 1} more" if len(why) > 1 else ""
        where = f"wrong where {self.where}: " if self.where else ""
        answer = Answer(not why, "; ".join(self.requirements), f"{where}{why[0]}{more}" if why else "")
        return Result(
            measures=measures,
            shown=Shown.of(name, measures[name], self.unit, spec=".2g"),
            answers={USAGE: answer} if self.requirements else {},
            heads=BATCH * HEADS,
            evidence={"wrong where": self.where} if self.where else {},
        )


@dataclass
class PairedErrors:
    """The errors of one part of both answers on all heads drawn so far."""

    same: list[float] = field(default_factory=list)  # share of elements that have the same bits, batch by batch
    lost: int = 0  # elements that are finite in one answer alone
    #: Batch by batch, of the plain answer and of the changed one: mean signed errors in ulps and mean squared ones,
    #: fp64, (2, 2, heads).
    errors: list[Tensor] = field(default_factory=list)

    def intervals(self) -> tuple[Interval, Interval, Interval]:
        """Return the mean difference, and the biases of the plain answer and of the changed one."""
        before, after = torch.cat(self.errors, -1)[:, 0]
        means = after - before, before, after
        difference, plain, changed = (interval(each[torch.isfinite(each)]) for each in means)
        return difference, plain, changed

    def record(self) -> ChangeRecord:
        """Return the mean difference with its verdict, as records have it."""
        share, intervals = 1.0 - sum(self.same) / len(self.same), self.intervals()
        difference, before, after = (Estimate.of(each.mean, each.half_width) for each in intervals)
        verdict = judge(intervals[0])
        squares = torch.cat(self.errors, -1)[:, 1].nanmean(-1).tolist()
        growth = max(squares) / max(min(squares), ROUNDED_ONCE)
        grown = share > 0.0 and not self.lost and growth > WORSE and verdict is not BiasVerdict.BIASED
        return ChangeRecord(
            share,
            difference,
            before,
            after,
            verdict=verdict.value if share else None,
            lost=self.lost,
            growth=growth if grown else None,
        )


@dataclass
class WithoutBias:
    """The comparisons of a cell whose answers may differ, but not by a bias."""

    declared: bool = False  # whether the kernel says that the change alters no bit
    errors: dict[str, PairedErrors] = field(default_factory=dict)  # by what was changed, and of what
    controls: dict[str, float] = field(default_factory=dict)  # what must change O, and the share of it that it did

    def compare(self, words: str, plain: Answers, other: Answers, inputs: AttentionInputs, cut: Cut = WHOLE) -> None:
        """Add the errors of a plain call on these inputs and of a changed one; `words` name the change."""
        for part, ours, theirs in cut.pairs(plain, other):
            truth, unit = (cut.of(part, of(inputs, part)) for of in (exact, units))
            errors = [in_units(answer.double() - truth, unit) for answer in (ours, theirs)]
            groups = inputs.groups if part in OF_QUERIES else 1
            results = self.errors.setdefault(words if part == O else f"{words}, {part}", PairedErrors())
            results.same.append(equal_bits(ours, theirs))
            results.lost += int((torch.isfinite(ours) != torch.isfinite(theirs)).sum())
            sides = [torch.stack([by_key_head(error, groups), by_key_head(error.square(), groups)]) for error in errors]
            results.errors.append(torch.stack(sides))

    def control(self, words: str, before: Tensor, after: Tensor) -> None:
        """Add a control: a change that must alter the answer. The first batch decides."""
        self.controls.setdefault(words, 1.0 - equal_bits(before, after))

    @property
    def is_empty(self) -> bool:
        """True if no comparison was made."""
        return not self.errors

    @property
    def settled(self) -> bool:
        """True if more heads would change no verdict."""
        changes = self._changes().values()
        return bool(self._ineffective) or all(each.verdict in (None, UNBIASED) or _is_wrong(each) for each in changes)

    @property
    def result(self) -> Result:
        """The cell's result: its measures, and the answer of its check."""
        # Tables show the farthest mean, or the share, 0, where no bit differs.
        changes = self._changes()
        name = worst(changes)
        change, (difference, before, after) = changes[name], self.errors[name].intervals()
        shown = Shown.of(_DIFFERENCE, difference.mean, verdict=change.verdict, spec="+.3f")
        heads = sum(error.shape[-1] for error in self.errors[name].errors)
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
            answers={} if answer is None else {INVARIANCE: answer},
            heads=heads,
            evidence={"changes": changes, "controls": self.controls},
        )

    def _changes(self) -> Mapping[str, ChangeRecord]:
        return {name: each.record() for name, each in self.errors.items()}

    @property
    def _ineffective(self) -> list[str]:
        """The controls that altered nothing: the change had no effect, so the comparison shows nothing."""
        return [control for control, share in self.controls.items() if share == 0.0]

    def _answer(self, changes: Mapping[str, ChangeRecord], heads: int) -> Answer | None:
        """Return whether all is as it must be; None where bits differ without a bias and no invariance is declared."""
        asked, differs = _DECLARED if self.declared else _ASKED, any(change.bits for change in changes.values())
        if any(map(_is_wrong, changes.values())) or (self.declared and differs):
            return Answer(False, asked, changes_text(changes))
        if self._ineffective:
            return Answer(None, asked, f"the knob did nothing: no bit changed by {', '.join(self._ineffective)}")
        if not self.settled:
            return Answer(None, asked, f"{heads} heads do not settle it: {changes_text(changes)}; raise --heads")
        return None if differs else Answer(True, asked)


def _is_wrong(change: ChangeRecord) -> bool:
    """Return whether a change causes a bias, NaN or Inf, or larger errors than another way of rounding explains."""
    return change.verdict == BIASED or change.lost > 0 or change.growth is not None
