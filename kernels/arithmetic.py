"""The interface that the algorithms need of a device: six operations that round. A backend implements it."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

DITHER_STREAM = 1
CAST_STREAM = 2


@dataclass(frozen=True)
class Noise:
    """Counter-based random numbers of one call, the same whatever the block sizes and the device."""

    seed: int  # of the call
    heads: int  # query heads per batch entry

    def _rows(self, shape: torch.Size, first_row: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        batch = torch.arange(shape[0], device=device)[:, None, None, None]
        head = torch.arange(shape[1], device=device)[None, :, None, None]
        row = torch.arange(first_row, first_row + shape[2], device=device)[None, None, :, None]
        return batch, head, row

    def dither(self, shape: torch.Size, first_row: int, device: torch.device) -> Tensor:
        """Return one uniform number in [0, 1) a row, fp32, (batch, heads, rows, 1), from (seed, batch, head, row)."""
        # Not through float64, which an NPU lacks; the one rounding, of 32 bits to fp32, is the same.
        return random_bits(self.seed, DITHER_STREAM, *self._rows(shape, first_row, device)).float() * 2.0**-32

    def bits(self, shape: torch.Size, first_row: int, device: torch.device) -> Tensor:
        """Return 32 random bits an element of (batch, heads, rows, columns), from (seed, batch, head, row, column)."""
        column = torch.arange(shape[3], device=device)[None, None, None, :]
        return random_bits(self.seed, CAST_STREAM, *self._rows(shape, first_row, device), column)


class Arithmetic(Protocol):
    """The arithmetic of a device. Tensors are fp32 carriers of values in narrower formats."""

    @property
    def has_fp64(self) -> bool:
        """True if the device has float64. Without it, measures in fp64 are taken on the host."""

    def cast(self, x: Tensor, cast: Cast, random: Tensor | None = None) -> Tensor:
        """Return `x` rounded as `cast` says; a stochastic cast takes its random bits from `random`."""

    def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
        """Return `a @ b`, accumulated in at least fp32, the result rounded by `cast`."""

    def exp(self, x: Tensor, exponential: Exponential) -> Tensor:
        """Return e to the `x`, in fp32."""

    def exp_of_fma(self, x: Tensor, factor: float, addend: Tensor, exponential: Exponential) -> Tensor:
        """Return the exponential's base to the x * factor + addend, a number that is rounded to fp32 once.

        If the base is two, callers have multiplied the factor and the addend by log2(e).
        """

    def tanh(self, x: Tensor) -> Tensor:
        """Return the hyperbolic tangent, of a soft cap, in fp32."""

    def row_sum(self, x: Tensor, accumulator: Accumulator) -> Tensor:
        """Return the sum over the last dimension, kept, in fp32."""
