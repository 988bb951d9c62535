"""What is assumed of a card where the language leaves it open: its products, its exponential, contraction, division."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from tiebreak.backends.emulation.accumulators import ACCUMULATIONS
from tiebreak.kernels.plans import Accumulator

# (a, b, addend), fp32 carriers: (..., m, k), (..., k, n), (..., m, n) -> a @ b + addend, fp32
Product = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Assumptions:
    """A card as the interpreter takes it to be. No card gave anything that is computed under it."""

    name: str  # how --as calls it
    about: str  # one line
    backend: str  # what Triton calls the maker's tools
    architecture: int | str  # and the card, as a kernel may ask for it
    warp: int  # threads of a warp
    accumulator: Accumulator  # in which products of narrow formats are added up, and in which order rows are
    flushes: bool = False  # whether the exponential takes and gives no subnormals
    base_two: bool = False  # whether exp(x) is 2^(x log2 e), its product rounded
    contracts: bool = False  # whether a product goes unrounded into a sum, unless a launch says enable_fp_fusion=False
    reciprocal: bool = False  # whether x / y is a product with the rounded reciprocal

    def described(self) -> dict[str, str | bool]:
        """For the record of a run."""
        return {
            "as": self.name,
            "accumulator": self.accumulator.value,
            "exponential_flushes": self.flushes,
            "exponential_in_base_two": self.base_two,
            "contraction": self.contracts,
            "division_by_reciprocal": self.reciprocal,
        }

    def total(self, x: Tensor) -> Tensor:
        """Sum over the last dimension, (..., k) -> (..., 1)."""
        return ACCUMULATIONS[self.accumulator].total(x)


#: No card: every product, sum and function is exact and rounded once.
EXACT = Assumptions("exact", "sums exact and rounded once, no contraction", "cuda", 80, 32, Accumulator.EXACT)
TARGETS: Mapping[str, Assumptions] = MappingProxyType({EXACT.name: EXACT})
