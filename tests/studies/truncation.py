"""What truncation does to one masked product, beside rounding to even: a table of docs/fewer-bits.md."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from tiebreak.kernels.formats import ulp
from tiebreak.laboratory.reduced import masked_product, parse_reduction
from tiebreak.studies.pages import PageTable, table

DRAWS, ROWS, INNER, COLUMNS = 16, 128, 256, 64
FORMATS = tuple(f"E8M{bits}" for bits in (7, 6, 5, 4, 3))


@dataclass(frozen=True)
class Error:
    """Means over the draws, and standard errors."""

    bias: float  # mean signed error over mean ulp, away from zero positive
    error: float  # of the bias
    gain: float  # sum |Y| / sum |Y without masks|

    @property
    def text(self) -> str:
        """The bias, with two standard errors."""
        return f"{self.bias:+.3f} ± {2 * self.error:.3f}"


def measure(name: str) -> tuple[Error, Error]:
    """Of Y = A B and of dA = dY B^T, against the same products in fp64 without masks.

    The mean error is divided by the mean ulp: elements near 0, whose terms cancel, have errors of hundreds of ulps.
    """
    reduction = parse_reduction(name)
    errors: tuple[list[float], list[float]] = ([], [])
    gains: tuple[list[float], list[float]] = ([], [])
    for draw in range(DRAWS):
        rng = np.random.default_rng([draw, 15])
        shapes = ((ROWS, INNER), (INNER, COLUMNS), (ROWS, COLUMNS))
        a, b, dy = (torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in shapes)
        a.requires_grad_()
        y = masked_product(torch.matmul, reduction, a, b)
        y.backward(dy)  # type: ignore[no-untyped-call]
        assert a.grad is not None
        exact = (a.detach().double() @ b.double(), dy.double() @ b.double().mT)
        for at, (result, reference) in enumerate(zip((y.detach(), a.grad), exact, strict=True)):
            signed = (result.double() - reference) * reference.sign()
            errors[at].append((signed.mean() / ulp(reference, reduction.fmt).mean()).item())
            gains[at].append((result.abs().sum() / reference.abs().sum()).item())
    forward, backward = (
        Error(statistics.fmean(each), statistics.stdev(each) / DRAWS**0.5, statistics.fmean(gain))
        for each, gain in zip(errors, gains, strict=True)
    )
    return forward, backward


def row(fmt: str) -> tuple[str, ...]:
    """Of the table."""
    (y, _), (cut_y, cut_da) = (measure(fmt + mode) for mode in ("", ":rtz"))
    return fmt, y.text, cut_y.text, cut_da.text, f"{y.gain:.4f}", f"{cut_y.gain:.4f}"


def of_formats() -> Iterator[str]:
    """Yield a row for each format."""
    head = ("format", *(f"{place}: ulp" for place in ("Y, even", "Y, truncated", "dA, truncated")))
    yield from table((*head, "Y, even: size", "Y, truncated: size"), map(row, FORMATS))


TABLES = [PageTable("fewer-bits.md", "truncation", of_formats)]
