"""Probes: what a device's arithmetic does, measured, not read off a data sheet. The answers are its fingerprint."""

from collections.abc import Mapping
from functools import cache
from itertools import product

import numpy as np
import torch
from torch import Tensor

from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16, FP32, Format, Rounding, ulp
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

_SIZE = 64
_LONG = 2048  # terms of a product that a library may split
_AS_ATTENTION = {"heads": 8, "rows": 32, "columns": 64}  # as a framework's attention asks for P V
_LARGE = 2.0**30  # swallows fewer than 64 ones in fp32
_WINDOWS = (4, 8, 16, 32, 64)  # neighbours among which what meets what differs
_TAILS = range(17, 35)  # how many bits below 1 a tail lies: bf16 lacks all of them, fp32 those beyond 23
_TIP = 6  # bits below a tail
_ORDERED = 32  # terms of the sum whose order is told
_WIDEST = 60  # bits looked for in an accumulator: more than fp64 has
_DETERMINISTIC = tuple(mode for mode in Rounding if mode is not Rounding.STOCHASTIC)


def fingerprint(arithmetic: Arithmetic, device: str) -> Mapping[str, str | float]:
    """Return properties of the arithmetic on a device, by torch's name of it, in which devices are known to differ.

    Returns:
        `cast` and `matmul`: the mode in which a cast and a matrix product round to bf16, `none known` if no mode fits;
        `matmul_sums_in`: whether the product's running sum is wider than bf16; `bf16_matmul_accumulator`: what adds up
        a product of bf16, as plans call it; `matmul_rounds_after` and `batched_matmul_rounds_after`: how many terms it
        adds before it puts their sum into bf16, of 2,048, where a library splits long products; `matmul_subnormals`:
        kept or flushed; `exp_at_zero`: the device's exp(0).
    """
    cast = _mode_of(arithmetic.cast(_probe_values().to(device), Cast(BF16)).cpu())
    matmul = _mode_of_products(arithmetic, device)
    # 1 and many terms of a quarter ulp each add up: in the narrow format itself they never leave 1.
    quarters = torch.full((1, 2 ** (BF16.mantissa_bits + 2) + 1), 2.0 ** -(BF16.mantissa_bits + 2))
    quarters[0, 0] = 1.0
    accumulators = " or ".join(accumulator.name.lower() for accumulator in accumulators_of(arithmetic, device))
    alone = _rounds_after(arithmetic, device, heads=1, rows=128, columns=128)
    batched = _rounds_after(arithmetic, device, **_AS_ATTENTION)
    return {
        "cast": cast.value if cast else "none known",
        "matmul": matmul.value if matmul else "none known",
        "matmul_sums_in": "fp32 or wider" if _dot(arithmetic, quarters, device).item() >= 1.5 else BF16.name,
        "bf16_matmul_accumulator": accumulators or "none known",
        "matmul_rounds_after": f"{alone or 'all'} terms",
        "batched_matmul_rounds_after": f"{batched or 'all'} terms",
        "matmul_subnormals": _kept(_dot(arithmetic, torch.full((1, 1), BF16.smallest_normal / 4), device)),
        "exp_at_zero": arithmetic.exp(torch.zeros(1, device=device), Exponential()).item(),
    }


def plan_changes(arithmetic: Arithmetic, device: str) -> tuple[str, ...]:
    """Return the properties of a device's bf16 products that a plan must name; None where there is nothing to say.

    They are changes of a plan, as declarations have them, each with those before it: how products are added up, then
    after how many terms P V is rounded where it is in the inputs' format.
    """
    fitting = accumulators_of(arithmetic, device)
    changes = [f"accumulator={fitting[0].name.lower()}"] if fitting and Accumulator.EXACT not in fitting else []
    if terms := _rounds_after(arithmetic, device, **_AS_ATTENTION):
        changes.append(f"o_bar=input/{terms}")
    return tuple(changes)


def accumulators_of(arithmetic: Arithmetic, device: str) -> tuple[Accumulator, ...]:
    """Return the accumulators whose emulation has all bits of a device's products of bf16.

    Masks show the order of terms; tails next to a tie of bf16, or next to 1 and -1, show the width and rounding of
    sums; numbers at the edge of the normal range show flushing. There are several where these products don't tell them
    apart; none where no accumulator is known that does so, or the device's cast is in no known mode.
    """
    mode = _mode_of_products(arithmetic, device)
    if mode is None:
        return ()
    ours = [_dot(arithmetic, rows, device, factor=factor) for factor, rows in _sums().items()]
    return tuple(each for each in Accumulator if all(map(torch.equal, ours, _emulated(each, mode))))


