"""`make studies STUDY=mma_sim ARGS=CHECKOUT`: the emulation's tensor cores against MMA-Sim, bit by bit.

MMA-Sim (arXiv 2511.10909) is its authors' model of matrix instructions; the figures are in docs/science.md. Each count
is of sums of two instructions, the second of which adds to the first one's result. NaN equals NaN.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tiebreak.backends.emulation.tensor_cores import core_of, tensor_core_matmul
from tiebreak.reports.cli import FAILED, PASSED, Parser

SEEDS = 6  # of each kind of input
SIDE = 8  # of the square that a call of MMA-Sim fills: its time grows with every element
LARGEST = torch.finfo(torch.float32).max
DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "tf32": torch.float32,  # of which a core reads the first 19 bits
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
    "fp8_e4m3fnuz": torch.float8_e4m3fnuz,
    "fp8_e5m2fnuz": torch.float8_e5m2fnuz,
}


@dataclass(frozen=True)
class Draw:
    """Random operands and addends of one pair of formats."""

    rng: np.random.Generator  # seeded
    a: str  # format of the first operand
    b: str  # format of the second
    k: int  # products of an element

    def operand(self, name: str, low: int = -200, high: int = 200) -> Tensor:
        """(SIDE, k) of a format: exponents from low to high, or the nearest that it has."""
        info = torch.finfo(DTYPES[name])
        least, most = (int(np.frexp(x)[1]) - 1 for x in (info.smallest_normal, info.max))
        values = self._spread((SIDE, self.k), *(min(max(end, least), most) for end in (low, high)))
        return _narrow(np.clip(values, info.min, info.max), name)

    def operands(self, low: int = -200, high: int = 200) -> tuple[Tensor, Tensor]:
        """Both, of the same exponents."""
        return self.operand(self.a, low, high), self.operand(self.b, low, high)

    def addend(self, low: int, high: int) -> Tensor:
        """(SIDE, SIDE) in fp32; an exponent below -126 is a subnormal's."""
        return torch.from_numpy(self._spread((SIDE, SIDE), low, high).clip(-LARGEST, LARGEST).astype(np.float32))

    def subnormal(self, name: str) -> Tensor:
        """(SIDE, k) subnormals of a format."""
        info = torch.finfo(DTYPES[name])
        whole = self.rng.integers(1, round(1 / info.eps), (SIDE, self.k)) * self.rng.choice([-1, 1], (SIDE, self.k))
        return _narrow(whole * float(info.smallest_normal) * float(info.eps), name)

    def where(self, share: float, values: Tensor, others: Tensor) -> Tensor:
        """The values at about a share of the places, the others elsewhere."""
        return torch.where(torch.from_numpy(self.rng.random(tuple(others.shape)) < share), values, others)

    def signs(self, like: Tensor) -> Tensor:
        """1 or -1."""
        return torch.from_numpy(self.rng.choice(np.array([-1, 1], np.float32), tuple(like.shape)))

    def _spread(self, shape: tuple[int, int], low: int, high: int) -> npt.NDArray[np.float64]:
        exponents = self.rng.integers(low, high + 1, shape)
        return self.rng.choice([-1.0, 1.0], shape) * self.rng.uniform(1.0, 2.0, shape) * 2.0**exponents


Inputs = tuple[Tensor, Tensor, Tensor]  # a (SIDE, k), b's transpose (SIDE, k), addend (SIDE, SIDE): fp32 carriers


def _narrow(x: npt.NDArray[np.float64], name: str) -> Tensor:
    return torch.from_numpy(x).float().to(DTYPES[name]).float()


def normal(draw: Draw) -> Inputs:
    """Of the size that attention has."""
    return *draw.operands(-3, 1), draw.addend(-3, 3)


def wide(draw: Draw) -> Inputs:
    """Some terms lie below the others' last bit."""
    return *draw.operands(-12, 12), draw.addend(-24, 24)


def whole_range(draw: Draw) -> Inputs:
    """Every exponent of the formats."""
    return *draw.operands(), draw.addend(-149, 127)


def cancelling(draw: Draw) -> Inputs:
    """Neighbours cancel, but for a few."""
    a, b = draw.operands(-12, 12)
    a[:, 1::2], b[:, 1::2] = a[:, ::2], -b[:, ::2]
    return a, draw.where(0.1, draw.operand(draw.b, -12, -6), b), draw.addend(-40, 0)


def subnormal_inputs(draw: Draw) -> Inputs:
    """Half of the first operands are subnormals, and some of the second; the addends are about as small."""
    least = int(np.frexp(torch.finfo(DTYPES[draw.a]).smallest_normal)[1]) - 1
    a = draw.where(0.5, draw.subnormal(draw.a), draw.operand(draw.a, least, least + 4))
    b = draw.where(0.1, draw.subnormal(draw.b), draw.operand(draw.b, -6, 6))
    return a, b, draw.addend(max(least - 40, -149), least + 8)


