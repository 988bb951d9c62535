"""What truncation does to one masked product, beside rounding to even: the first tables of docs/reduced-precision.md.

python docs/reduced_precision.py
"""

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from tabulate import tabulate
from torch import Tensor

from tiebreak.backends.reduced import masked_product, parse_reduction
from tiebreak.kernels.formats import ulp

DRAWS, ROWS, INNER = 16, 128, 256
FORMATS = tuple(f"E8M{bits}" for bits in (7, 6, 5, 4, 3))
MODES = ("", ":zero")
# What A is like; B is normal, and so Y has both signs in either case.
INPUTS: dict[str, Callable[[np.random.Generator], Tensor]] = {
    "normal": lambda rng: torch.from_numpy(rng.standard_normal((ROWS, INNER), dtype=np.float32)),
    "rows of a softmax": lambda rng: torch.from_numpy(rng.standard_normal((ROWS, INNER), dtype=np.float32)).softmax(-1),
}


@dataclass(frozen=True)
class Found:
    """Means over the draws, and standard errors."""

    bias: float  # signed error in ulps of the format, away from zero positive
    bias_error: float
    gain: float  # sum |Y| / sum |Y without masks|

    @property
    def cells(self) -> tuple[str, str]:
        """As the table has it."""
        return f"{self.bias:+.3f} ± {2 * self.bias_error:.3f}", f"{self.gain:.4f}"


def measure(name: str, kind: str) -> tuple[Found, Found]:
    """Of Y = A B and of dA = dY B^T, against the same products in fp64 without masks."""
    reduction = parse_reduction(name)
    errors: tuple[list[float], list[float]] = ([], [])
    gains: tuple[list[float], list[float]] = ([], [])
    for draw in range(DRAWS):
        rng = np.random.default_rng([draw, 15])
        a = INPUTS[kind](rng).requires_grad_()
        b, dy = (torch.from_numpy(rng.standard_normal(shape, dtype=np.float32)) for shape in ((INNER, 64), (ROWS, 64)))
        y = masked_product(torch.matmul, reduction, a, b)
        y.backward(dy)  # type: ignore[no-untyped-call]
        assert a.grad is not None
        exact = (a.detach().double() @ b.double(), dy.double() @ b.double().mT)
        for at, (found, reference) in enumerate(zip((y.detach(), a.grad), exact, strict=True)):
            signed = (found.double() - reference) * reference.sign() / ulp(reference, reduction.fmt)
            errors[at].append(signed.mean().item())
            gains[at].append((found.abs().sum() / reference.abs().sum()).item())
    forward, backward = (
        Found(statistics.fmean(each), statistics.stdev(each) / DRAWS**0.5, statistics.fmean(gain))
        for each, gain in zip(errors, gains, strict=True)
    )
    return forward, backward


def main() -> None:
    """Print the tables."""
    for kind in INPUTS:
        rows = [
            (fmt, *(cell for mode in MODES for found in measure(fmt + mode, kind) for cell in found.cells))
            for fmt in FORMATS
        ]
        head = [
            f"{what}, {mode}" for mode in ("even", "truncated") for what in ("Y, ulp", "Y, size", "dA, ulp", "dA, size")
        ]
        print(f"A: {kind}\n\n{tabulate(rows, ('format', *head), tablefmt='pipe', disable_numparse=True)}\n")


if __name__ == "__main__":
    main()
