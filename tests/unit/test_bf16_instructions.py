"""Arm's and x86's bf16 instructions: against rationals, and against themselves where QEMU or a processor runs them."""

import math
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
from tiebreak.backends.emulation.instructions import amx_matmul, bfmmla_matmul, vdpbf16_matmul
from tiebreak.backends.platform import cpu_features
from tiebreak.kernels.formats import BF16, FP32
from tiebreak.kernels.plans import Accumulator, Cast
from tiebreak.kernels.roster import composed_kernel
from tiebreak.reports.records.record import PREDICTION
from tiebreak.studies.cells import judged

Array = NDArray[Any]
Matmul = Callable[[Tensor, Tensor], Tensor]
Make = Callable[[np.random.Generator, tuple[int, ...]], Array]
TILES = 10_000
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


def _tiles(kind: str, count: int) -> tuple[Array, Array]:
    """Patterns of a and of b transposed, (count, 2, 8) each."""
    rng = np.random.default_rng(list(KINDS).index(kind))
    return KINDS[kind](rng, (count, 2, 8)), KINDS[kind](rng, (count, 2, 8))


def _numbers(patterns: Array) -> Tensor:
    return torch.from_numpy((patterns.astype(np.uint32) << 16).view(np.float32))


def _differing(matmul: Matmul, a: Array, b: Array, bits: Array) -> int:
    """How many elements of a product have other bits than these; a NaN's are not compared."""
    product = matmul(_numbers(a), _numbers(b).mT).numpy()
    return int(((product.view(np.uint32) != bits) & ~(np.isnan(product) & np.isnan(bits.view(np.float32)))).sum())


def _rounded(x: Fraction, whole: Callable[[Fraction], int]) -> Fraction:
    """A number on fp32's grid; 0 where it is subnormal."""
    if abs(x) < Fraction(2) ** FP32.min_exponent:
        return Fraction(0)
    exponent = math.floor(math.log2(abs(x)))
    exponent += (abs(x) >= Fraction(2) ** (exponent + 1)) - (abs(x) < Fraction(2) ** exponent)
    last = Fraction(2) ** (exponent - FP32.mantissa_bits)
    return whole(x / last) * last


def _to_even(x: Fraction) -> Fraction:
    return _rounded(x, round)


def _to_odd(x: Fraction) -> Fraction:
    """Of the two numbers around one that fp32 lacks, the one whose last bit is 1."""
    return _rounded(x, lambda y: int(y) if y == int(y) else math.floor(y) | 1)


def _bfmmla(terms: list[Fraction]) -> Fraction:
    total, products = Fraction(0), [_to_even(term) for term in terms]  # which fp32 holds, or which are flushed
    for first, second in zip(products[::2], products[1::2], strict=True):
        total = _to_odd(total + _to_odd(first + second))
    return total


def _vdpbf16(terms: list[Fraction]) -> Fraction:
    total = Fraction(0)
    for first, second in zip(terms[::2], terms[1::2], strict=True):
        total = _to_even(_to_even(total + second) + first)
    return total


def _amx(terms: list[Fraction]) -> Fraction:
    total = Fraction(0)
    for start in range(0, len(terms), 32):
        sums = [Fraction(0), Fraction(0)]
        for k, term in enumerate(terms[start : start + 32]):
            sums[k % 2] = _to_even(sums[k % 2] + term)
        total = _to_even(total + _to_even(sums[0] + sums[1]))
    return total


@pytest.mark.parametrize("kind", ["normal", "wide", "tiny"])
@pytest.mark.parametrize(
    ("matmul", "oracle"),
    [(bfmmla_matmul, _bfmmla), (vdpbf16_matmul, _vdpbf16), (amx_matmul, _amx)],
    ids=["bfmmla", "vdpbf16", "amx"],
)
def test_an_instruction_is_a_chain_of_rounded_sums(
    kind: str, matmul: Matmul, oracle: Callable[[list[Fraction]], Fraction]
) -> None:
    a, b = (_numbers(x.reshape(2, -1)) for x in _tiles(kind, 8))
    a, b = (torch.where(x.abs() < FP32.smallest_normal, 0.0, x) for x in (a, b))  # as operands are taken
    product = matmul(a, b.T)
    for i, j in np.ndindex(2, 2):
        terms = [Fraction(x) * Fraction(y) for x, y in zip(a[i].tolist(), b[j].tolist(), strict=True)]
        assert Fraction(product[i, j].item()) == oracle(terms)


