"""Operations of Triton's language on narrow formats, against torch and against exact arithmetic."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from packaging.version import Version
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder

from tiebreak.backends.emulation.rounding import fma
from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.kernels.kernel import OutOfBoundsError

Launch = Callable[..., None]
N = 32


def _random(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _pair_sum(a: Any, x: Any, b: Any, y: Any) -> Any:
    return a + b, tl.maximum(x, y)


def _reductions(X: Any, Y: Any, Z: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    x = tl.load(X + row[:, None] * N + row[None, :])
    tl.store(Y + row, tl.sum(x, 1))
    tl.store(Y + N + row, tl.max(x, 1))
    tl.store(Y + 2 * N + row, tl.min(x, 0))
    tl.store(Y + 3 * N + row, x.sum(0))
    total, largest = tl.reduce((x, x), 1, _pair_sum)
    tl.store(Z + row, total)
    tl.store(Z + N + row, largest)
    tl.store(Z + 2 * N + row, tl.argmax(x.to(tl.float32), 1).to(tl.bfloat16))


def test_reductions_of_bf16(launch: Launch) -> None:
    x = _random(N, N).bfloat16()
    y, z = torch.zeros(4, N, dtype=torch.bfloat16), torch.zeros(3, N, dtype=torch.bfloat16)
    launch(_reductions, x, y, z, N=N)
    wide = x.double()
    expected = [wide.sum(1).float(), x.amax(1), x.amin(0), wide.sum(0).float()]
    assert torch.equal(y, torch.stack([row.bfloat16() for row in expected]))
    assert torch.equal(z[1], x.amax(1))
    assert torch.equal(z[2], x.argmax(1).bfloat16())
    # Rounded at every one of log2(N) steps.
    assert (z[0].double() - wide.sum(1)).abs().max() <= 5 * 2.0**-8 * wide.abs().sum(1).max()


def _scans(X: Any, Y: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    x = tl.load(X + row)
    tl.store(Y + row, tl.cumsum(x, 0))
    tl.store(Y + N + row, tl.cumsum(x, 0, reverse=True))
    tl.store(Y + 2 * N + row, tl.sort(x.to(tl.float32)).to(tl.bfloat16))


def test_scans_and_sorts_of_bf16(launch: Launch) -> None:
    x = torch.randint(-3, 4, (N,), generator=torch.Generator().manual_seed(3)).bfloat16()
    y = torch.zeros(3, N, dtype=torch.bfloat16)
    launch(_scans, x, y, N=N)
    assert torch.equal(y[0], x.cumsum(0))
    assert torch.equal(y[1], x.flip(0).cumsum(0).flip(0))
    assert torch.equal(y[2], x.sort().values)


def _contracted(X: Any, Y: Any, Z: Any, O: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    x, y, z = tl.load(X + row), tl.load(Y + row), tl.load(Z + row)
    tl.store(O + row, x * y + z)
    tl.store(O + N + row, x * y - z)
    tl.store(O + 2 * N + row, z - x * y)
    tl.store(O + 3 * N + row, z + (-(x * y)))
    tl.store(O + 4 * N + row, x * y + z * x)
    product = x * y
    tl.store(O + 5 * N + row, tl.sum(product[:, None] - z[:, None], 1))
    tl.store(O + 6 * N + row, tl.maximum(product, product) + z)


@pytest.mark.parametrize("fusing", [True, False])
def test_a_product_goes_unrounded_into_a_sum_where_the_card_contracts(launch: Launch, fusing: bool) -> None:
    x, y, z = _random(3, N, seed=4)
    sums = torch.zeros(7, N)
    card = replace(EXACT, name="contracting", contracts=True)
    launch(_contracted, x, y, z, sums, card=card, N=N, enable_fp_fusion=fusing)
    plain = torch.stack([x * y + z, x * y - z, z - x * y, z - x * y, x * y + z * x, x * y - z, x * y + z])
    # Of two products the left one is contracted; what has been through a maximum is no product any more.
    once = [fma(x, y, z), fma(x, y, -z), fma(-x, y, z), fma(-x, y, z), fma(x, y, z * x), fma(x, y, -z), plain[6]]
    if Version(triton.__version__) < Version("3.8"):
        once[3] = plain[3]  # a negation is 0 - x there, a sum of its own that takes the product in
    assert not torch.equal(torch.stack(once), plain)
    assert torch.equal(sums, torch.stack(once) if fusing else plain)


def _dots(A: Any, B: Any, C: Any, PRECISION: tl.constexpr, N: tl.constexpr) -> None:
    index = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    tl.store(C + index, tl.dot(tl.load(A + index), tl.load(B + index), input_precision=PRECISION))


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str
)
def test_products_of_narrow_formats_are_exact_and_rounded_once(dtype: torch.dtype, launch: Launch) -> None:
    a, b = ((20 * _random(N, N, seed=seed)).to(dtype) for seed in (5, 6))
    product = torch.zeros(N, N, dtype=torch.int32 if dtype is torch.int8 else torch.float32)
    launch(_dots, a, b, product, PRECISION="ieee", N=N)
    assert torch.equal(product.float(), (a.double() @ b.double()).float())


def test_products_of_fp32_look_at_as_many_bits_as_asked(launch: Launch) -> None:
    a, b = _random(N, N, seed=7), _random(N, N, seed=8)
    cut = [(operand.view(torch.int32) & ~0x1FFF).view(torch.float32) for operand in (a, b)]
    products = {name: torch.zeros(N, N) for name in ("ieee", "tf32", "tf32x3")}
    for name, out in products.items():
        launch(_dots, a, b, out, PRECISION=name, N=N)
    exact = a.double() @ b.double()
    assert torch.equal(products["ieee"], exact.float())
    assert torch.equal(products["tf32"], (cut[0].double() @ cut[1].double()).float())
    # Each operand loses 2^-20 at most, and three sums round.
    assert ((products["tf32x3"].double() - exact).abs() <= 2.0**-19 * (a.abs().double() @ b.abs().double())).all()
    assert not torch.equal(products["tf32x3"], products["ieee"])


def _dot_scaled(A: Any, SA: Any, B: Any, SB: Any, C: Any, N: tl.constexpr, K: tl.constexpr) -> None:
    row, inner, block = tl.arange(0, N), tl.arange(0, K), tl.arange(0, K // 32)
    a = tl.load(A + row[:, None] * K + inner[None, :])
    b = tl.load(B + inner[:, None] * N + row[None, :])
    sa = tl.load(SA + row[:, None] * (K // 32) + block[None, :])
    sb = tl.load(SB + row[:, None] * (K // 32) + block[None, :])
    c = tl.dot_scaled(a, sa, "e4m3", b, sb, "e5m2")
    tl.store(C + row[:, None] * N + row[None, :], c)


def test_products_of_scaled_blocks_are_exact(launch: Launch) -> None:
    k, generator = 64, torch.Generator().manual_seed(10)
    a, b = _random(N, k, seed=11).to(torch.float8_e4m3fn), _random(k, N, seed=12).to(torch.float8_e5m2)
    sa, sb = torch.randint(120, 134, (2, N, k // 32), generator=generator).to(torch.uint8)
    product = torch.zeros(N, N)
    launch(_dot_scaled, a, sa, b, sb, product, N=N, K=k)
    scale_a, scale_b = (2.0 ** (scales.double() - 127).repeat_interleave(32, 1) for scales in (sa, sb))
    expected = (a.double() * scale_a) @ (b.double() * scale_b.T)
    assert torch.equal(product, expected.float())


def _functions(X: Any, Y: Any, Z: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    x = tl.load(X + row)
    tl.store(Y + row, tl.exp(x))
    tl.store(Y + N + row, tl.exp2(x))
    tl.store(Y + 2 * N + row, tl.log(tl.abs(x)))
    tl.store(Y + 3 * N + row, tl.rsqrt(tl.abs(x)))
    tl.store(Y + 4 * N + row, tl.erf(x))
    tl.store(Y + 5 * N + row, tl.math.exp2(x))
    tl.store(Z + row, x.to(tl.bfloat16, fp_downcast_rounding="rtz"))
    tl.store(Z + N + row, x.to(tl.bfloat16, fp_downcast_rounding="rtne"))


def test_functions_are_rounded_once_and_casts_as_the_kernel_asks(launch: Launch) -> None:
    x = _random(N, seed=13) * 3
    results, casts = torch.zeros(6, N), torch.zeros(2, N, dtype=torch.bfloat16)
    launch(_functions, x, results, casts, N=N)
    wide = x.double()
    exact = [wide.exp(), wide.exp2(), wide.abs().log(), wide.abs().rsqrt(), wide.erf(), wide.exp2()]
    assert torch.equal(results, torch.stack(exact).float())
    assert torch.equal(casts[0].float(), (x.view(torch.int32) & ~0xFFFF).view(torch.float32))
    assert torch.equal(casts[1], x.bfloat16())


def _beyond(X: Any, Y: Any, shift: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    tl.store(Y + row, tl.load(X + row + shift))


def _before(X: Any, Y: Any, shift: Any, N: tl.constexpr) -> None:
    row = tl.arange(0, N)
    tl.store(Y + row - shift, tl.load(X + row))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_beyond, "_beyond reads outside of its argument X: element 34 of 32"),
        (_before, "_before writes outside of its argument Y: element -3 of 32"),
    ],
)
def test_an_access_out_of_bounds_names_the_kernel_and_the_argument(
    function: Callable[..., None], message: str, launch: Launch
) -> None:
    with pytest.raises(OutOfBoundsError) as raised:
        launch(function, torch.zeros(N), torch.zeros(N), 3, N=N)
    assert str(raised.value) == message
    launch(function, torch.zeros(N), torch.zeros(N), 0, N=N)


def _descriptors(X: Any, Y: Any, N: tl.constexpr) -> None:
    source = tl.make_tensor_descriptor(X, [N, N], [N, 1], [16, 16])
    target = tl.make_tensor_descriptor(Y, [N, N], [N, 1], [16, 16])
    target.store([16, 0], source.load([0, 16]) + source.load([16, 16]))


def _block_pointers(X: Any, Y: Any, N: tl.constexpr) -> None:
    source = tl.make_block_ptr(X, (N, N), (N, 1), (0, 16), (16, 16), (1, 0))
    target = tl.make_block_ptr(Y, (N, N), (N, 1), (16, 0), (16, 16), (1, 0))
    tl.store(target, tl.load(source) + tl.load(tl.advance(source, (16, 0))))


@pytest.mark.parametrize("function", [_descriptors, _block_pointers])
def test_tiles_of_bf16_by_what_describes_them(function: Callable[..., None], launch: Launch) -> None:
    if function is _block_pointers and not hasattr(InterpreterBuilder, "create_make_block_ptr"):
        pytest.skip("this Triton has none")
    x, y = _random(N, N, seed=15).bfloat16(), torch.zeros(N, N, dtype=torch.bfloat16)
    launch(function, x, y, N=N)
    assert torch.equal(y[16:, :16], x[:16, 16:] + x[16:, 16:])
    assert not y[:16].any()


def test_numbers_of_the_8_bit_formats_are_themselves(launch: Launch) -> None:
    """All 256 of each, loaded, widened and stored again."""

    def there_and_back(X: Any, Y: Any, W: Any, N: tl.constexpr) -> None:
        row = tl.arange(0, N)
        x = tl.load(X + row)
        tl.store(W + row, x.to(tl.float32))
        tl.store(Y + row, x.to(tl.float32).to(x.dtype))

    for dtype in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        codes = torch.arange(256).to(torch.uint8)
        x, wide = codes.view(getattr(torch, dtype)), torch.zeros(256)
        y = torch.zeros(256, dtype=torch.uint8).view(x.dtype)
        launch(there_and_back, x, y, wide, N=256)
        expected = codes.numpy().view(getattr(ml_dtypes, dtype)).astype(np.float32)
        number = np.isfinite(expected)  # a cast saturates: Inf is none any more
        assert np.array_equal(wide.numpy()[number], expected[number])
        assert np.array_equal(y.view(torch.uint8).numpy()[number], codes.numpy()[number])
