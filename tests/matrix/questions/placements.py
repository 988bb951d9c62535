"""Where the numbers of a tensor may lie in memory: as frameworks pass views, and with something behind the end.

A placement takes a contiguous tensor of four dimensions, whose second and third are heads and tokens in either order,
and returns the same numbers in a separate storage.
"""

import torch
from torch import Tensor

_BEHIND = 64  # elements more in every dimension that a storage goes on in: as many as a tile, and aligned as before
_FLAT = 2**14  # elements more behind a contiguous tensor
_PARTS = 3  # of a buffer that holds q, k and v


def transposed(x: Tensor) -> Tensor:
    """Return `x` with heads and tokens exchanged in memory, as a transposed view of (batch, N, heads, d)."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def fused(x: Tensor) -> Tensor:
    """Return `x` as a slice of the buffer that one product with the weights of q, k and v leaves."""
    batch, first, second, d = x.shape
    buffer = x.new_empty(batch, second, _PARTS, first, d)
    buffer[:] = -x.transpose(1, 2)[:, :, None]
    buffer[:, :, 1] = x.transpose(1, 2)
    return buffer[:, :, 1].transpose(1, 2)


def expanded(x: Tensor) -> Tensor:
    """Return one number with strides of 0, as `O.sum().backward()` makes dO. All of `x` must be equal."""
    return x.flatten()[:1].expand(x.shape)


def within_nan(x: Tensor) -> Tensor:
    """Return `x` as a slice of a storage that has NaN after the last head, token and column."""
    buffer = x.new_full((x.shape[0], *(size + _BEHIND for size in x.shape[1:])), torch.nan)
    view = buffer[:, : x.shape[1], : x.shape[2], : x.shape[3]]
    view.copy_(x)
    return view


def before_nan(x: Tensor) -> Tensor:
    """Return `x` contiguous, with NaN after the last element."""
    buffer = x.new_full((x.numel() + _FLAT,), torch.nan)
    buffer[: x.numel()] = x.flatten()
    return buffer[: x.numel()].view(x.shape)


def far_apart(x: Tensor) -> Tensor:
    """Return `x` with its last entry of the batch 2^31 elements behind the one before, in memory that is mapped lazily.

    RuntimeError: the system promises no such amount of memory.
    """
    stride = (2**31, *x[0].contiguous().stride())
    view = x.new_empty(2**31 * (len(x) - 1) + x[0].numel()).as_strided(x.shape, stride)
    view.copy_(x)
    return view


def misaligned(x: Tensor) -> Tensor:
    """Return `x` contiguous, one element after an address that a wide load can start at."""
    buffer = x.new_empty(x.numel() + 1)
    view = buffer[1:].view(x.shape)
    view.copy_(x)
    return view


def read_as_contiguous(x: Tensor) -> Tensor:
    """Return the numbers that a kernel reads from a view if it ignores strides: wrong ones."""
    return x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())
