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
from tiebreak.matrix.questions.answers import Cut, exact
from tiebreak.matrix.questions.comparison import Comparison
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
    """What one part of two answers differs in."""

    what: str  # O, dQ ...
    share: float  # of elements with other bits
    ulps: float  # largest difference, in ulps of the plain call's, or of its head's root mean square if that is larger
    lost: int  # elements that are NaN or Inf where the plain call's are not
    worse: float  # mean squared error of the worst head over that of the plain call

    @property
    def harmless(self) -> bool:
        """Whether the errors are as large as before."""
        return not self.lost and self.worse <= WORSE

    @property
    def text(self) -> str:
        """What differs, with numbers."""
        if self.lost:
            return f"{self.what} is NaN or Inf in {self.lost} elements"
        return f"{self.what} differs in {100 * self.share:.3g} % of its elements, by up to {self.ulps:.3g} ulp"


@dataclass(kw_only=True)
class WithinError(Comparison):
    """Answers that must be one."""

    fmt: Format  # of O and the gradients
    differences: list[Difference] = field(default_factory=list)
    wrong: dict[str, list[Difference]] = field(default_factory=dict)  # that should not be, by what must be so

    def take(
        self, words: str, part: str, plain: Tensor, other: Tensor, inputs: AttentionInputs, cut: Cut, to_the_bit: bool
    ) -> None:
        if equal_bits(other, plain) == 1.0:
            return
        differs = difference(part, plain, other, cut({part: exact(inputs, part)})[part], self.fmt)
        self.differences.append(differs)
        if to_the_bit or not differs.harmless:
            self.wrong.setdefault(words, []).append(differs)

    def _why(self, words: str) -> str:
        """Return what is so instead of what must be."""
        wrong = self.wrong.get(words, [])
        others = f" ({', '.join(each.what for each in wrong[1:])} too)" if wrong[1:] else ""
        return f"{words}: {wrong[0].text}{others}" if wrong else self.asked[words]

    @property
    def settled(self) -> bool:
        return True  # a few heads always tell

    @property
    def result(self) -> Result:
        measures = self.measures or {
            "other_bits": max((each.share for each in self.differences), default=0.0),
            "difference_ulps": max((each.ulps for each in self.differences), default=0.0),
            "error_ratio": max((each.worse for each in self.differences), default=1.0),
        }
        name, why = next(iter(measures)), [text for text in map(self._why, self.asked) if text]
        more = f"; and {len(why) - 1} more" if len(why) > 1 else ""
        answer = Answer(not why, "; ".join(self.asked), f"{why[0]}{more}" if why else "")
        return Result(
            measures=measures,
            shown=Shown.of(name, measures[name], self.unit, spec=".2g"),
            agreement={KIND: answer} if self.asked else {},
            heads=BATCH * HEADS,
        )


def difference(part: str, plain: Tensor, other: Tensor, exact: Tensor, fmt: Format) -> Difference:
    """Measure what O, or a gradient, differs in; the exact one is in fp64."""
    finite, wide = torch.isfinite(plain), plain.double()
    size = torch.maximum(wide.abs(), wide.square().nanmean((-1, -2), keepdim=True).sqrt())
    ulps = ((other.double() - wide) / ulp(size, fmt)).abs()
    largest = ulps[torch.isfinite(ulps)]
    return Difference(
        part,
        1.0 - equal_bits(other, plain),
        largest.max().item() if len(largest) else 0.0,
        lost=int((finite & ~torch.isfinite(other)).sum()),
        worse=_worst(other, exact) / max(_worst(plain, exact), fmt.unit_roundoff**2 / 12),
    )


def _worst(x: Tensor, exact: Tensor) -> float:
    """Return the mean squared error of the worst head as a share of the reference's mean square."""
    error = (x.double() - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
    known = error[torch.isfinite(error)]
    return known.max().item() if len(known) else 0.0
