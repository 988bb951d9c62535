"""The emulation's arithmetic: every rounding explicit, bit for bit what the plan declares."""

import torch
from torch import Tensor

from tiebreak.backends.emulation.accumulators import ACCUMULATIONS
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.formats import FP32
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

_LOG2_E = 1.4426950408889634


class EmulatedArithmetic:
    """Software rounding over fp32 carriers; see `tiebreak.kernels.arithmetic.Arithmetic`."""

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        """`x` rounded by `round_to`; fp32 to fp32 is the identity."""
        return x if cast.fmt == FP32 else round_to(x, cast.fmt, cast.rounding, random_bits=random)

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """`a @ b` in the accumulator's order, then the cast."""
        return self.cast(ACCUMULATIONS[accumulator].matmul(a, b), cast)

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        """The exponential in fp64, rounded once to fp32; at 0 the plan's constant."""
        # In base two the product is one more fp32 rounding, as in a kernel that folds log2(e) into its scale.
        wide = torch.exp2((x * _LOG2_E).double()) if exponential.base_two else torch.exp(x.double())
        result = wide.float()
        if exponential.at_zero == 1.0:
            return result
        return torch.where(x == 0, torch.full_like(result, exponential.at_zero), result)

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        """The sum in the accumulator's order."""
        return ACCUMULATIONS[accumulator].total(x)
