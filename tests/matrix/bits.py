"""Which elements of two tensors agree to the bit."""

import torch
from torch import Tensor

EQUAL = 1e-3  # difference of shares of bits up to which plans are not told apart


def same_bits(ours: Tensor, theirs: Tensor) -> Tensor:
    """Which elements agree to the bit, NaN counting as equal to NaN."""
    return (ours == theirs) | (ours.isnan() & theirs.isnan())


def equal_bits(ours: Tensor, theirs: Tensor) -> float:
    """Share of elements that agree to the bit."""
    return 1.0 if torch.equal(ours, theirs) else same_bits(ours, theirs).double().mean().item()
