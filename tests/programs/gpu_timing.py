"""Time on a GPU, of several kernels side by side. Not run on a GPU yet."""

from collections.abc import Callable, Mapping
from statistics import median

import torch

_L2_CACHES = 2  # that a flush writes: what was in the one is gone
_BACKWARD_PRODUCTS = 2.5  # for each of the forward pass: S again, dP, dV, dQ and dK beside S and P V


def forward_flops(batch: int, heads: int, n: int, d: int, *, causal: bool) -> float:
    """Floating-point operations of the forward pass, as FlashAttention's papers count them.

    Args:
        batch, heads, n, d: shape of q, k and v.
        causal: whether half of the scores are masked out and not counted.

    Returns:
        Those of the two matrix products, a multiply-add counting as two.
    """
    return 4.0 * batch * heads * n * n * d / (2.0 if causal else 1.0)


def backward_flops(batch: int, heads: int, n: int, d: int, *, causal: bool) -> float:
    """Floating-point operations of the backward pass, counted as `forward_flops` does: five matrix products."""
    return _BACKWARD_PRODUCTS * forward_flops(batch, heads, n, d, causal=causal)


def l2_flush(device: str = "cuda") -> Callable[[], object]:
    """A call that writes more memory than the GPU's L2 cache holds, so that what is timed next finds nothing there."""
    size = _L2_CACHES * int(torch.cuda.get_device_properties(device).L2_cache_size)
    return torch.empty(size, dtype=torch.uint8, device=device).zero_


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def side_by_side(
    calls: Mapping[str, Callable[[], object]], flush: Callable[[], object], *, rounds: int
) -> dict[str, float]:
    """Time several calls in turns, so that a clock that drifts does so for all of them.

    Args:
        calls: what to time, by name; each runs once before the clock does, to be compiled.
        flush: empties the cache, before every call.
        rounds: how often each call is timed.

    Returns:
        Milliseconds of each, between two events on the GPU: the median over the rounds.
    """
    for call in calls.values():
        call()
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = _event(), _event()
            flush()
            start.record()
            call()
            end.record()
            events[name].append((start, end))
    # Only now: a wait after every call would add the time of a launch to it.
    torch.cuda.synchronize()
    return {name: median(start.elapsed_time(end) for start, end in pairs) for name, pairs in events.items()}
