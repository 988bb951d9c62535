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
from tiebreak.kernels.formats import BF16, FP32, Format, Rounding
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

_SIZE = 64
_LONG = 2048  # terms of a product that a library may split
_AS_ATTENTION = {"heads": 8, "rows": 32, "columns": 64}  # as a framework's attention asks for P V
_LARGE = 2.0**30  # swallows fewer than 64 ones in fp32
_WINDOWS = (4, 8, 16, 32, 64)  # neighbours among which what meets what differs
_TAILS = range(17, 35)  # how many bits below 1 a tail lies: bf16 lacks all of them, fp32 those beyond 23
_TIP = 6  # bits below a tail
_DETERMINISTIC = tuple(mode for mode in Rounding if mode is not Rounding.STOCHASTIC)


def fingerprint(arithmetic: Arithmetic, device: str, fmt: Format = BF16) -> Mapping[str, str | float]:
    """What the arithmetic on a device does where devices are known to differ.

    Args:
        arithmetic: of the device.
        device: torch's name of it.
        fmt: the narrow format that is probed.

    Returns:
        `cast` and `matmul`: the mode in which a cast and a matrix product round, `none known` if no mode fits;
        `matmul_sums_in`: whether the product's running sum is wider than `fmt`; `bf16_matmul_accumulator`: what adds up
        a product of bf16, as plans call it; `matmul_rounds_after` and `batched_matmul_rounds_after`: how many terms it
        adds before it puts their sum into `fmt`, of 2,048, where a library splits long products; `matmul_subnormals`:
        kept or flushed; `exp_at_zero`: the device's exp(0).
    """
    values = _probe_values(fmt)
    cast = arithmetic.cast(values.to(device), Cast(fmt)).cpu()
    survived = dot(arithmetic, torch.full((1, 1), fmt.smallest_normal / 4), device, fmt).item() != 0.0
    return {
        "cast": _in_words(_mode_of(values, cast, fmt)),
        "matmul": _in_words(_mode_of_products(arithmetic, device, fmt)),
        "matmul_sums_in": "fp32 or wider" if _sums_wide(arithmetic, device, fmt) else fmt.name,
        "bf16_matmul_accumulator": " or ".join(map(_word, accumulators_of(arithmetic, device))) or "none known",
        "matmul_rounds_after": _terms(_rounds_after(arithmetic, device, fmt, heads=1, rows=128, columns=128)),
        "batched_matmul_rounds_after": _terms(_rounds_after(arithmetic, device, fmt, **_AS_ATTENTION)),
        "matmul_subnormals": "kept" if survived else "flushed",
        "exp_at_zero": arithmetic.exp(torch.zeros(1, device=device), Exponential()).item(),
    }


def of_products(arithmetic: Arithmetic, device: str) -> tuple[str, ...]:
    """What a device's products of bf16 do that a plan has to say.

    Args:
        arithmetic: of the device.
        device: torch's name of it.

    Returns:
        Changes of a plan, as declarations have them, each with those before it: how products are added up, then after
        how many terms P V is rounded where it is in the inputs' format. None where there is nothing to say.
    """
    fitting = accumulators_of(arithmetic, device)
    changes = [f"accumulator={_word(fitting[0])}"] if fitting and Accumulator.EXACT not in fitting else []
    if terms := _rounds_after(arithmetic, device, BF16, **_AS_ATTENTION):
        changes.append(f"o_bar=input/{terms}")
    return tuple(changes)


def accumulators_of(arithmetic: Arithmetic, device: str) -> tuple[Accumulator, ...]:
    """The accumulators whose emulation has all bits of a device's products of bf16.

    `masks` tell the order of terms; tails beside a tie of bf16, or beside 1 and -1, the width and the rounding of sums;
    numbers at the edge of the normal ones what is flushed.

    Args:
        arithmetic: of the device.
        device: torch's name of it.

    Returns:
        Several where these products don't tell them apart; none where no accumulator is known that does so, or the
        device's cast is in no known mode.
    """
    mode = _mode_of_products(arithmetic, device, BF16)
    if mode is None:
        return ()
    ours = [dot(arithmetic, rows, device, BF16, factor) for factor, rows in _sums().items()]
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
    """Rows of 64 terms, by what all are multiplied by."""
    smallest = BF16.smallest_normal
    # Subnormal: a sum; a term before and after a normal one; a sum which another term makes normal again.
    edge = torch.zeros(4, _SIZE)
    edge[0, 0] = smallest / 4
    edge[1:3, :2] = torch.tensor([[smallest, smallest / 2], [smallest / 2, smallest]])
    edge[3, [0, 2, 4]] = torch.tensor([1.5 * smallest, -smallest, smallest])
    tails = [_tails(beside) for beside in (-1.0, 2.0 ** -(BF16.mantissa_bits + 1))]
    # The factor makes subnormal products of normal operands.
    return {1.0: torch.cat([masks(_SIZE), *tails, edge]), 1.0 / _LARGE: edge * _LARGE}


