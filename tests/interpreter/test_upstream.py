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
from packaging.version import Version
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.formats import BF16, Rounding

Launch = Callable[..., None]
N = 16
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


def _less(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    x = tl.load(X + index)
    tl.store(Y + index, tl.where(x < tl.load(Y + index), 1.0, 0.0).to(tl.bfloat16))


def _to_8_bits(X: Any, Y: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.load(X + index).to(tl.float8e4nv))


def _scaled(X: Any, Y: Any, scale: Any, N: tl.constexpr) -> None:
    index = tl.arange(0, N)
    tl.store(Y + index, tl.load(X + index) * (scale * 1.4426950408889634))


def _added(Y: Any, N: tl.constexpr) -> None:
    tl.atomic_add(Y + tl.arange(0, N) * 0, tl.full([N], 1.0, tl.bfloat16))


def test_the_cast_to_bf16_truncates(launch: Launch) -> None:
    """Triton issue 11584."""
    x = torch.tensor([1.0 + 2.0**-8 + 2.0**-9, -1.0 - 2.0**-8 - 2.0**-9] * 8)
    theirs, ours = torch.zeros(2, N, dtype=torch.bfloat16)
    _upstream(_cast, x, theirs, N=N)
    assert torch.equal(theirs.float(), round_to(x, BF16, Rounding.TOWARD_ZERO))
    launch(_cast, x, ours, N=N)
    assert torch.equal(ours.float(), round_to(x, BF16))


def test_products_of_bf16_are_those_of_raw_bits(launch: Launch) -> None:
    """Triton issue 11584."""
    a, b = torch.randn(2, N, N, generator=torch.Generator().manual_seed(1)).bfloat16()
    theirs, ours = torch.zeros(2, N, N)
    _upstream(_product, a, b, theirs, N=N)
    assert (
        torch.allclose(theirs, a.view(torch.int16).float() @ b.view(torch.int16).float(), rtol=1e-2)
        or (theirs - a.float() @ b.float()).abs().max() > 1e3
    )
    launch(_product, a, b, ours, N=N)
    assert torch.equal(ours, (a.double() @ b.double()).float())


ELEMENTWISE = [
    (_sum, lambda x, y: x + x),
    (_negated, lambda x, y: -x),
    (_largest, torch.maximum),
    (_less, lambda x, y: (x < y).to(torch.bfloat16)),
]


@pytest.mark.parametrize(("function", "right"), ELEMENTWISE, ids=["sum", "negation", "maximum", "comparison"])
def test_arithmetic_of_bf16_is_that_of_integers(
    function: Callable[..., None], right: Callable[[Tensor, Tensor], Tensor], launch: Launch
) -> None:
    x, y = torch.randn(2, N, generator=torch.Generator().manual_seed(2)).bfloat16()
    theirs, ours = y.clone(), y.clone()
    _upstream(function, x, theirs, N=N)
    # Before Triton 3.9 the language itself takes a maximum in fp32.
    assert torch.equal(theirs, right(x, y)) == (function is _largest and Version(triton.__version__) < Version("3.9"))
    launch(function, x, ours, N=N)
    assert torch.equal(ours, right(x, y))


def test_casts_to_8_bits_round_half_up_and_do_not_saturate(launch: Launch) -> None:
    x = torch.tensor([1.0625, 1.1875, 500.0, 1000.0] * 4)
    theirs, ours = torch.zeros(2, N).to(torch.float8_e4m3fn)
    _upstream(_to_8_bits, x, theirs, N=N)
    assert theirs.float()[0] == 1.125  # a tie, whose even neighbour is 1
    assert not torch.equal(theirs.float()[2:4], torch.tensor([448.0, 448.0]))
    launch(_to_8_bits, x, ours, N=N)
    assert ours.float()[:4].tolist() == [1.0, 1.25, 448.0, 448.0]


def test_a_number_among_the_arguments_is_one_of_fp64(launch: Launch) -> None:
    """A compiled kernel gets it in fp32, and multiplies there."""
    scale = 1.1
    x, (theirs, ours) = torch.ones(N), torch.zeros(2, N)
    in_fp32 = float(np.float32(scale) * np.float32(1.4426950408889634))
    in_fp64 = float(np.float32(scale * 1.4426950408889634))
    assert in_fp32 != in_fp64
    _upstream(_scaled, x, theirs, scale, N=N)
    assert theirs[0].item() == in_fp64
    launch(_scaled, x, ours, scale, N=N)
    assert ours[0].item() == in_fp32


def test_atomics_of_bf16_are_missing_or_wrong(launch: Launch) -> None:
    ours, theirs = torch.zeros(2, 1, dtype=torch.bfloat16)
    try:
        _upstream(_added, theirs, N=N)
    except Exception:
        theirs.fill_(torch.nan)
    assert theirs.item() != N
    launch(_added, ours, N=N)
    assert ours.item() == N