@pytest.mark.parametrize(
    ("factors", "total"),
    [
        ([(2.0**64, 2.0**64), (2.0**64, 2.0**56 - 2.0**64)], 2.0**120),  # a product that fp32 lacks stays unrounded
        # So does one below its last bit, which makes 2^-126 + 2^-149 a tie.
        ([(2.0**-75, 2.0**-74), (2.0**-63, 2.0**-63), (0.0, 0.0), (2.0**-75, 2.0**-75)], 2.0**-126 + 2.0**-148),
        ([(2.0**-63, -(2.0**-63)), (2.0**-63 + 2.0**-70,) * 2], 0.0),  # a subnormal sum is flushed
    ],
)
def test_what_fp32_lacks_is_added_unrounded_and_what_is_subnormal_is_flushed(
    factors: list[tuple[float, float]], total: float
) -> None:
    a, b = torch.tensor(factors).T
    assert vdpbf16_matmul(a[None], b[:, None]).item() == total


@pytest.mark.parametrize("accumulator", [Accumulator.VDPBF16, Accumulator.AMX, Accumulator.BFMMLA])
def test_what_no_bf16_holds_is_no_product_of_its_instructions(accumulator: Accumulator) -> None:
    """A sum of 2^24 and four ones loses some by each of them, and none where an operand is wider."""
    terms = torch.tensor([[2.0**24, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 1.0, 0.0]])
    wider = terms + torch.tensor([[0.0, 1.0 + 2.0**-8, 0.0, -1.0 - 2.0**-8, *[0.0] * 6]])
    arithmetic, ones = EmulatedArithmetic(), torch.ones(10, 1)
    narrow, wide = (arithmetic.matmul(x, ones, Cast(FP32), accumulator).item() for x in (terms, wider))
    assert narrow < wide == 2.0**24 + 4.0


def test_a_product_whose_sum_is_rounded_in_blocks_loses_what_each_block_adds() -> None:
    terms = torch.cat([torch.full((1, 1), 2.0**14), torch.ones(1, 2047)], 1)
    arithmetic, ones = EmulatedArithmetic(), torch.ones(2048, 1)
    assert arithmetic.matmul(terms, ones, Cast(BF16), Accumulator.EXACT).item() == 18432.0
    # 2^14 + 31 goes back to 2^14, and then 32 are half an ulp, every time.
    assert arithmetic.matmul(terms, ones, Cast(BF16, every=32), Accumulator.EXACT).item() == 2.0**14
    assert arithmetic.matmul(terms, ones, Cast(BF16, every=4096), Accumulator.EXACT).item() == 18432.0


def test_a_cell_that_failed_says_what_predicts_it() -> None:
    class OnArm(EmulatedArithmetic):
        def matmul(self, a: Tensor, b: Tensor, cast: Cast, accumulator: Accumulator) -> Tensor:
            return super().matmul(a, b, cast, Accumulator.BFMMLA)

    arm = replace(CPU, arithmetic=OnArm())
    answer = judged(composed_kernel("flash@paper"), "faint_tail", backend=arm).answers[PREDICTION]
    assert answer.passed is False
    assert answer.why.endswith("; flash@paper,accumulator=bfmmla, as this device multiplies, does")


ARM = pytest.mark.skipif(COMPILER is None or QEMU is None, reason="no aarch64-linux-gnu-gcc or no qemu-aarch64-static")
X86 = pytest.mark.skipif(X86_COMPILER is None or not HAS_IT, reason="no gcc, or a processor without AVX512_BF16")
EMULATED, OF_ARM = [str(QEMU), "-cpu", "max"], (bfmmla_matmul, bfmmla_matmul)  # BFMMLA and BFDOT


@pytest.mark.parametrize(
    ("command", "emulator", "source", "instructions"),
    [
        pytest.param([COMPILER, "-static", "-march=armv8.2-a+bf16"], EMULATED, "bf16_tiles.c", OF_ARM, marks=ARM),
        pytest.param([X86_COMPILER, "-mavx512bf16", "-mavx512vl"], [], "bf16_dots.c", (vdpbf16_matmul,), marks=X86),
    ],
    ids=["arm", "x86"],
)
def test_an_instruction_itself_agrees_to_the_bit(
    command: list[str], emulator: list[str], source: str, instructions: tuple[Matmul, ...], tmp_path: Path
) -> None:
    rows = len(instructions)  # of a tile
    given = np.zeros((len(KINDS), TILES), [("a", "u2", (rows, 8)), ("b", "u2", (rows, 8)), ("c", "u4", (rows, rows))])
    for number, kind in enumerate(KINDS):
        given["a"][number], given["b"][number] = (x[:, :rows] for x in _tiles(kind, TILES))
    program = tmp_path / "program"
    subprocess.run([*command, "-O2", "-o", program, Path(__file__).with_name(source)], check=True)
    done = subprocess.run([*emulator, program], input=given.tobytes(), capture_output=True, check=True)
    bits = np.frombuffer(done.stdout, np.uint32).reshape(len(KINDS), TILES, rows, rows, rows)
    differing = {
        (kind, which): _differing(matmul, given["a"][number], given["b"][number], bits[number, :, which])
        for number, kind in enumerate(KINDS)
        for which, matmul in enumerate(instructions)
    }
    assert not any(differing.values()), differing
