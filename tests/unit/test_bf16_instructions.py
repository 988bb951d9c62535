"""Arm's and x86's bf16 instructions: against rationals, and against themselves where QEMU or a processor runs them."""

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from tiebreak.backends.backend import CPU
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.arm import add_pairs, arm_bf16_matmul
from tiebreak.backends.emulation.x86 import add_dots, amx_matmul
from tiebreak.backends.platform import cpu_features
from tiebreak.cases.errors import signed_error_ulps
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import BF16, FP32
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.kernels.reference import reference
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import PREDICTION

Array = NDArray[Any]
Make = Callable[[np.random.Generator, tuple[int, ...]], Array]
TILES, ROWS = 10_000, 20_000
COMPILER, QEMU = shutil.which("aarch64-linux-gnu-gcc"), shutil.which("qemu-aarch64-static")
X86_COMPILER, HAS_IT = shutil.which("gcc"), "avx512_bf16" in cpu_features()
SPECIAL = [0, 0x8000, 1, 0x8001, 0x7F, 0x80, 0x8080, 0x3F80, 0xBF80, 0x7F7F, 0xFF7F, 0x7F80, 0xFF80, 0x7FC0, 0x0100]


def _patterns(lowest: int, highest: int) -> Make:
    """bf16 patterns of both signs whose exponent fields lie between two."""

    def make(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
        fields, fractions, signs = (rng.integers(*ends, shape) for ends in ((lowest, highest), (0, 128), (0, 2)))
        return (fields << 7 | fractions | signs << 15).astype(np.uint16)

    return make


# Exponent fields: around 1, far apart, products that are subnormal, products beyond fp32, all there are.
KINDS: dict[str, Make] = {
    "normal": _patterns(120, 134),
    "wide": _patterns(64, 190),
    "tiny": _patterns(0, 70),
    "huge": _patterns(180, 255),
    "any": lambda rng, shape: rng.integers(0, 2**16, shape).astype(np.uint16),
    "special": lambda rng, shape: rng.choice(np.array(SPECIAL, np.uint16), shape),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def _tiles(kind: str, count: int) -> tuple[Array, Array, Array]:
    """Patterns of a (count, 2, 8), b transposed (count, 2, 8) and c (count, 2, 2), the last of fp32."""
    rng = np.random.default_rng(list(KINDS).index(kind))
    a, b = (KINDS[kind](rng, (count, 2, 8)) for _ in range(2))
    c = KINDS[kind](rng, (count, 2, 2)).astype(np.uint32) << 16 | rng.integers(0, 2**16, (count, 2, 2), np.uint32)
    return a, b, c


def _emulated(a: Array, b: Array, c: Array) -> Array:
    wide = [torch.from_numpy((x.astype(np.uint32) << 16).view(np.float32)) for x in (a, b)]
    return add_pairs(wide[0], wide[1].mT, torch.from_numpy(c.view(np.float32))).numpy().view(np.uint32)


def _same(x: Array, y: Array) -> bool:
    """To the bit, but for a NaN's."""
    return bool(((x == y) | (np.isnan(x.view(np.float32)) & np.isnan(y.view(np.float32)))).all())


def _flushed(x: Fraction) -> Fraction:
    return Fraction(0) if abs(x) < Fraction(2) ** FP32.min_exponent else x


def _to_odd(x: Fraction) -> Fraction:
    """Of the two fp32 numbers around a normal one that fp32 lacks, the one whose last bit is 1."""
    x = _flushed(x)
    if not x:
        return x
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    last = Fraction(2) ** (exponent - FP32.mantissa_bits)
    whole = int(abs(x) / last)
    odd = whole if whole * last == abs(x) else whole | 1
    return odd * last * (1 if x > 0 else -1)


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny"])
def test_pairs_are_rounded_to_odd_twice(kind: str) -> None:
    a, b, c = _tiles(kind, 8)
    product = _emulated(a, b, c).view(np.float32)
    wide = [(x.astype(np.uint32) << 16).view(np.float32).astype(float) for x in (a, b)]
    for tile, i, j in np.ndindex(8, 2, 2):
        total = _flushed(Fraction(float(c.view(np.float32)[tile, i, j])))
        terms = [
            _flushed(_flushed(Fraction(x)) * _flushed(Fraction(y)))
            for x, y in zip(wide[0][tile, i].tolist(), wide[1][tile, j].tolist(), strict=True)
        ]
        for first, second in zip(terms[::2], terms[1::2], strict=True):
            total = _to_odd(total + _to_odd(first + second))
        assert Fraction(float(product[tile, i, j])) == total


def test_a_tail_that_fp32_loses_leaves_its_mark_in_the_last_bit() -> None:
    # 1 + 2^-8 is a tie between two numbers of bf16, and 2^-30 tips it, far below fp32's ulp.
    a, ones = torch.tensor([[1.0, 2.0**-8, 2.0**-30, 0.0]]), torch.ones(4, 1)
    assert arm_bf16_matmul(a, ones).item() == 1.0 + 2.0**-8 + 2.0**-23
    rounded = {
        accumulator: EmulatedArithmetic().matmul(a, ones, Cast(BF16), accumulator).item()
        for accumulator in (Accumulator.EXACT, Accumulator.BFMMLA)
    }
    assert rounded == {Accumulator.EXACT: 1.0, Accumulator.BFMMLA: 1.0 + 2.0**-7}


def test_a_product_whose_sum_is_rounded_in_blocks_loses_what_each_block_adds() -> None:
    terms = torch.cat([torch.full((1, 1), 2.0**14), torch.ones(1, 2047)], 1)
    arithmetic, ones = EmulatedArithmetic(), torch.ones(2048, 1)
    assert arithmetic.matmul(terms, ones, Cast(BF16), Accumulator.EXACT).item() == 18432.0
    # 2^14 + 31 goes back to 2^14, and then 32 are half an ulp, every time.
    assert arithmetic.matmul(terms, ones, Cast(BF16, every=32), Accumulator.EXACT).item() == 2.0**14
    assert arithmetic.matmul(terms, ones, Cast(BF16, every=4096), Accumulator.EXACT).item() == 18432.0


def test_eager_attention_in_blocks_adds_the_errors_of_each() -> None:
    """What PyTorch 2.9.1 was seen to do under QEMU, with bf16 instructions: +0.35 ulp, where whole sums have +0.11."""
    (case,) = (case for case in SCRIPTED if case.name == "ties_across_long_blocks")
    inputs = case.make(1, 0, 32, BF16)
    exact = reference(inputs).o
    biases = {}
    for plan in ("standard,s=input", "standard,s=input,o_bar=input/512"):
        told = parse_declaration(plan)
        output = told.algorithm.forward(inputs, told.plan, told.shift_rule, EmulatedArithmetic(), told.block)
        biases[plan] = signed_error_ulps(output.o, exact, BF16).mean().item()
    assert list(biases.values()) == pytest.approx([0.11, 0.35], abs=0.03)


def test_a_cell_that_fell_says_what_predicts_it() -> None:
    class OnArm(EmulatedArithmetic):
        def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
            return super().matmul(a, b, cast, Accumulator.BFMMLA)

    (case,) = (case for case in SCRIPTED if case.name == "faint_tail")
    cell = Cell(replace(CPU, arithmetic=OnArm()), composed_kernel("flash@paper"), Call(case), BF16)
    answer = run_cell(cell, Workbench(Settings(heads=64))).answers[PREDICTION]
    assert answer.met is False
    assert answer.why.endswith("; flash@paper,accumulator=bfmmla, as this device multiplies, does")


@pytest.mark.skipif(COMPILER is None or QEMU is None, reason="no aarch64-linux-gnu-gcc or no qemu-aarch64-static here")
@each_kind
def test_the_instructions_themselves_agree_to_the_bit(kind: str, tmp_path: Path) -> None:
    assert COMPILER is not None
    assert QEMU is not None
    program, source = tmp_path / "tiles", Path(__file__).with_name("bf16_tiles.c")
    subprocess.run([COMPILER, "-static", "-O2", "-march=armv8.2-a+bf16", "-o", program, source], check=True)
    a, b, c = _tiles(kind, TILES)
    given = np.zeros(TILES, [("a", "u2", (2, 8)), ("b", "u2", (2, 8)), ("c", "u4", (2, 2))])
    given["a"], given["b"], given["c"] = a, b, c
    done = subprocess.run([QEMU, "-cpu", "max", program], input=given.tobytes(), capture_output=True, check=True)
    by_bfmmla, by_bfdot = np.frombuffer(done.stdout, np.uint32).reshape(TILES, 2, 2, 2).swapaxes(0, 1)
    emulated = _emulated(a, b, c)
    assert _same(by_bfmmla, emulated)
    assert _same(by_bfdot, emulated)


def _rows(kind: str, count: int) -> tuple[Array, Array, Array]:
    """Patterns of a and b (count, 8), and of c (count), the last of fp32."""
    rng = np.random.default_rng(list(KINDS).index(kind))
    a, b = (KINDS[kind](rng, (count, 8)) for _ in range(2))
    return a, b, KINDS[kind](rng, (count,)).astype(np.uint32) << 16 | rng.integers(0, 2**16, (count,), np.uint32)


def _emulated_rows(a: Array, b: Array, c: Array) -> Array:
    wide = [torch.from_numpy((x.astype(np.uint32) << 16).view(np.float32)) for x in (a, b)]
    total = add_dots(wide[0][:, None, :], wide[1][:, :, None], torch.from_numpy(c.view(np.float32))[:, None, None])
    return total.numpy().view(np.uint32)[:, 0, 0]


@pytest.mark.skipif(X86_COMPILER is None or not HAS_IT, reason="no gcc here, or a processor without AVX512_BF16")
@pytest.mark.parametrize("kind", KINDS)
def test_the_instruction_itself_agrees_to_the_bit(kind: str, tmp_path: Path) -> None:
    assert X86_COMPILER is not None
    program, source = tmp_path / "dots", Path(__file__).with_name("bf16_dots.c")
    subprocess.run([X86_COMPILER, "-O2", "-mavx512bf16", "-mavx512vl", "-o", program, source], check=True)
    a, b, c = _rows(kind, ROWS)
    given = np.zeros(ROWS, [("a", "u2", 8), ("b", "u2", 8), ("c", "u4")])
    given["a"], given["b"], given["c"] = a, b, c
    done = subprocess.run([program], input=given.tobytes(), capture_output=True, check=True)
    assert _same(np.frombuffer(done.stdout, np.uint32), _emulated_rows(a, b, c))


def _to_even(x: Fraction) -> Fraction:
    """The nearest fp32 number to a normal one."""
    exponent = 0
    while abs(x) >= Fraction(2) ** (exponent + 1):
        exponent += 1
    while x and abs(x) < Fraction(2) ** exponent:
        exponent -= 1
    last = Fraction(2) ** (exponent - FP32.mantissa_bits)
    return round(x / last) * last


def test_amx_adds_even_and_odd_terms_apart_as_its_document_says() -> None:
    a, b, _ = _rows("normal", 16)
    wide = [(x.astype(np.uint32) << 16).view(np.float32).reshape(2, 64) for x in (a, b)]
    product = amx_matmul(*(torch.from_numpy(x) for x in (wide[0], wide[1].T.copy())))
    for i, j in np.ndindex(2, 2):
        total = Fraction(0)
        for start in (0, 32):
            sums = [Fraction(0), Fraction(0)]
            for k in range(start, start + 32):
                term = Fraction(float(wide[0][i, k])) * Fraction(float(wide[1][j, k]))
                sums[k % 2] = _to_even(sums[k % 2] + term)
            total = _to_even(total + _to_even(sums[0] + sums[1]))
        assert Fraction(product[i, j].item()) == total


def test_in_which_order_terms_are_added() -> None:
    ulp = 2.0**-23
    rows = torch.tensor([[ulp / 2, ulp / 2, 1.0, 0.0], [0.0, 1.0, ulp / 2, ulp / 2]])
    sums = {
        accumulator: EmulatedArithmetic().matmul(rows, torch.ones(4, 1), Cast(FP32), accumulator).flatten().tolist()
        for accumulator in (Accumulator.EXACT, Accumulator.VDPBF16, Accumulator.AMX)
    }
    assert sums == {
        Accumulator.EXACT: [1.0 + ulp, 1.0 + ulp],
        Accumulator.VDPBF16: [1.0 + ulp, 1.0],
        Accumulator.AMX: [1.0, 1.0],
    }


@pytest.mark.parametrize(
    ("factor", "addend", "total"),
    [
        (2.0**64, -FP32.largest, 2.0**104),
        (2.0**-75, 2.0**-126 + 2.0**-149, 2.0**-126 + 2.0**-148),  # a tie, to even
        (2.0**-63 + 2.0**-70, -(2.0**-126), 0.0),  # a subnormal sum
    ],
)
def test_a_product_that_fp32_lacks_is_added_unrounded_and_what_is_subnormal_is_flushed(
    factor: float, addend: float, total: float
) -> None:
    x = torch.tensor([[factor]])
    assert add_dots(x, x, torch.tensor([[addend]])).item() == total
