"""One batch of a case's heads with its reference, and what follows from both."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.cases.bounds import ErrorBounds, lost_of_o_bar, mean_slack
from tiebreak.cases.errors import has_no_number, units_of
from tiebreak.cases.gradients import ExactGradients, GradientErrorBounds
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import Reference


@dataclass(frozen=True)
class Batch:
    """Inputs and reference. Derived tensors are computed once, for all kernels that are run on them."""

    inputs: AttentionInputs
    ref: Reference

    @cached_property
    def units(self) -> Tensor:
        """The units of errors of O."""
        return units_of(self.ref.o, self.inputs.formats.output)

    @cached_property
    def size_units(self) -> Tensor | None:
        """The units of errors of O relative to the mean of |V| that its row sees; None: V has one sign, as `units`.

        Where O cancels, an error in its ulps shows by how much; its mean square has no finite variance.
        """
        v = self.inputs.v
        return units_of(self.ref.magnitude, self.inputs.formats.output) if (v > 0).any() and (v < 0).any() else None

    @cached_property
    def bounds(self) -> ErrorBounds:
        """The part of the error bounds that all plans share."""
        return ErrorBounds(self.inputs, self.ref)

    @cached_property
    def gradient_bounds(self) -> GradientErrorBounds:
        """The part of the error bounds of dQ, dK and dV that all plans share."""
        return GradientErrorBounds(self.bounds, self.gradients.gradients)

    @cached_property
    def gradients(self) -> ExactGradients:
        """The reference's dQ, dK and dV."""
        return ExactGradients.of(self.inputs, self.ref)

    @cached_property
    def value_range(self) -> tuple[Tensor, Tensor]:
        """The least and the largest V that a row sees, by column, fp64, each broadcastable to O.

        NaN where V has one; Inf and -Inf where a row sees no key.
        """
        hidden, v = self.inputs.hidden(), self.inputs.whole_v
        if hidden is None:
            least, largest = (self.inputs.expanded(of_keys(-2, keepdim=True)) for of_keys in (v.amin, v.amax))
        else:
            # A mask is rare and its cases are small: (batch, heads, queries, keys, d) fits.
            visible, wide = ~hidden[..., None], self.inputs.expanded(v)[:, :, None]
            least = torch.where(visible, wide, torch.inf).amin(-2)
            largest = torch.where(visible, wide, -torch.inf).amax(-2)
        if self.inputs.sink is not None:  # which has a V of 0
            least, largest = least.clamp(max=0.0), largest.clamp(min=0.0)
        return least.double(), largest.double()  # as large as O, and not as V, in fp64

    def outside_values(self, o: Tensor, declaration: Declaration) -> float:
        """Return how far O is outside the range of V that its row sees: 0 inside, 1 at the plan's rounding error.

        O is as the kernel returned it, (batch, heads, queries, d). NaN and Inf are left to another check: elements of V
        or O with one count as 0; NaN where O has nothing else.
        """
        if has_no_number(o, self.ref):
            return math.nan
        least, largest = self.value_range
        if torch.equal(o.clamp(least.float(), largest.float()), o):  # fp32 holds every V: nothing is outside
            return 0.0
        wide = o.to(torch.float64, copy=True)
        outside = torch.maximum(least - wide, wide.sub_(largest))
        slack = mean_slack(self.inputs, declaration) * torch.maximum(least.abs(), largest.abs())
        # Without a visible key both ends are infinite, and O is 0: its error bound asks for that.
        spacing = self.inputs.formats.output.smallest_subnormal + lost_of_o_bar(self.inputs, declaration)
        share = outside.div_(slack + spacing)
        return max(0.0, share.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).max().item())