def subnormal_results(draw: Draw) -> Inputs:
    """Products and addends around fp32's smallest normal number; fp16 and fp8 have none so small but zeros."""
    a, b = draw.operands(-75, -55)
    if min(a.abs().min(), b.abs().min()) > 2.0**-50:
        a, b = draw.where(0.5, 0 * a, a), draw.where(0.5, 0 * b, b)
        a = a.masked_fill(b != 0, 0.0)
    return a, b, draw.addend(-149, -120)


def zeros(draw: Draw) -> Inputs:
    """Most of the products are 0, of a zero and of a number of any size; in some elements all of them."""
    a, b = draw.operands()
    a = draw.where(0.6, 0 * a, a)
    a[: SIDE // 2] = 0.0
    return a, draw.where(0.3, 0 * b, b), draw.where(0.2, torch.zeros(SIDE, SIDE), draw.addend(-149, 20))


def signed_zeros(draw: Draw) -> Inputs:
    """Sums of zeros of both signs, and of the smallest products there are."""
    a, b = draw.operands(-200, -120)
    a, b = draw.signs(a) * draw.where(0.9, 0 * a, a), draw.signs(b) * draw.where(0.9, 0 * b, b)
    return a, b, draw.where(0.5, torch.tensor(-0.0), torch.zeros(SIDE, SIDE))


def overflow(draw: Draw) -> Inputs:
    """Sums around the largest fp32 number, on both sides of it."""
    a, b = (x.abs() for x in draw.operands(58, 62))
    most = torch.full((SIDE, SIDE), LARGEST)
    return a * draw.signs(a[:, :1]), b, draw.signs(most) * draw.where(0.7, most, draw.addend(125, 127).abs())


def large_products(draw: Draw) -> Inputs:
    """Products on both sides of the largest fp32 number, which no operands of few exponents have."""
    return *draw.operands(61, 64), draw.where(0.2, torch.tensor(torch.inf), draw.addend(120, 127))


def infinities(draw: Draw) -> Inputs:
    """A few operands and addends are Inf, where the format has one."""
    a, b, c = normal(draw)
    a, b = (
        draw.where(0.03, x * torch.inf, x) if torch.isinf(torch.tensor(torch.inf).to(DTYPES[name]).float()) else x
        for x, name in ((a, draw.a), (b, draw.b))
    )
    return draw.where(0.05, torch.tensor(0.0), a), b, draw.where(0.05, c * torch.inf, c)


def nans(draw: Draw) -> Inputs:
    """A few operands and addends are NaN."""
    a, b, c = infinities(draw)
    return tuple(draw.where(0.01, torch.tensor(torch.nan), x) for x in (a, b, c))  # type: ignore[return-value]


def one_large_product(draw: Draw) -> Inputs:
    """One product of a step is far above all other terms."""
    a, b = draw.operands(-40, -6)
    column = draw.rng.integers(0, draw.k, 1)
    a[:, column], b[:, column] = (x[:, column] for x in draw.operands(10, 14))
    return a, b, draw.addend(-30, 0)


KINDS: Mapping[str, Callable[[Draw], Inputs]] = {
    kind.__name__.replace("_", " "): kind
    for kind in (
        normal,
        wide,
        whole_range,
        cancelling,
        subnormal_inputs,
        subnormal_results,
        zeros,
        signed_zeros,
        overflow,
        large_products,
        infinities,
        nans,
        one_large_product,
    )
}


@dataclass(frozen=True)
class Instruction:
    """A matrix instruction of MMA-Sim, and the target of the emulation that has it."""

    target: str  # as core_of takes it
    kind: str  # its class in MMA-Sim
    architecture: str  # as MMA-Sim calls it
    qualifier: str  # the instruction
    a: str  # format of the first operand
    b: str  # format of the second

    def build(self, kinds: Mapping[str, Any]) -> Any:
        """The instruction, cut down to a square: its rows and columns have nothing to do with one another."""
        built = kinds[self.kind](self.architecture, self.qualifier)
        built.m = built.n = SIDE
        return built


def _nvidia(target: str, kind: str, architecture: str, shape: str, formats: str, form: str) -> list[Instruction]:
    """One instruction for each pair of formats; in fp8 for both and for each mixture of the two."""
    short = {"fp16": "f16", "fp8_e4m3": "e4m3", "fp8_e5m2": "e5m2"}
    names = formats.split()
    pairs = product(names, names) if names[0].startswith("fp8") else zip(names, names, strict=True)
    return [
        Instruction(target, kind, architecture, f"{shape}.f32." + form.format(short.get(a, a), short.get(b, b)), a, b)
        for a, b in pairs
    ]


def _mma(target: str, architecture: str, shape: str, formats: str) -> list[Instruction]:
    return _nvidia(target, "mma", architecture, shape, formats, "{}.{}.f32")


def _amd(shape: str, *names: tuple[str, str, str]) -> list[Instruction]:
    return [Instruction("gfx942", "mfma", "CDNA3", f"f32_{shape}_{name}", a, b) for name, a, b in names]


HALVES, FP8 = "fp16 bf16", "fp8_e4m3 fp8_e5m2"
E4M3, E5M2 = "fp8_e4m3fnuz", "fp8_e5m2fnuz"
INSTRUCTIONS = (
    *_mma("sm_70", "Volta", "m8n8k4", "fp16"),
    *_mma("sm_75", "Turing", "m16n8k8", "fp16"),
    *_mma("sm_80", "Ampere", "m16n8k16", HALVES),
    *_mma("sm_80", "Ampere", "m16n8k8", "tf32"),
    *_mma("sm_89", "Ada Lovelace", "m16n8k16", HALVES),
    *_mma("sm_89", "Ada Lovelace", "m16n8k8", "tf32"),
    *_mma("sm_89", "Ada Lovelace", "m16n8k32", FP8),
    *_mma("sm_90", "Hopper", "m16n8k16", HALVES),
    *_mma("sm_90", "Hopper", "m16n8k8", "tf32"),
    *_mma("sm_120", "RTX Blackwell", "m16n8k16", HALVES),
    *_mma("sm_120", "RTX Blackwell", "m16n8k8", "tf32"),
    *_mma("sm_120", "RTX Blackwell", "m16n8k32", FP8),
    *(
        instruction
        for target, kind, architecture in (("sm_90", "wgmma", "Hopper"), ("sm_100", "tcgen05mma", "Blackwell"))
        for k, names in ((16, HALVES), (8, "tf32"), (32, FP8))
        for instruction in _nvidia(target, kind, architecture, f"m64n8k{k}", names, "{}.{}")
    ),
    *_amd("16x16x16", ("f16", "fp16", "fp16"), ("bf16", "bf16", "bf16")),
    *_amd("16x16x8", ("xf32", "tf32", "tf32")),
    *_amd(
        "16x16x32", ("fp8_fp8", E4M3, E4M3), ("fp8_bf8", E4M3, E5M2), ("bf8_fp8", E5M2, E4M3), ("bf8_bf8", E5M2, E5M2)
    ),
)


def differing(sums: Tensor, expected: Tensor) -> int:
    """How many elements have not the same bits; NaN is NaN."""
    same = (sums.view(torch.int32) == expected.view(torch.int32)) | (sums.isnan() & expected.isnan())
    return int((~same).sum())


def compare(instruction: Instruction, built: Any, kind: str, seed: int) -> int:
    """How many of SIDE * SIDE sums of two instructions differ."""
    rng = np.random.default_rng([seed, list(KINDS).index(kind), *instruction.qualifier.encode()])
    a, b, c = KINDS[kind](Draw(rng, instruction.a, instruction.b, 2 * built.k))
    sums = tensor_core_matmul(a, b.T, c, core_of(instruction.target, instruction.a, instruction.b))
    first, second = DTYPES[instruction.a], DTYPES[instruction.b]
    for k in (slice(0, built.k), slice(built.k, None)):
        c = built(a[:, k].to(first), b[:, k].to(second).T, c)
    return differing(sums, c)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print how many sums differ, by instruction; return 1 if any does."""
    parser = Parser(prog="python -m tiebreak.studies.mma_sim", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="a clone of https://github.com/microsoft/MMA-Sim")
    parser.add_argument("--seeds", type=int, default=SEEDS, help=f"of each kind of input (default: {SEEDS})")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(options.checkout.resolve(strict=True)))
    from mmasim.simulator import amd, nv_ptx  # type: ignore[import-not-found, unused-ignore]

    total = 0
    for instruction in INSTRUCTIONS:
        built = instruction.build({**vars(nv_ptx), **vars(amd)})
        counts = {kind: sum(compare(instruction, built, kind, seed) for seed in range(options.seeds)) for kind in KINDS}
        differ = {kind: count for kind, count in counts.items() if count}
        print(
            f"{instruction.target} {instruction.kind} {instruction.qualifier}: {differ or 'none differs'}", flush=True
        )
        total += sum(differ.values())
    print(f"{total} of {len(INSTRUCTIONS) * len(KINDS) * options.seeds * SIDE**2:,} sums differ")
    return FAILED if total else PASSED


if __name__ == "__main__":
    sys.exit(main())
