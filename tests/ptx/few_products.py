# mypy: ignore-errors
"""Products that go into sums: at once, and behind a branch."""

import torch
import triton
import triton.language as tl


@triton.jit
def products(X, Y, O, steps, number, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    x, y = tl.load(X + at), tl.load(Y + at)
    first, second = x, x
    for step in range(steps):
        first = first * y + x
        second = second * y
        other = x
        if step < number:
            other = tl.load(X + COUNT + at)
        second = second + other
    tl.store(O + at, first)
    tl.store(O + COUNT + at, second)


def sums(x, y, number):
    o = torch.empty_like(x)
    products[(1,)](x, y, o, 4, number, COUNT=x.numel() // 2, num_warps=1)
    return o
