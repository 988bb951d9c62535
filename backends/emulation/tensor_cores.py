"""Matrix products as tensor cores add them up, bit for bit as MMA-Sim describes them (arXiv 2511.10909)."""

import enum
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.formats import BF16, FP8_E4M3, FP8_E5M2, FP16, FP32, TF32, Format, Rounding
from tiebreak.kernels.plans import Accumulator

_BEYOND = 2.0 ** (FP32.max_exponent + 1)  # the first power of two that fp32 lacks
_BITS_OF_PRODUCTS = 31  # that the sum of a step's products keeps next to the addend, on CDNA3
_LOST_ADDEND = 2.0**25  # how many times smaller than the largest term an addend is that CDNA3's fp8 leaves out
_NEAR = 80  # a largest term's exponent to which fp32 has all products, and two to the powers that scale them
_TF32 = ~0x1FFF
_AT_ONCE = 2**17  # products that are in memory: a few buffers of 1 MB, which a core's cache holds


class SumOrder(enum.Enum):
    """The terms that are aligned with each other in a step."""

    TOGETHER = "products and addend"  # NVIDIA: cut off, added, rounded toward zero
    PRODUCTS_FIRST = "products, then their sum and the addend"  # CDNA3: these two rounded down, their sum to even
    EVEN_AND_ODD = "products of even and of odd keys, then their sums, then the addend"  # CDNA3's fp8


@dataclass(frozen=True)
class TensorCore:
    """The way in which a matrix instruction adds up; `core_of` knows them."""

    products: int  # of a step; more of them are several steps
    fraction_bits: int  # that a term keeps below the exponent of the largest one
    least_exponents: tuple[int, int]  # of a's and b's formats: what their subnormals count as
    order: SumOrder = SumOrder.TOGETHER  # what is aligned with what
    result: Format = FP32  # what the sum of a step is rounded to
    reads_tf32: bool = False  # whether the last 13 bits of an operand are ignored