def masks(terms: int) -> Tensor:
    """Rows whose sums show in which order their terms are added up.

    A large number in place 0 and its negative in place j swallow every one that joins either of them before they meet:
    what is left shows how many terms had met by then (Xie et al., "FPRev: revealing the order of floating-point
    summation", 2024, arXiv 2411.00442).

    Args:
        terms: of a row, fewer than 67.

    Returns:
        (terms - 1, terms), j from 1 on.
    """
    rows = torch.ones(terms - 1, terms)
    rows[:, 0] = _LARGE
    rows[torch.arange(terms - 1), torch.arange(1, terms)] = -_LARGE
    return rows


def _tails(beside: float) -> Tensor:
    """1, what stands beside it and a tail at drawn places among so many neighbours, for every size of a tail.

    A tail is kept, lost, cut off, rounded down or leaves a mark in the last bit, depending on what it meets first (as
    in Hawkeye, arXiv 2603.20421, and MMA-Sim, arXiv 2511.10909). The larger ones have a second, which tips their ties.
    """
    draw = np.random.Generator(np.random.Philox(1))
    rows = np.zeros((len(_WINDOWS) * len(_TAILS), _SIZE), np.float32)
    for row, (neighbours, bits) in zip(rows, product(_WINDOWS, _TAILS), strict=True):
        tip = 2.0 ** -(bits + _TIP) if bits <= FP32.mantissa_bits + 1 else 0.0
        first = neighbours * draw.integers(_SIZE // neighbours)
        sign, other = draw.choice([1.0, -1.0], 2)
        terms = [sign, sign * beside, other * 2.0**-bits, tip]
        row[first + draw.permutation(neighbours)[: len(terms)]] = terms
    return torch.from_numpy(rows)


def dot(arithmetic: Arithmetic, rows: Tensor, device: str, fmt: Format, factor: float = 1.0) -> Tensor:
    """Row sums as the device's matrix product forms them: rows (m, k) times a factor, padded with zeros to (m, 64).

    A single column, or a short row, may take another path through a library than the products of attention do.
    """
    shared = -(-rows.shape[1] // _SIZE) * _SIZE
    a = torch.zeros(max(rows.shape[0], _SIZE), shared)
    a[: rows.shape[0], : rows.shape[1]] = rows
    b = torch.full((shared, _SIZE), factor)
    product = arithmetic.matmul(a.to(device), b.to(device), Cast(fmt), Accumulator.EXACT)
    return product.cpu()[: rows.shape[0], 0]


def _probe_values(fmt: Format) -> Tensor:
    """Ties of both parities and values a little beside them, both signs, in [1, 2)."""
    ulp = 2.0**-fmt.mantissa_bits
    numbers = 1.0 + torch.arange(16, dtype=torch.float32) * ulp
    offsets = torch.tensor([0.25, 0.5, 0.75]) * ulp
    positive = (numbers[:, None] + offsets).flatten()
    return torch.cat([positive, -positive])


def _mode_of(values: Tensor, rounded: Tensor, fmt: Format) -> Rounding | None:
    return next((mode for mode in _DETERMINISTIC if torch.equal(round_to(values, fmt, mode), rounded)), None)


def _mode_of_products(arithmetic: Arithmetic, device: str, fmt: Format) -> Rounding | None:
    """Of rows of two terms, which add up to one probe value, exactly in fp32."""
    values = _probe_values(fmt)
    high = round_to(values, fmt, Rounding.TOWARD_ZERO)
    return _mode_of(values, dot(arithmetic, torch.stack([high, values - high], -1), device, fmt), fmt)


def _sums_wide(arithmetic: Arithmetic, device: str, fmt: Format) -> bool:
    """Whether 1 and many terms of a quarter ulp each add up: in the narrow format itself they never leave 1."""
    terms = 2 ** (fmt.mantissa_bits + 2)
    row = torch.full((1, terms + 1), 1.0 / terms)
    row[0, 0] = 1.0
    return dot(arithmetic, row, device, fmt).item() >= 1.5


def _rounds_after(arithmetic: Arithmetic, device: str, fmt: Format, *, heads: int, rows: int, columns: int) -> int:
    """How many terms a long product adds before it rounds their sum; 0: all.

    Of a large term and two of half its ulp the sum is in the format. Rounded between the two, each alone is a tie. The
    second lies elsewhere in every row.
    """
    large, apart = 2.0 ** (fmt.mantissa_bits + 1), _LONG // (heads * rows)
    a = torch.zeros(heads * rows, _LONG)
    a[:, 0], a[:, 1] = large, 1.0
    places = torch.arange(apart, _LONG + 1, apart).clamp(max=_LONG - 1)
    a[torch.arange(heads * rows), places] = 1.0
    product = arithmetic.matmul(
        a.reshape(1, heads, rows, _LONG).to(device),
        torch.ones(1, heads, _LONG, columns, device=device),
        Cast(fmt),
        Accumulator.EXACT,
    )
    lost = (product.cpu()[..., 0].flatten() != large + 2.0).nonzero()
    return int(places[lost[0]]) if len(lost) else 0


def _word(accumulator: Accumulator) -> str:
    return accumulator.name.lower()


def _in_words(mode: Rounding | None) -> str:
    return mode.value if mode else "none known"


def _terms(terms: int) -> str:
    return f"{terms} terms" if terms else "all terms"
