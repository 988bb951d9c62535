"""The arithmetic of a torch device as it is: its own casts, matrix products, exponential and sums."""

from dataclasses import dataclass

import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import fma, round_to
from tiebreak.kernels.formats import FP32, Format, Rounding
from tiebreak.kernels.inputs import TORCH_DTYPES
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.kernels.operands import LOG2_E
from tiebreak.kernels.plans import Accumulator, Cast, Exponential


def _dtype(fmt: Format) -> torch.dtype:
    if fmt in TORCH_DTYPES:
        return TORCH_DTYPES[fmt]
    raise CannotRunError(f"the plan casts to {fmt.name}, in which torch computes nothing by itself; the emulation does")


@dataclass(frozen=True)
class TorchArithmetic:
    """Native torch operations over fp32 carriers; see `tiebreak.kernels.arithmetic.Arithmetic`.

    Accumulators and the exponential's constants are the device's own: the plan's are not imposed on the device,
    but compared with it.
    """

    has_fp64: bool = True  # whether the device has float64

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        """Return the device's own cast; a stochastic one, which no torch device has, in integers on the device.

        CannotRunError: to a format that torch devices do not compute in.
        """
        if cast.rounding is Rounding.STOCHASTIC:
            return round_to(x, cast.fmt, cast.rounding, random_bits=random)
        return x if cast.fmt == FP32 else x.to(_dtype(cast.fmt)).float()

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """Return the device's product: of narrow operands where the result is narrow, of fp32 operands otherwise."""
        del accumulator
        if cast.fmt == FP32:
            return a @ b
        dtype = _dtype(cast.fmt)
        return (a.to(dtype) @ b.to(dtype)).float()

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        """Return the device's exponential."""
        return torch.exp2(x * LOG2_E) if exponential.base_two else torch.exp(x)

    def exp_of_fma(self, x: Tensor, factor: float, addend: Tensor, exponential: Exponential) -> Tensor:
        """Return the device's exponential of a fused multiply-add computed in float64: torch has none to call.

        CannotRunError: the device has no float64.
        """
        if not self.has_fp64:
            raise CannotRunError("a contracted plan takes a fused multiply-add, which this device's torch has not")
        argument = fma(x, factor, addend)
        return torch.exp2(argument) if exponential.base_two else torch.exp(argument)

    def tanh(self, x: Tensor) -> Tensor:
        """Return the device's hyperbolic tangent."""
        return torch.tanh(x)

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        """Return the device's sum."""
        del accumulator
        return x.sum(-1, keepdim=True)
