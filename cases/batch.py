"""One batch of a case's heads with its reference, and what follows from both."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tiebreak.cases.bounds import ErrorBounds, lost_of_o_bar, mean_slack
from tiebreak.cases.errors import has_no_number, units_of
from tiebreak.cases.gradients import ExactGradients, GradientErrorBounds
from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
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


@dataclass(frozen=True)
class Trace:
    """One element of O-bar, key after key: the paper's equation 5."""

    error: Tensor  # O-bar in the narrow format less O-bar in fp64, after each key, (keys,)
    p_bar: Tensor  # rounded P-bar of each key, (keys,)

    @property
    def at_one(self) -> list[int]:
        """Keys whose P-bar is exactly 1."""
        return (self.p_bar == 1).nonzero().flatten().tolist()


def error_trace(p_bar: Tensor, v: Tensor, fmt: Format) -> Tensor:
    """Return equation 5: partial sums in fp32, each rounded to O-bar's format, less the same in fp64; fp64, (keys,).

    The arguments are one row of P-bar as the product gets it, and one column of V, (keys,) each.
    """
    partial = torch.cumsum(p_bar.float() * v.float(), 0)
    return partial.to(TORCH_DTYPES[fmt]).double() - torch.cumsum(p_bar.double() * v.double(), 0)


def trace(
    declaration: Declaration, inputs: AttentionInputs, ref: Reference, *, head: int = 0, row: int = 0, column: int = 0
) -> Trace:
    """Return the trace of one element of O-bar in the first batch entry, the row untiled and without dither."""
    dtype = TORCH_DTYPES[inputs.formats.operands]
    s = ref.s[0, head, row : row + 1].float()
    row_max = s.amax(-1, keepdim=True)
    shift = declaration.shift_rule.propose(s, row_max, torch.zeros_like(row_max))
    p_bar = torch.exp(s - shift)[0].to(dtype).float()
    v = inputs.expanded_v()[0, head, :, column]
    return Trace(error_trace(p_bar, v, inputs.formats.operands), p_bar)