def tensor_core_matmul(a: Tensor, b: Tensor, addend: Tensor, core: TensorCore) -> Tensor:
    """Add a @ b to an addend, step after step along k.

    Each step adds to the sum so far, the first one to the given addend, like an instruction that accumulates into its
    registers. Where k is no multiple of a step, zeros are added, which change nothing.

    Args:
        a: (..., m, k) fp32, values of the core's first operand format.
        b: (..., k, n) fp32, values of its second; the leading dimensions broadcast.
        addend: fp32 of the product's shape, or one that broadcasts to it.
        core: from `core_of`.

    Returns:
        (..., m, n), fp32. A NaN's bits are not the hardware's.
    """
    (m, k), n = a.shape[-2:], b.shape[-1]
    heads = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    count = math.prod(heads)
    a, b = a.expand(*heads, m, k).reshape(count, m, k), b.expand(*heads, k, n).reshape(count, k, n)
    result = addend.expand(*heads, m, n).reshape(count, m, n).clone()
    rows = max(1, _AT_ONCE // max(1, core.products * n))
    some = max(1, rows // max(1, m))  # heads
    for head in range(0, count, some):
        for row in range(0, m, rows):
            part = result[head : head + some, row : row + rows]
            part.copy_(_accumulate(a[head : head + some, row : row + rows], b[head : head + some], part, core))
    return result.reshape(*heads, m, n)


def _accumulate(a: Tensor, b: Tensor, total: Tensor, core: TensorCore) -> Tensor:
    """Add step after step, in three dimensions each."""
    k = a.shape[-1]
    last = 3 if len(a) > b.shape[-1] else 1  # heads: the longest dimension is an operation's innermost loop
    rows = pad(a, (0, -k % core.products)).movedim(-1, 0).unsqueeze(3).movedim(1, last).contiguous()
    columns = pad(b, (0, 0, 0, -k % core.products)).movedim(1, 0).unsqueeze(2).movedim(1, last).contiguous()
    if core.reads_tf32:
        rows, columns = ((x.view(torch.int32) & _TF32).view(torch.float32) for x in (rows, columns))
    of_rows, of_columns = map(_exponent, (rows, columns), core.least_exponents)
    total = total.movedim(0, last - 1).contiguous()
    finite = max(of_rows.amax(), of_columns.amax()) <= FP32.max_exponent
    for start in range(0, k, core.products):
        keys = slice(start, start + core.products)
        terms = rows[keys], columns[keys], of_rows[keys] + of_columns[keys], total
        quick = _add_in_integers(core, *terms) if finite and core.order is SumOrder.TOGETHER else None
        total = _add_in_doubles(core, *terms) if quick is None else quick
    return total.movedim(last - 1, 0)


def _exponent(x: Tensor, least: int = FP32.min_exponent) -> Tensor:
    """Return the exponent of every value, int16: at least its format's least; for zero fp32's least."""
    stored = x.view(torch.int32) >> 23 & 0xFF
    exponents = (stored - FP32.max_exponent).clamp_(min=least)
    if least > FP32.min_exponent:
        exponents.masked_fill_(stored == 0, FP32.min_exponent)  # zero: no format but fp32 and bf16 has such numbers
    return exponents.to(torch.int16)


def _power(exponents: Tensor) -> Tensor:
    """Return two to these powers, in fp64."""
    return (exponents.long() + 1023 << 52).view(torch.float64)


def _add_in_integers(core: TensorCore, a: Tensor, b: Tensor, exponents: Tensor, addend: Tensor) -> Tensor | None:
    """Return what `_add_together` returns, several times faster; None where a term is far from 1, Inf or NaN.

    A product of two operands is exact in fp32, and what is left of it below the largest term's last bit an integer.
    """
    largest = torch.maximum(exponents.amax(0), _exponent(addend))
    if core.products << core.fraction_bits + 2 > 2**31 or largest.amax() > _NEAR:
        return None
    if largest.amin() < -_NEAR:
        if ((largest < -_NEAR) & ((a != 0).any(0) & (b != 0).any(0) | (addend != 0))).any():
            return None
        largest.clamp_(min=-_NEAR)
    shift = core.fraction_bits - largest.int()
    scale, back = ((x + FP32.max_exponent << 23).view(torch.float32) for x in (shift, -shift))
    kept = (a * b).mul_(scale).to(torch.int32).sum(0, dtype=torch.int32)
    total = kept.double().add_((addend * scale).to(torch.int32).double()).mul_(back.double())
    # No sum is as small as fp32's subnormal numbers, or as large as its Inf.
    return (total.view(torch.int64) & -1 << 52 - core.result.mantissa_bits).view(torch.float64).float()


def _add_in_doubles(core: TensorCore, a: Tensor, b: Tensor, exponents: Tensor, addend: Tensor) -> Tensor:
    """Add up terms of any size."""
    products = a.double() * b.double()
    add = _add_together if core.order is SumOrder.TOGETHER else _add_in_turn
    added = add(core, products, _power(exponents), addend)
    # Terms that are Inf or NaN can't be aligned: they are added up as they are.
    plain = products.sum(0) + addend
    return torch.where(plain.isfinite(), added, plain).float()


def _add_together(core: TensorCore, products: Tensor, powers: Tensor, addend: Tensor) -> Tensor:
    """Truncate terms below the last bit of the largest one, sum them exactly and round toward zero.

    Args:
        core: of NVIDIA.
        products: of a step, along the first dimension, exact in fp64.
        powers: 2 to the sum of the operands' exponents, fp64: a product itself may be up to four times as large.
        addend: what there is.
    """
    largest = torch.maximum(powers.amax(0), _power(_exponent(addend)))
    scale = 2.0**core.fraction_bits / largest
    total = ((products * scale).trunc_().sum(0) + (addend * scale).trunc_()) / scale
    rounded = round_to(total, core.result, Rounding.RTZ)
    # Overflow gives Inf even when rounding toward zero; and a sum of zero is +0.
    return torch.where(total.abs() < _BEYOND, rounded, total * torch.inf) + 0.0


def _add_in_turn(core: TensorCore, products: Tensor, powers: Tensor, addend: Tensor) -> Tensor:
    """Align the products' sum, truncated as on NVIDIA, with the addend, round both down, and their sum to even."""
    of_addend = _power(_exponent(addend))
    if core.order is SumOrder.EVEN_AND_ODD:
        even, of_even = _sum_of_products(core, products[0::2], powers[0::2])
        odd, of_odd = _sum_of_products(core, products[1::2], powers[1::2])
        power = torch.maximum(of_even, of_odd)
        total = _rounded_down(even, power, core.fraction_bits) + _rounded_down(odd, power, core.fraction_bits)
    else:
        total, power = _sum_of_products(core, products, powers)
    largest = torch.maximum(power, of_addend)
    addend_part = _rounded_down(addend.double(), largest, core.fraction_bits)
    if core.order is SumOrder.EVEN_AND_ODD:
        addend_part = addend_part.masked_fill(of_addend * _LOST_ADDEND < largest, 0.0)
    total = _rounded_down(total, largest, _BITS_OF_PRODUCTS) + addend_part
    # A product that fp32 lacks is Inf, and two of them with both signs are NaN.
    beyond = torch.where(products.abs() < _BEYOND, 0.0, products * torch.inf).sum(0)
    return torch.where(beyond == 0, total, beyond)


def _sum_of_products(core: TensorCore, products: Tensor, powers: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of products truncated below the last bit of the largest, and that one's power."""
    largest = powers.amax(0)
    scale = 2.0**core.fraction_bits / largest
    return (products * scale).trunc_().sum(0) / scale, largest


def _rounded_down(x: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Return `x` rounded toward minus infinity, to `bits` bits below the largest term's power."""
    scale = 2.0**bits / largest
    return (x * scale).floor_().div_(scale)


_LEAST_EXPONENTS = {fmt.name: fmt.min_exponent for fmt in (FP16, BF16, TF32, FP8_E4M3, FP8_E5M2)} | {
    "fp8_e4m3fnuz": FP8_E4M3.min_exponent - 1,  # AMD's fp8, with one more in its bias
    "fp8_e5m2fnuz": FP8_E5M2.min_exponent - 1,
}
OPERANDS = tuple(_LEAST_EXPONENTS)  # names of operand formats that some target multiplies
_FP8, _FNUZ = "fp8_e4m3 fp8_e5m2", "fp8_e4m3fnuz fp8_e5m2fnuz"
_E8M13 = Format("E8M13", exponent_bits=8, mantissa_bits=13)
# GPUs as Triton names them; operand formats; products of a step; fraction bits; what else is not as usual. A K of 16 in
# fp16 and bf16, of 8 in tf32 and of 32 in fp8 is two steps on Ampere and Ada, one from Hopper on.
_ROWS: tuple[tuple[str, str, int, int, dict[str, Any]], ...] = (
    ("sm_70", "fp16", 4, 23, {}),  # Volta
    ("sm_75", "fp16", 8, 24, {}),  # Turing
    ("sm_80 sm_86 sm_89", "fp16 bf16", 8, 24, {}),  # Ampere, Ada
    ("sm_80 sm_86 sm_89", "tf32", 4, 24, {}),
    ("sm_89", _FP8, 16, 13, {"result": _E8M13}),
    ("sm_90 sm_100 sm_120", "fp16 bf16", 16, 25, {}),  # Hopper's wgmma, Blackwell's tcgen05, mma of its RTX cards
    ("sm_90 sm_100 sm_120", "tf32", 8, 25, {}),
    ("sm_90", _FP8, 32, 13, {"result": _E8M13}),
    ("sm_100 sm_120", _FP8, 32, 25, {}),
    ("gfx942", "fp16 bf16", 8, 24, {"order": SumOrder.PRODUCTS_FIRST}),  # MFMA of CDNA3
    ("gfx942", "tf32", 4, 24, {"order": SumOrder.PRODUCTS_FIRST}),
    ("gfx942", _FNUZ, 16, 24, {"order": SumOrder.EVEN_AND_ODD}),
)
_CORES = {
    (target, a, b): TensorCore(
        products, bits, (_LEAST_EXPONENTS[a], _LEAST_EXPONENTS[b]), reads_tf32=a == TF32.name, **unusual
    )
    for targets, formats, products, bits, unusual in _ROWS
    for target in targets.split()
    for a, b in itertools.product(formats.split(), repeat=2)
    if a == b or a.startswith("fp8")
}
TARGETS = tuple(dict.fromkeys(target for target, _, _ in _CORES))  # names of the GPUs whose tensor cores are known


def core_of(target: str, a: str, b: str | None = None) -> TensorCore:
    """Return the tensor core of one of `TARGETS` that multiplies two operand formats and adds up in fp32.

    The two formats, of `OPERANDS`, are equal unless both are fp8. ValueError: the target is not known to multiply them.
    """
    formats = (a, a if b is None else b)
    core = _CORES.get((target, *formats))
    if core is None:
        pairs = ", ".join(a if a == b else f"{a} x {b}" for of, a, b in _CORES if of == target)
        raise ValueError(f"{target} doesn't multiply {' by '.join(formats)}; it does {pairs or 'nothing known'}")
    return core


def _product(target: str, operands: str) -> Callable[[Tensor, Tensor], Tensor]:
    core = core_of(target, operands)
    return lambda a, b: tensor_core_matmul(a, b, torch.zeros((), device=a.device), core)


#: What plans name.
MATMULS = {
    Accumulator.VOLTA: _product("sm_70", "fp16"),
    Accumulator.AMPERE: _product("sm_80", "bf16"),
    Accumulator.HOPPER: _product("sm_90", "bf16"),
    Accumulator.CDNA3: _product("gfx942", "bf16"),
    Accumulator.ADA_FP8: _product("sm_89", "fp8_e4m3"),
    Accumulator.HOPPER_FP8: _product("sm_90", "fp8_e4m3"),
}
