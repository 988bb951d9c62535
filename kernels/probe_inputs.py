"""Inputs that both a case and a probe are made of: cases and backends don't know each other, and both may look here."""

import numpy as np
import torch
from numpy.random import Generator
from torch import Tensor

from tiebreak.kernels.formats import BF16, Formats
from tiebreak.kernels.inputs import AttentionInputs

_D = 64
_SCALE = 0.125  # 1/sqrt(_D)
_KEYS = 3  # one maximum, two ties
_GRID = 256  # between 1/2 and 1 bf16 has steps of 1/256


def tied_p_bar(rng: Generator, odd: Tensor, noise_seed: int = 0) -> AttentionInputs:
    """Draw one maximum and two ties of P-bar a row, in bf16: they show how a kernel casts P-bar, random scores do not.

    Every score is the fp32 number next to a tie's logarithm, which is above -0.5: closer to it than an exponential
    rounded to fp32 can resolve. Three products of bf16 numbers add up to it exactly in any order.

    There are two queries and three keys a head, d = 64; V is drawn like the ties, between 1 and 2, and is 0 at the
    maximum. `odd`, bool (batch, heads), says whether a head's ties are above neighbours with an odd last bit.
    """
    batch, heads = odd.shape
    even = np.broadcast_to(np.arange(160, 250, 2), (batch, heads, 45))
    below = torch.from_numpy(rng.permuted(even, axis=-1)[..., : _KEYS - 1].copy()) + odd[..., None]
    ties = (below.double() + 0.5) / _GRID
    q = torch.zeros(batch, heads, 2, _D)
    q[..., :3] = 1.0
    # Columns that no query uses are random, so that P K is not degenerate.
    k = torch.from_numpy(rng.standard_normal((batch, heads, _KEYS, _D), dtype=np.float32)).bfloat16().float()
    k[..., :3] = 0.0
    k[:, :, 1:, :3] = torch.stack(pieces(torch.log(ties).float() / _SCALE), -1)
    v = 1.0 + torch.from_numpy(rng.random((batch, heads, _KEYS, _D), dtype=np.float32))
    v[:, :, 0] = 0.0
    return AttentionInputs(q, k, v.bfloat16().float(), torch.ones_like(q), Formats.of(BF16), noise_seed=noise_seed)


def pieces(x: Tensor) -> list[Tensor]:
    """Return three bf16 numbers that add up to each fp32 number, whose 24 bits are three times 8."""
    first = x.bfloat16().float()
    second = (x - first).bfloat16().float()
    return [first, second, x - first - second]
