"""Random numbers from a counter-based hash: the same bits in any order, on any device, in any language."""

from typing import Any

import numpy as np
import torch

_MASK = 0xFFFFFFFF


def random_bits(seed: int, *counters: torch.Tensor | int) -> torch.Tensor:
    """Return uniform 32-bit integers that depend on the seed and the counters alone.

    Every counter c takes the 32-bit state h to ``mix(mix(c) + h)``, starting from ``mix(seed + 0x9E3779B9)``, where
    mix is the finalizer *lowbias32* (C. Wellons, "Prospecting for Hash Functions", 2018,
    https://nullprogram.com/blog/2018/07/31/: shifts 16, 15, 16, multipliers 0x7FEB352D and 0x846CA68B) and the start
    constant is 2**32 divided by the golden ratio. All of it is addition, multiplication, xor and logical shift modulo
    2**32, so a Triton or CUDA kernel that writes it on uint32 gets the same bits.

    Counters are integers or integer tensors that broadcast against one another, each taken modulo 2**32; their order
    matters. With the one of most elements last, the work on the others is done once, not once an element. Returned is
    an int64 tensor of their common shape and device. ValueError: the seed is not in [0, 2**32). TypeError: a counter is
    not of an integer type.
    """
    if not 0 <= seed <= _MASK:
        raise ValueError(f"seed must be in [0, 2**32), not {seed}")
    state = _mix(seed + 0x9E3779B9)
    for counter in counters:
        # Without the inner mix, two rows of counters have the same numbers in another order whenever their states
        # differ in low bits only: among 4,096 rows of 4,096, some would.
        state = _mix(_mix(counter if isinstance(counter, int) else _wide(counter)) + state)
    return torch.as_tensor(state.astype(np.int64) if isinstance(state, np.ndarray) else state)


def _wide(counter: torch.Tensor) -> Any:
    if counter.is_floating_point() or counter.is_complex() or counter.dtype == torch.bool:
        raise TypeError(f"a counter is an int or an integer tensor, not {counter.dtype}")
    return counter.numpy().astype(np.uint32) if counter.device.type == "cpu" else counter.to(torch.int64)


def _mix(x: Any) -> Any:
    # Of an int, of NumPy's uint32, or of int64 that holds uint32: torch has no logical shift, and few operations on
    # uint32. A product may wrap around, which leaves its low 32 bits right. The first step makes a copy to write to.
    x = x & _MASK
    x ^= x >> 16
    x *= 0x7FEB352D
    x &= _MASK
    x ^= x >> 15
    x *= 0x846CA68B
    x &= _MASK
    x ^= x >> 16
    return x
