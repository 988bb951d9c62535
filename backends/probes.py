"""Probes: what a device's arithmetic does, measured, not read off a data sheet. The answers are its fingerprint."""

from collections.abc import Mapping

import torch
from torch import Tensor

from tiebreak.backends.emulation.rounding import round_to
from tiebreak.kernels.arithmetic import Arithmetic
from tiebreak.kernels.formats import BF16, Format, Rounding
from tiebreak.kernels.plans import Accumulator, Cast, Exponential

_SIZE = 64
_LONG = 2048  # terms of a product that a library may split
_AS_ATTENTION = {"heads": 8, "rows": 32, "columns": 64}  # as a framework's attention asks for P V
_DETERMINISTIC = tuple(mode for mode in Rounding if mode is not Rounding.STOCHASTIC)


def fingerprint(arithmetic: Arithmetic, device: str, fmt: Format = BF16) -> Mapping[str, str | float]:
    """What the arithmetic on a device does where devices are known to differ.

    Args:
        arithmetic: of the device.
        device: torch's name of it.
        fmt: the narrow format that is probed.

    Returns:
        `cast` and `matmul`: the mode in which a cast and a matrix product round, `none known` if no mode fits;
        `matmul_sums_in`: whether the product's running sum is wider than `fmt`, and whether fp32 holds it rounded to
        odd; `matmul_rounds_after` and `batched_matmul_rounds_after`: how many terms it adds before it puts their sum
        into `fmt`, of 2,048, where a library splits long products; `matmul_subnormals`: kept or flushed; `exp_at_zero`:
        the device's exp(0).
    """
    values = _probe_values(fmt)
    cast = arithmetic.cast(values.to(device), Cast(fmt)).cpu()
    # Each row's two terms add up to one probe value, exactly in fp32.
    high = round_to(values, fmt, Rounding.TOWARD_ZERO)
    pairs = torch.stack([high, values - high], -1)
    product = dot(arithmetic, pairs, device, fmt)
    survived = dot(arithmetic, torch.full((1, 1), fmt.smallest_normal / 4), device, fmt).item() != 0.0
    return {
        "cast": _mode_of(values, cast, fmt),
        "matmul": _mode_of(values, product, fmt),
        "matmul_sums_in": _sums_in(arithmetic, device, fmt),
        "matmul_rounds_after": _in_words(_rounds_after(arithmetic, device, fmt, heads=1, rows=128, columns=128)),
        "batched_matmul_rounds_after": _in_words(_rounds_after(arithmetic, device, fmt, **_AS_ATTENTION)),
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
    changes = [f"accumulator={Accumulator.BFMMLA.name.lower()}"] if _sums_to_odd(arithmetic, device, BF16) else []
    if terms := _rounds_after(arithmetic, device, BF16, **_AS_ATTENTION):
        changes.append(f"o_bar=input/{terms}")
    return tuple(changes)


def dot(arithmetic: Arithmetic, rows: Tensor, device: str, fmt: Format) -> Tensor:
    """Row sums as the device's matrix product forms them: rows (m, k) times ones, padded with zeros to (m, 64).

    A single column, or a short row, may take another path through a library than the products of attention do.
    """
    shared = -(-rows.shape[1] // _SIZE) * _SIZE
    a = torch.zeros(max(rows.shape[0], _SIZE), shared)
    a[: rows.shape[0], : rows.shape[1]] = rows
    b = torch.ones(shared, _SIZE)
    product = arithmetic.matmul(a.to(device), b.to(device), Cast(fmt), Accumulator.EXACT)
    return product.cpu()[: rows.shape[0], 0]


def _probe_values(fmt: Format) -> Tensor:
    """Ties of both parities and values a little beside them, both signs, in [1, 2)."""
    ulp = 2.0**-fmt.mantissa_bits
    numbers = 1.0 + torch.arange(16, dtype=torch.float32) * ulp
    offsets = torch.tensor([0.25, 0.5, 0.75]) * ulp
    positive = (numbers[:, None] + offsets).flatten()
    return torch.cat([positive, -positive])


def _mode_of(values: Tensor, rounded: Tensor, fmt: Format) -> str:
    fitting = [mode.value for mode in _DETERMINISTIC if torch.equal(round_to(values, fmt, mode), rounded)]
    return fitting[0] if fitting else "none known"


def _sums_in(arithmetic: Arithmetic, device: str, fmt: Format) -> str:
    if not _sums_wide(arithmetic, device, fmt):
        return fmt.name
    return "fp32, rounded to odd" if _sums_to_odd(arithmetic, device, fmt) else "fp32 or wider"


def _sums_wide(arithmetic: Arithmetic, device: str, fmt: Format) -> bool:
    """Whether 1 and many terms of a quarter ulp each add up: in the narrow format itself they never leave 1."""
    terms = 2 ** (fmt.mantissa_bits + 2)
    row = torch.full((1, terms + 1), 1.0 / terms)
    row[0, 0] = 1.0
    return dot(arithmetic, row, device, fmt).item() >= 1.5


def _sums_to_odd(arithmetic: Arithmetic, device: str, fmt: Format) -> bool:
    """Whether a tail far below fp32's last bit tips a tie, and does so still when it has been taken off again."""
    tie, tail = 1.0 + 2.0 ** -(fmt.mantissa_bits + 1), 2.0**-30
    # Terms come in pairs, whose sums are exact.
    rows = torch.tensor([[1.0, tie - 1.0, tail, 0.0, 0.0, 0.0], [1.0, tie - 1.0, tail, 0.0, -tail, 0.0]])
    return bool((dot(arithmetic, rows, device, fmt) > tie).all())


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


def _in_words(terms: int) -> str:
    return f"{terms} terms" if terms else "all terms"
