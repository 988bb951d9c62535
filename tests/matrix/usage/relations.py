"""Whether two calls that must have one answer have it: to the bit, or with errors of the same size.

Where strides differ, or what a view is a view of, a sound kernel may take another path and add up in another order. Its
bits differ then, and its errors against fp64 hardly do. What is compared is the mean squared error of the worst head,
as a share of the reference's mean square: on normal numbers heads are alike, so that one wrong head shows. Over that of
the plain call it came, where two sound kernels stand for the two paths, to at most 1.33 if both round alike
(FlashAttention in tiles of 32 and 64, split, PyTorch's fused kernel), and to 3.7 if the plain one computes in fp32 all
through and the other casts P (seeds 1 to 40, bf16 and fp16). `WORSE` lies above both. An earlier form of these
questions, with a limit of 2, blamed none of nine sound kernels in 18,000 cells (seeds 4 to 103, bf16 and fp16): nearly
all answers had equal bits, the others a ratio of 1.08 at most. What reads wrong numbers comes to a hundred and more.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.formats import Format, ulp
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import reference, reference_gradients
from tiebreak.matrix.attribution import equal_bits

#: O, dQ, dK and dV, as far as they are known, (batch, heads, N, d) in fp32 on the host.
Answers = Mapping[str, Tensor]
WORSE = 4.0


@dataclass(frozen=True)
class Difference:
    """What one tensor of two answers differs in."""

    what: str  # O, dQ ...
    share: float  # of elements with other bits
    ulps: float  # largest difference, in ulps of the plain call's, or of its head's root mean square if that is larger
    lost: int  # elements that are NaN or Inf where the plain call's are not
    worse: float  # mean squared error of the worst head over that of the plain call; 1: no bit differs

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


def exact_answers(inputs: AttentionInputs) -> Answers:
    """The same in fp64."""
    ref = reference(inputs)
    dq, dk, dv = reference_gradients(inputs, ref)
    return {"O": ref.o, "dQ": dq, "dK": dk, "dV": dv}


def differences(ours: Answers, plain: Answers, exact: Answers, fmt: Format) -> list[Difference]:
    """What differs in two answers, of the tensors that both have; those without a difference are left out.

    Args:
        ours: of the call in question.
        plain: of the call that it must agree with.
        exact: of both, in fp64.
        fmt: of O and the gradients.
    """
    compared = (_difference(name, ours[name], plain[name], exact[name], fmt) for name in plain if name in ours)
    return [difference for difference in compared if difference.share]


def _difference(name: str, ours: Tensor, plain: Tensor, exact: Tensor, fmt: Format) -> Difference:
    share = 1.0 - equal_bits(ours, plain)
    if share == 0.0:
        return Difference(name, 0.0, 0.0, 0, 1.0)
    finite = torch.isfinite(plain)
    lost = int((finite & ~torch.isfinite(ours)).sum())
    wide = plain.double()
    size = torch.maximum(wide.abs(), wide.square().nanmean((-1, -2), keepdim=True).sqrt())
    ulps = ((ours.double() - wide) / ulp(size, fmt)).abs()
    largest = ulps[torch.isfinite(ulps)]
    worse = _worst(ours, exact) / max(_worst(plain, exact), fmt.unit_roundoff**2 / 12)
    return Difference(name, share, largest.max().item() if len(largest) else 0.0, lost, worse)


def _worst(x: Tensor, exact: Tensor) -> float:
    """Mean squared error of the worst head as a share of the reference's mean square."""
    error = (x.double() - exact).square().sum((-1, -2)) / exact.square().sum((-1, -2))
    known = error[torch.isfinite(error)]
    return known.max().item() if len(known) else 0.0
