"""Two answers that must be one: equal to the bit, or with errors of the same size.

Where strides differ, or what a view is a view of, a sound kernel may take another path and add up in another order. Its
bits differ then, and its errors against fp64 hardly do. What is compared is the mean squared error of the worst head,
as a share of the reference's mean square: on normal numbers heads are alike, so that one wrong head shows. Over that of
the plain call it came, where two sound kernels stand for the two paths, to at most 1.33 if both round alike
(FlashAttention in tiles of 32 and 64, split, PyTorch's fused kernel), and to 3.7 if the plain one computes in fp32 all
through and the other casts P (seeds 1 to 40, bf16 and fp16). `WORSE` lies above both. An earlier form of these
questions, with a limit of 2, blamed none of nine sound kernels in 18,000 cells (seeds 4 to 103, bf16 and fp16): nearly
all answers had equal bits, the others a ratio of 1.08 at most. What reads wrong numbers comes to a hundred and more.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from tiebreak.cases.measures import Measure
from tiebreak.kernels.formats import Format, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.matrix.bits import equal_bits
from tiebreak.matrix.questions.answers import WHOLE, Answers, Cut, O, exact
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer, Shown

KIND = "usage"  # of experiment, and the name of its check
WORSE = 4.0
BATCH, HEADS = 2, 4  # of a call
MEASURES = (
    Measure("other_bits", "largest share of elements of O or a gradient that have other bits in the other call"),
    Measure("difference_ulps", "largest difference between the two calls", "ulp"),
    Measure("error_ratio", "mean squared error of the worst head over that of the plain call", worse="more", limit=1.0),
    Measure("nan_let_in", "largest share of O, dQ, dK or dV that a NaN or Inf makes one which a mask hides"),
    Measure("lse_ulps", "largest error of the log-sum-exp, in fp32 ulps", "ulp"),
    Measure("lse_error_over_bound", "largest error of the log-sum-exp as a share of what rounding allows"),
)


@dataclass(frozen=True)
class Difference:
    """What O, or a gradient, of two answers differs in."""

    share: float  # of elements with other bits
    ulps: float  # largest difference, in ulps of the plain call's, or of its head's root mean square if that is larger
    lost: int  # elements that are NaN or Inf where the plain call's are not
    worse: float  # mean squared error of the worst head over that of the plain call

    @classmethod
    def between(cls, plain: Tensor, other: Tensor, exact: Tensor, fmt: Format) -> "Difference":
        """Measure it; the exact answer is in fp64."""
        wide = plain.double()
        size = torch.maximum(wide.abs(), wide.square().nanmean((-1, -2), keepdim=True).sqrt())
        return cls(
            1.0 - equal_bits(other, plain),
            _largest_finite((other.double() - wide) / ulp(size, fmt)),
            lost=int((torch.isfinite(plain) & ~torch.isfinite(other)).sum()),
            worse=_worst_head(other, exact) / max(_worst_head(plain, exact), fmt.unit_roundoff**2 / 12),
        )

    @property
    def harmless(self) -> bool:
        """Whether the errors are as large as before."""
        return not self.lost and self.worse <= WORSE

    @property
    def text(self) -> str:
        """What differs, with numbers."""
        if self.lost:
            return f"is NaN or Inf in {self.lost} elements"
        return f"differs in {100 * self.share:.3g} % of its elements, by up to {self.ulps:.3g} ulp"


def _worst_head(x: Tensor, exact: Tensor) -> float:
    """Return the mean squared error of the worst head as a share of the reference's mean square."""
    return _largest_finite((x.double() - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2)))


def _largest_finite(x: Tensor) -> float:
    known = x[torch.isfinite(x)].abs()
    return known.max().item() if len(known) else 0.0


@dataclass
class WithinError:
    """What came of the calls of a cell whose answers must be one."""

    fmt: Format  # of O and the gradients
    asked: dict[str, str] = field(default_factory=dict)  # what must be so, and what is so instead, empty if it is
    differences: list[Difference] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)  # that a question takes itself, in place of differences
    unit: str = ""  # behind the first of them in tables
    settled: bool = True  # a few heads always tell

    def compare(
        self,
        words: str,
        plain: Answers,
        other: Answers,
        inputs: AttentionInputs,
        cut: Cut = WHOLE,
        again: Answers | None = None,
    ) -> None:
        """Take down what two answers differ in, in the parts that both have.

        Args:
            words: what must be so.
            plain: of the call that must be agreed with.
            other: of the call in question.
            inputs: of the plain call.
            cut: the part of all that is compared.
            again: of one more plain call: if O has its bits, it must have them in `other` too. Gradients need not:
                where they are added up by atomics, two calls agree by chance.
        """
        repeats = again is not None and torch.equal(again[O], plain[O])
        for part, ours, theirs in cut.pairs(plain, other):
            known = self.asked.setdefault(words, "")
            if equal_bits(theirs, ours) < 1.0:
                differs = Difference.between(ours, theirs, cut.of(part, exact(inputs, part)), self.fmt)
                self.differences.append(differs)
                if (repeats and part == O) or not differs.harmless:
                    self.asked[words] = f"{known}, {part} too" if known else f"{words}: {part} {differs.text}"

    @property
    def nothing(self) -> bool:
        """Whether nothing has been compared or measured."""
        return not (self.asked or self.measures)

    @property
    def result(self) -> Result:
        """What the cell measures, and whether all is as it must be, if anything must."""
        measures = self.measures or {
            "other_bits": max((each.share for each in self.differences), default=0.0),
            "difference_ulps": max((each.ulps for each in self.differences), default=0.0),
            "error_ratio": max((each.worse for each in self.differences), default=1.0),
        }
        name, why = next(iter(measures)), [text for text in self.asked.values() if text]
        more = f"; and {len(why) - 1} more" if len(why) > 1 else ""
        answer = Answer(not why, "; ".join(self.asked), f"{why[0]}{more}" if why else "")
        return Result(
            measures=measures,
            shown=Shown.of(name, measures[name], self.unit, spec=".2g"),
            agreement={KIND: answer} if self.asked else {},
            heads=BATCH * HEADS,
        )
