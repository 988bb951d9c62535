"""Assumptions about a card where the language leaves it open: products, the exponential, contraction, division."""

import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from packaging.version import Version

from tiebreak.backends.emulation.tensor_cores import TARGETS as KNOWN_CORES
from tiebreak.kernels.triton.loading import installed

#: The cards for which PTX has packed sums and products, and versions of ptxas that fuse these in spite of `.rn`:
#: 12.9.86 and 13.0.88 do, 13.1.115 and 13.4.59 don't. To ask for one, a card's name has it behind a slash.
PACKED, FUSING = ("sm_100", "sm_120"), ("12.9", "13.0")
_KNOB, _OVERRIDE = "TRITON_DEFAULT_FP_FUSION", "TRITON_FORCE_DISABLE_FP_FUSION"  # of the environment


def assembler(card: str) -> str:
    """Return which assembler a card's name stands for, and what it does to sums and products."""
    name, _, version = card.partition("/")
    fuses = f"ptxas {version}, packed products fused into sums"
    return fuses if version else f"ptxas{' 13.1 or newer' * (name in PACKED)}, nothing contracted"


@dataclass(frozen=True)
class Assumptions:
    """The properties of a card that the interpreter assumes; nothing computed under them came from a card."""

    name: str  # how --as calls it
    backend: str = "cuda"  # what Triton calls the maker's tools
    architecture: int | str = 80  # and the card, as a kernel may ask for it
    warp: int = 32  # threads of a warp
    #: Whether sums and exponentials are exact and rounded once. Else products add up as on its tensor cores, rows in
    #: fp32, and exp(x) is 2^(x log2 e), its argument rounded and a subnormal result flushed.
    exact: bool = True
    contracts: bool = False  # whether a product goes unrounded into a sum, where Triton lets it
    reciprocal: bool = False  # whether x / y is a product with the rounded reciprocal
    #: How four lanes, that hold pairs of a product's columns, add up a row, the last first: 0 a pair's places in every
    #: eight columns, 1 lanes 2 apart, 2 neighbours, 3 within a pair. Lanes alone: each adds its columns up in turn
    #: before. Empty: a balanced tree.
    pairs: tuple[int, ...] = ()
    #: Whether a thread has a row, or a part of it, of a product of 64 rows or more: even columns come first, then odd.
    whole_rows: bool = False

    def order(self, size: int) -> tuple[int, ...]:
        """Return `pairs` of numbers of so many bytes: sm_90 adds two of 16 bits at once, as later cards two of 32."""
        return (2, 1, 3, 0) if size == 2 and self.name == "sm_90" and len(self.pairs) > 2 else self.pairs

    @property
    def about(self) -> str:
        """The assumptions, in one line."""
        if self.exact:
            return "no card: sums exact and rounded once, nothing contracted"
        contraction = f"contraction {self.contraction()[1]}"
        division = ", / by the rounded reciprocal" * self.reciprocal
        return (
            f"as {self.name}, assumed: its tensor cores' sums, rows summed in fp32, exp in base two, no subnormal "
            f"from it, {contraction}{division}; nothing ran on a GPU"
        )

    @property
    def target(self) -> Any:
        """The name that Triton has for the card: its GPUTarget."""
        from triton.backends.compiler import GPUTarget  # triton may be missing

        return GPUTarget(self.backend, self.architecture, self.warp)

    def contraction(self, enable_fp_fusion: object = None) -> tuple[bool, str]:
        """Return whether products enter sums unrounded under a launch's `enable_fp_fusion`, and who decided it.

        Triton's own compiler for the card decides: its default has changed (up to 3.9, triton PR 11270).
        """
        if not self.contracts:
            return False, "off, none is assumed of the card"
        from triton import knobs
        from triton.compiler.compiler import make_backend

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Triton 3.9 announces another default
            on: bool = make_backend(self.target).parse_options({"enable_fp_fusion": enable_fp_fusion}).enable_fp_fusion
        deciding = {
            _OVERRIDE: getattr(knobs.language, "force_disable_fp_fusion", False),  # from 3.9 on
            "asked by the launch": enable_fp_fusion is not None,
            _KNOB: _KNOB in os.environ,
            f"Triton {installed()}'s default": True,
        }
        return on, f"{'on' if on else 'off'}, {next(name for name, decides in deciding.items() if decides)}"

    def described(self) -> dict[str, str | bool]:
        """Return the assumptions for the record of a run."""
        part = f"each thread's part{', its odd columns last' * self.whole_rows}{' in turn' * (len(self.pairs) == 2)}"
        order = f"{part}, then its neighbours'" if self.pairs else "a balanced tree"
        return {
            "as": self.name,
            "sums": "exact" if self.exact else f"tensor cores of {self.name}, rows in fp32 as {order}",
            "exponential_flushes": not self.exact,
            "exponential_in_base_two": not self.exact,
            "contraction": self.contraction()[1],
            **({"assembler": assembler(self.name)} if self.name in PACKED else {}),
            "division_by_reciprocal": self.reciprocal,
        }


#: No card: every product, sum and function is exact and rounded once.
EXACT = Assumptions("exact")
# From Triton's assembly, by `tiebreak audit` (docs/audit.md): NVIDIA's `/` is div.full.f32, whose bits are unpublished
# and which is at most 2 ulp off, as is a product with the reciprocal. For sm_100 Triton contracts before and behind its
# pipelined loops, and not within. AMD's assembler contracts only some arguments of exponentials: none is assumed.
_CONTRACTING = frozenset({"sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"})
# As the backend ptx finds it, with the layout of mma.sync and wgmma: Triton adds up a lane's columns in turn, from 3.8
# on as a tree. For sm_120 the tree adds pairs to pairs, with add.f32x2.
_IN_TURN = Version(installed() or "3.8") < Version("3.8")
_PAIRS = dict.fromkeys(("sm_80", "sm_86", "sm_89", "sm_90"), (2, 1) if _IN_TURN else (2, 1, 0, 3))
_PAIRS["sm_120"] = (2, 1) if _IN_TURN else (2, 1, 3, 0)
if not _IN_TURN:
    _PAIRS["sm_100"] = _PAIRS["sm_120"]  # where products are too small for tcgen05


def _card(name: str) -> Assumptions:
    if name.startswith("gfx"):
        return Assumptions(name, "hip", name, 64, exact=False)
    architecture, contracts = int(name.removeprefix("sm_")), name in _CONTRACTING
    pairs, whole = _PAIRS.get(name, ()), name == "sm_100" and not _IN_TURN
    return Assumptions(
        name,
        architecture=architecture,
        exact=False,
        contracts=contracts,
        reciprocal=True,
        pairs=pairs,
        whole_rows=whole,
    )


#: By the names that --as takes. Volta is none: Triton has dropped it.
CARDS: Mapping[str, Assumptions] = {EXACT.name: EXACT} | {name: _card(name) for name in KNOWN_CORES if name != "sm_70"}
