"""The paper's equation 5: the error of O-bar as its sum over keys proceeds, with its steps where P-bar is 1."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.kernels.formats import Format
from tiebreak.kernels.inputs import TORCH_DTYPES, AttentionInputs
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.reference import Reference


@dataclass(frozen=True)
class Trace:
    """One element of O-bar, key after key."""

    error: Tensor  # O-bar in the narrow format less O-bar in fp64, after each key, (keys,)
    p_bar: Tensor  # rounded P-bar of each key, (keys,)

    @property
    def at_one(self) -> list[int]:
        """Keys whose P-bar is exactly 1."""
        return (self.p_bar == 1).nonzero().flatten().tolist()


def error_trace(p_bar: Tensor, v: Tensor, fmt: Format) -> Tensor:
    """Equation 5: partial sums in fp32, each rounded to the format of O-bar, less the same in fp64; fp64, (keys,).

    Of one row of P-bar as the product gets it, and one column of V, (keys,) each.
    """
    partial = torch.cumsum(p_bar.float() * v.float(), 0)
    return partial.to(TORCH_DTYPES[fmt]).double() - torch.cumsum(p_bar.double() * v.double(), 0)


def trace(
    declaration: Declaration, inputs: AttentionInputs, ref: Reference, *, head: int = 0, row: int = 0, column: int = 0
) -> Trace:
    """The trace of one element of O-bar in the first batch entry, the row untiled and without dither."""
    dtype = TORCH_DTYPES[inputs.formats.operands]
    s = ref.s[0, head, row : row + 1].float()
    row_max = s.amax(-1, keepdim=True)
    shift = declaration.shift_rule.propose(s, row_max, torch.zeros_like(row_max))
    p_bar = torch.exp(s - shift)[0].to(dtype).float()
    v = inputs.expanded_v()[0, head, :, column]
    return Trace(error_trace(p_bar, v, inputs.formats.operands), p_bar)
