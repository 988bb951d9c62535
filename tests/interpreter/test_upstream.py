"""What upstream's interpreter does with narrow formats, and what is done here instead.

A test that falls because upstream has come right may go, and with it what the builder does otherwise.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

Launch = Callable[..., None]
N = 16
LOG2_E = 1.4426950408889634
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def _upstream(function: Callable[..., None], *args: object, **constants: object) -> None:
    """Upstream's interpreter, as its users get it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        triton.jit(function)[(1,)](*args, **constants)


def _cast(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.load(X + index).to(tl.bfloat16))


def _product(A: Any, B: Any, C: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(C + index, tl.dot(tl.load(A + index), tl.load(B + index)))


def _sum(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.load(X + index) + tl.load(X + index))


def _negated(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, -tl.load(X + index))


def _largest(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.maximum(tl.load(X + index), tl.load(Y + index)))


def _less(X: Any, Y: Any, Z: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Z + index, tl.where(tl.load(X + index) < tl.load(Y + index), 1.0, 0.0).to(tl.bfloat16))


def _to_8_bits(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.load(X + index).to(tl.float8e4nv))


def _scaled(X: Any, Y: Any, scale: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.load(X + index) * (scale * 1.4426950408889634))


def _added(Y: Any, N: tl.constexpr) -> None:
    tl.atomic_add(Y + tl.arange(0, N) * 0, tl.full([N], 1.0, tl.bfloat16))


X, Y = torch.randn(2, N, generator=torch.Generator().manual_seed(2)).bfloat16()
A, B = torch.randn(2, N, N, generator=torch.Generator().manual_seed(1)).bfloat16()
BESIDE_A_TIE = torch.tensor([1.0 + 2.0**-8 + 2.0**-9, -1.0 - 2.0**-8 - 2.0**-9] * 8)
LARGE = torch.tensor([1.0625, 1.1875, 500.0, 1000.0] * 4)
# What upstream does; a kernel, its arguments around the output, and what that should be.
WRONG: dict[str, tuple[Callable[..., None], tuple[Tensor, ...], tuple[object, ...], Tensor]] = {
    "casts to bf16 truncate (triton issue 11584)": (_cast, (BESIDE_A_TIE,), (), BESIDE_A_TIE.bfloat16()),
    "products are those of raw bits (11584)": (_product, (A, B), (), (A.double() @ B.double()).float()),
    "sums are those of integers": (_sum, (X,), (), X + X),
    "negations are those of integers": (_negated, (X,), (), -X),
    "comparisons are those of integers": (_less, (X, Y), (), (X < Y).bfloat16()),
    "casts to 8 bits round half up and do not saturate": (
        _to_8_bits, (LARGE,), (), torch.tensor([1.0, 1.25, 448.0, 448.0] * 4).to(torch.float8_e4m3fn)
    ),
    # A compiled kernel gets it in fp32, and multiplies there.
    "a number among the arguments is one of fp64": (
        _scaled, (torch.ones(N),), (1.1,), torch.full((N,), float(np.float32(1.1) * np.float32(LOG2_E)))
    ),
    "atomics of bf16 are missing": (_added, (), (), torch.full((1,), float(N)).bfloat16()),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_upstream_is_wrong_where_the_builder_differs(name: str, launch: Launch) -> None:
    function, before, after, right = WRONG[name]
    theirs, ours = torch.zeros_like(right), torch.zeros_like(right)
    try:
        _upstream(function, *before, theirs, *after, N=N)
    except Exception:
        theirs = torch.full_like(right, torch.nan)
    assert not torch.equal(theirs.float(), right.float())
    launch(function, *before, ours, *after, N=N)
    assert torch.equal(ours.float(), right.float())


def test_a_maximum_of_bf16_is_right_here(launch: Launch) -> None:
    """Before Triton 3.9 the language itself takes it in fp32, and upstream's is right too."""
    ours = Y.clone()
    launch(_largest, X, ours, N=N)
    assert torch.equal(ours, torch.maximum(X, Y))