@cache
def _emulated(accumulator: Accumulator, mode: Rounding) -> list[Tensor]:
    emulated = EmulatedArithmetic()
    return [
        emulated.matmul(rows, torch.full((_SIZE, 1), factor), Cast(BF16, mode), accumulator)[:, 0]
        for factor, rows in _sums().items()
    ]


@cache
def _sums() -> Mapping[float, Tensor]:
    """Return rows of 64 terms, by the factor of all terms."""
    smallest = BF16.smallest_normal
    # Subnormal: a sum; a term before and after a normal one; a sum which another term makes normal again.
    edge = torch.zeros(4, _SIZE)
    edge[0, 0] = smallest / 4
    edge[1:3, :2] = torch.tensor([[smallest, smallest / 2], [smallest / 2, smallest]])
    edge[3, [0, 2, 4]] = torch.tensor([1.5 * smallest, -smallest, smallest])
    tails = [_tails(neighbour) for neighbour in (-1.0, 2.0 ** -(BF16.mantissa_bits + 1))]
    # The sum is 0, unless the first product, which bf16 can't hold, is rounded to it.
    rounded = torch.zeros(1, _SIZE)
    rounded[0, :3] = torch.tensor([1.5, -1.0, -0.5])
    # The second factor makes subnormal products of normal operands.
    return {
        1.0: torch.cat([_masks(_SIZE), *tails, edge]),
        1.0 / _LARGE: edge * _LARGE,
        1.0 + 2.0**-BF16.mantissa_bits: rounded,
    }


def _masks(terms: int) -> Tensor:
    """Return rows, (terms - 1, terms) of fewer than 67 terms, whose sums show the order in which terms are added.

    A large number in place 0 and its negative in place j, from 1 on, absorb every term added to either before they
    meet, so the sum shows how many terms had been added by then (Xie et al., "FPRev: revealing the order of
    floating-point summation", 2024, arXiv 2411.00442).
    """
    rows = torch.ones(terms - 1, terms)
    rows[:, 0] = _LARGE
    rows[torch.arange(terms - 1), torch.arange(1, terms)] = -_LARGE
    return rows


