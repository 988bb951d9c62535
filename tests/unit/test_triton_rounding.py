"""Casts that no device has and noise of the Triton kernels, interpreted: bit for bit the emulation's."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.arithmetic import CAST_STREAM, DITHER_STREAM, Noise
from tiebreak.kernels.counter import random_bits
from tiebreak.kernels.flash import Block
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, Format, Rounding
from tiebreak.kernels.plans import FP32_PLAN
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.kernels.triton.compiling import not_interpreting, source
from tiebreak.kernels.triton.config import Config

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

import triton
import triton.language as tl

from tiebreak.backends.interpreter.assumptions import EXACT
from tiebreak.backends.interpreter.session import interpreting

rounded = source("rounding").rounded
absorb = source("rounding").absorb
row_state = source("rounding").row_state
SIZE = 4096


def _round(X: Any, R: Any, Y: Any, F: tl.constexpr, HOW: tl.constexpr, N: tl.constexpr) -> None:
    index = tl.program_id(0) * N + tl.arange(0, N)
    random = tl.load(R + index).to(tl.uint32, bitcast=True)
    tl.store(Y + index, rounded(tl.load(X + index), random, F, HOW))


def _noise(U: Any, B: Any, dither: Any, cast: Any, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    head = tl.program_id(0)
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, COLUMNS)[None, :]
    tl.store(U + head * ROWS + row, row_state(dither, head, row, C).to(tl.float32) * 2.0**-32)
    bits = absorb(row_state(cast, head, row, C), column)
    tl.store(B + (head * ROWS + row) * COLUMNS + column, bits.to(tl.int32, bitcast=True))


@pytest.fixture
def interpreted() -> Iterator[Callable[[Callable[..., None]], Any]]:
    """Makes a kernel of a function, and interprets it."""
    with interpreting(EXACT):
        yield triton.jit


def _as_int32(bits: Tensor) -> Tensor:
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32)


def _values(fmt: Format) -> Tensor:
    """Every kind of number: ties of both parities, their neighbours, subnormals, the largest, Inf, NaN, any bits."""
    generator = torch.Generator().manual_seed(3)
    numbers = round_to(torch.randn(SIZE, generator=generator).double().exp().float() * 4, fmt)
    ties = numbers.double() * (1.0 + fmt.unit_roundoff)
    steps = torch.arange(SIZE, dtype=torch.float64) * fmt.smallest_subnormal / 8
    top = fmt.largest * (1.0 + torch.linspace(-2, 2, 64, dtype=torch.float64) * fmt.unit_roundoff)
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 3e38, 1e-45])
    some_bits = torch.randint(-(2**31), 2**31, (8 * SIZE,), generator=generator).to(torch.int32).view(torch.float32)
    beside = [torch.nextafter(ties.float(), torch.tensor(x)) for x in (torch.inf, -torch.inf)]
    x = torch.cat([ties.float(), *beside, steps.float(), -steps.float(), top.float(), -top.float(), special, some_bits])
    return torch.nn.functional.pad(x, (0, -x.numel() % SIZE))


AWAY = [(fmt, Rounding.RTNA) for fmt in (BF16, FP16, FP8_E4M3, FP8_E5M2)]


@pytest.mark.parametrize(("fmt", "how"), [*AWAY, (BF16, Rounding.STOCHASTIC), (FP16, Rounding.STOCHASTIC)])
def test_the_kernels_casts_are_the_emulations(fmt: Format, how: Rounding, interpreted: Callable[..., Any]) -> None:
    x = _values(fmt)
    random, y = random_bits(7, torch.arange(x.numel())), torch.zeros_like(x)
    random[::5], random[1::5] = 0, 2**32 - 1
    interpreted(_round)[(x.numel() // SIZE,)](x, _as_int32(random), y, F=fmt, HOW=how.value, N=SIZE)
    expected = round_to(x, fmt, how, random_bits=random if how is Rounding.STOCHASTIC else None)
    assert torch.equal(y.isnan(), expected.isnan())
    number = ~expected.isnan()
    assert torch.equal(y[number].view(torch.int32), expected[number].view(torch.int32))


@pytest.mark.parametrize("seed", [0, 2**31, 2**32 - 5])
def test_the_kernels_random_numbers_are_the_noises(seed: int, interpreted: Callable[..., Any]) -> None:
    shape, noise = torch.Size([2, 3, 16, 8]), Noise(seed, heads=3)
    config = Config(FP32_PLAN, SHIFT_RULES["safe"], causal=False, d=8, block=Block(16, 16), query_heads=3)
    u, bits = torch.zeros(shape[:3]), torch.zeros(shape, dtype=torch.int32)
    starts = (_as_int32(random_bits(seed, stream)).item() for stream in (DITHER_STREAM, CAST_STREAM))
    interpreted(_noise)[(6,)](u, bits, *starts, C=config, ROWS=16, COLUMNS=8)
    assert torch.equal(u[..., None], noise.dither(shape, 0, u.device))
    assert torch.equal(bits, _as_int32(noise.bits(shape, 0, u.device)))
