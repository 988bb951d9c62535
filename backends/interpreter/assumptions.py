"""What is assumed of a card where the language leaves it open: its products, its exponential, contraction, division."""

from collections.abc import Mapping
from dataclasses import dataclass

from tiebreak.backends.emulation.tensor_cores import TARGETS as KNOWN_CORES


@dataclass(frozen=True)
class Assumptions:
    """A card as the interpreter takes it to be. No card gave anything that is computed under it."""

    name: str  # how --as calls it
    backend: str = "cuda"  # what Triton calls the maker's tools
    architecture: int | str = 80  # and the card, as a kernel may ask for it
    warp: int = 32  # threads of a warp
    #: Whether sums and exponentials are exact and rounded once. Else products add up as on its tensor cores, rows in
    #: fp32, and exp(x) is 2^(x log2 e), its argument rounded and a subnormal result flushed.
    exact: bool = True
    contracts: bool = False  # whether a product goes unrounded into a sum, unless a launch says enable_fp_fusion=False
    reciprocal: bool = False  # whether x / y is a product with the rounded reciprocal

    @property
    def about(self) -> str:
        """One line."""
        if self.exact:
            return "no card: sums exact and rounded once, nothing contracted"
        contraction = "products contracted into sums" if self.contracts else "nothing contracted"
        division = ", / by the rounded reciprocal" * self.reciprocal
        return (
            f"as {self.name}, assumed: its tensor cores' sums, rows summed in fp32, exp in base two, no subnormal "
            f"from it, {contraction}{division}; nothing ran on a GPU"
        )

    def described(self) -> dict[str, str | bool]:
        """For the record of a run."""
        return {
            "as": self.name,
            "sums": "exact" if self.exact else f"tensor cores of {self.name}, rows in fp32 as a balanced tree",
            "exponential_flushes": not self.exact,
            "exponential_in_base_two": not self.exact,
            "contraction": self.contracts,
            "division_by_reciprocal": self.reciprocal,
        }


#: No card: every product, sum and function is exact and rounded once.
EXACT = Assumptions("exact")
# As `tiebreak audit` finds it in Triton's assembly (docs/audit.md): NVIDIA's `/` is div.full.f32, whose bits nobody has
# published and which is 2 ulp off at most; a product with the reciprocal is off as much. B200's PTX contracts nothing,
# AMD's assembler some of the arguments of an exponential and not others: none is assumed there.
_CONTRACTING = frozenset({"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_120"})


def _card(name: str) -> Assumptions:
    if name.startswith("gfx"):
        return Assumptions(name, "hip", name, 64, exact=False)
    architecture, contracts = int(name.removeprefix("sm_")), name in _CONTRACTING
    return Assumptions(name, architecture=architecture, exact=False, contracts=contracts, reciprocal=True)


#: By the names that --as takes. Volta is none: Triton has dropped it.
CARDS: Mapping[str, Assumptions] = {EXACT.name: EXACT} | {name: _card(name) for name in KNOWN_CORES if name != "sm_70"}