def _tails(neighbour: float) -> Tensor:
    """Return 1, `neighbour` and a tail at random places among other numbers, for every size of a tail.

    A tail is kept, lost, truncated, rounded down or leaves a sticky bit, depending on what it is added to first
    (Hawkeye, arXiv 2603.20421; MMA-Sim, arXiv 2511.10909). The larger ones have a second, which breaks their ties.
    """
    draw = np.random.Generator(np.random.Philox(1))
    rows = np.zeros((len(_WINDOWS) * len(_TAILS), _SIZE), np.float32)
    for row, (neighbours, bits) in zip(rows, product(_WINDOWS, _TAILS), strict=True):
        tip = 2.0 ** -(bits + _TIP) if bits <= FP32.mantissa_bits + 1 else 0.0
        first = neighbours * draw.integers(_SIZE // neighbours)
        sign, other = draw.choice([1.0, -1.0], 2)
        terms = [sign, sign * neighbour, other * 2.0**-bits, tip]
        row[first + draw.permutation(neighbours)[: len(terms)]] = terms
    return torch.from_numpy(rows)


def _dot(arithmetic: Arithmetic, rows: Tensor, device: str, fmt: Format = BF16, factor: float = 1.0) -> Tensor:
    """Return row sums as the device's product forms them: rows (m, k) times a factor, padded with zeros to (m, 64).

    A single column, or a short row, may take another path through a library than the products of attention do.
    """
    shared = -(-rows.shape[1] // _SIZE) * _SIZE
    a = torch.zeros(max(rows.shape[0], _SIZE), shared)
    a[: rows.shape[0], : rows.shape[1]] = rows
    b = torch.full((shared, _SIZE), factor)
    product = arithmetic.matmul(a.to(device), b.to(device), Cast(fmt), Accumulator.EXACT)
    return product.cpu()[: rows.shape[0], 0]


def _probe_values() -> Tensor:
    """Return ties of both parities and values a little off them, both signs, in [1, 2)."""
    ulps = torch.arange(16)[:, None] + torch.tensor([0.25, 0.5, 0.75])
    positive = 1.0 + ulps.flatten() * 2.0**-BF16.mantissa_bits
    return torch.cat([positive, -positive])


def _mode_of(rounded: Tensor) -> Rounding | None:
    """Return the mode in which the probe values were rounded."""
    values = _probe_values()
    return next((mode for mode in _DETERMINISTIC if torch.equal(round_to(values, BF16, mode), rounded)), None)


def _mode_of_products(arithmetic: Arithmetic, device: str) -> Rounding | None:
    """Return the mode for rows of two terms, whose sum is a probe value, exact in fp32."""
    values = _probe_values()
    high = round_to(values, BF16, Rounding.RTZ)
    return _mode_of(_dot(arithmetic, torch.stack([high, values - high], -1), device))


def _rounds_after(arithmetic: Arithmetic, device: str, *, heads: int, rows: int, columns: int) -> int:
    """Return how many terms a long product adds before it rounds their sum; 0: all.

    The sum of a large term and two of half its ulp is in the format. If it is rounded between the two, each alone is a
    tie. The second is in another place in every row.
    """
    large, apart = 2.0 ** (BF16.mantissa_bits + 1), _LONG // (heads * rows)
    a = torch.zeros(heads * rows, _LONG)
    a[:, 0], a[:, 1] = large, 1.0
    places = torch.arange(apart, _LONG + 1, apart).clamp(max=_LONG - 1)
    a[torch.arange(heads * rows), places] = 1.0
    ones = torch.ones(1, heads, _LONG, columns, device=device)
    product = arithmetic.matmul(a.reshape(1, heads, rows, _LONG).to(device), ones, Cast(BF16), Accumulator.EXACT)
    lost = (product.cpu()[..., 0].flatten() != large + 2.0).nonzero()
    return int(places[lost[0]]) if len(lost) else 0


def arithmetic_probes(arithmetic: Arithmetic, device: str) -> Mapping[str, str | float]:
    """Return properties of an arithmetic in which an Ascend NPU may differ.

    Returns:
        `fp32_matmul_keeps`: fraction bits of fp32 operands that a product keeps (23; HF32 keeps 11, TF32 10);
        `matmul_accumulator_keeps`: bits below a running sum's leading one that the bf16 product keeps in every order of
        the terms (23: fp32); `matmul_order`: `exact`, `sequential`, `pairwise` (a balanced tree), or the numbers of
        terms of the smallest partial sums that hold terms 0 and j of 32; `cast_subnormals`, `exp_subnormals`: kept or
        flushed; `exp_max_ulps`: largest error of the exponential on [-20, 0] in ulps of fp32.
    """
    quarter = torch.full((1,), BF16.smallest_normal / 4, device=device)
    tiny = arithmetic.exp(torch.full((1,), -90.0, device=device), Exponential())
    x = torch.linspace(-20.0, 0.0, 4096)
    exact, computed = torch.exp(x.double()), arithmetic.exp(x.to(device), Exponential()).cpu().double()
    return {
        "fp32_matmul_keeps": _operand_bits(arithmetic, device),
        "matmul_accumulator_keeps": _accumulator_bits(arithmetic, device),
        "matmul_order": _order(arithmetic, device),
        "cast_subnormals": _kept(arithmetic.cast(quarter, Cast(BF16))),
        "exp_subnormals": _kept(tiny),
        "exp_max_ulps": round(((computed - exact).abs() / ulp(exact, FP32)).max().item(), 2),
    }


def _leading(kept: Tensor) -> float:
    """Return how many answers are yes before the first no."""
    return float(kept.long().cumprod(0).sum())


def _operand_bits(arithmetic: Arithmetic, device: str) -> float:
    """Return the fraction bits of operands that a product keeps, from 1 + 2^-b times 1, on either side."""
    values = torch.tensor([1.0 + 2.0**-bits for bits in range(1, FP32.mantissa_bits + 1)])
    left = _dot(arithmetic, values[:, None], device, FP32)
    right = torch.stack([_dot(arithmetic, torch.ones(1, 1), device, FP32, value)[0] for value in values.tolist()])
    return _leading((left == values) & (right == values))


def _accumulator_bits(arithmetic: Arithmetic, device: str) -> float:
    """Return the bits that a running sum keeps, from 1, 2^-b and -1 in any order."""
    small = torch.tensor([2.0**-bits for bits in range(1, _WIDEST + 1)])
    one = torch.ones_like(small)
    orders = [torch.stack(order, -1) for order in ((one, small, -one), (one, -one, small), (small, one, -one))]
    kept = _dot(arithmetic, torch.cat(orders), device).reshape(len(orders), _WIDEST) == small
    return _leading(kept.all(0))


def _order(arithmetic: Arithmetic, device: str) -> str:
    """Return the order in which the bf16 product adds up 32 terms."""
    left = _dot(arithmetic, _masks(_ORDERED), device)
    sizes = [_ORDERED - round(number) for number in left.tolist()]
    places = range(1, _ORDERED)
    orders = {
        "exact": [2 for _ in places],
        "sequential": [place + 1 for place in places],
        "pairwise": [2 ** place.bit_length() for place in places],
    }
    return next(
        (name for name, order in orders.items() if sizes == order), f"partial sums of {' '.join(map(str, sizes))}"
    )


def _kept(value: Tensor) -> str:
    return "kept" if value.item() != 0.0 else "flushed"
