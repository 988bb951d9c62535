"""The emulation's arithmetic: every rounding explicit, bit for bit what the plan declares."""

import torch
from torch import Tensor

from tiebreak.backends.emulation.accumulators import matmul_by, row_total
from tiebreak.backends.emulation.rounding import fma, round_to
from tiebreak.kernels.operands import LOG2_E
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

_EXPONENT_BIAS = 127.0  # of fp32
_EXPONENT_OF_INF = 128.0  # as fp32 reads its bits
_LOWEST = -700.0  # e to it is still a normal number in fp64, and 0 in fp32


class EmulatedArithmetic:
    """Software rounding over fp32 carriers; see `tiebreak.kernels.arithmetic.Arithmetic`."""

    has_fp64 = True  # in which it computes

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        """Return `x` rounded by `round_to`; fp32 to fp32 is the identity."""
        if not cast.narrows:
            return x
        if cast.saturates:
            x = x.clamp(-cast.fmt.largest, cast.fmt.largest)
        return round_to(x, cast.fmt, cast.rounding, random_bits=random)

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """Return `a @ b` in the accumulator's order, cast at the end, or after each block of terms."""
        matmul = matmul_by(accumulator)
        first, *others = torch.split(torch.arange(a.shape[-1]), cast.every) if cast.every else (slice(None),)
        total = self.cast(matmul(a[..., first], b[..., first, :]), cast)
        for terms in others:
            total = self.cast(total + matmul(a[..., terms], b[..., terms, :]), cast)
        return total

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        """Return the exponential in fp64, rounded once to fp32; the plan's fast one for the keys that it takes."""
        # In base two the product is one more fp32 rounding, as in a kernel that folds log2(e) into its scale.
        if exponential.base_two:
            wide = (x * LOG2_E).double().exp2_()
        else:
            wide = x.to(torch.float64, copy=True).clamp_(min=_LOWEST).exp_()
        result = wide.float()
        if exponential.correction:
            taken = x.shape[-1] - x.shape[-1] % exponential.lanes
            result[..., :taken] = _fast_exp(x[..., :taken], exponential.correction)
        return result

    def exp_of_fma(self, x: Tensor, factor: float, addend: Tensor, exponential: Exponential) -> Tensor:
        """Return the power in fp64 of a correctly rounded fma, rounded once to fp32."""
        wide = fma(x, factor, addend).double()
        return (wide.exp2_() if exponential.base_two else wide.clamp_(min=_LOWEST).exp_()).float()

    def tanh(self, x: Tensor) -> Tensor:
        """Return the hyperbolic tangent in fp64, rounded once to fp32."""
        return x.double().tanh_().float()

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        """Return the sum in the accumulator's order."""
        return row_total(x, accumulator)


def _fast_exp(x: Tensor, correction: tuple[float, ...]) -> Tensor:
    """Return a fast `Exponential` in fp32, a product and its sum rounded once; 0 below the normal numbers."""
    y = x * LOG2_E
    fraction = (y - y.floor()).double()
    *lower, highest = torch.tensor(correction, dtype=torch.float32)
    polynomial = highest.expand_as(y)
    for coefficient in reversed(lower):
        polynomial = (polynomial * fraction + coefficient).float()
    # Inf has no fraction.
    corrected = (y - polynomial).nan_to_num(nan=_EXPONENT_OF_INF).clamp(max=_EXPONENT_OF_INF)
    bits = ((corrected.double() + _EXPONENT_BIAS) * 2.0**23).float().int()
    return torch.where(y < 1.0 - _EXPONENT_BIAS, 0.0, bits.view(torch.float32)).masked_fill(y.isnan(), torch.nan)
