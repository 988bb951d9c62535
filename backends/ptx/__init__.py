"""Kernels in Triton, CuTe DSL and cuTile on a CPU, as compilers leave them: the PTX of an absent card, executed.

Products add up as that card's tensor cores do (`tiebreak.backends.emulation.tensor_cores`). No GPU runs anything.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiebreak.backends.backend import Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.interpreter.assumptions import FUSING, PACKED, assembler
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.triton.compiling import not_interpreting
from tiebreak.kernels.triton.loading import installed
from tiebreak.kernels.triton.roster import triton_kernels

#: The cards of --as, and bytes of shared memory that a block may have there (CUDA C++ Programming Guide)
CARDS = {"sm_75": 64 << 10, "sm_80": 163 << 10, "sm_86": 99 << 10, "sm_89": 99 << 10, "sm_90": 227 << 10,
         "sm_100": 227 << 10, "sm_120": 99 << 10}  # fmt: skip


@dataclass(frozen=True)
class _Ptx(Backend):
    """A backend for Triton kernels alone: compiled code on an emulated processor."""

    card: str = "sm_80"  # what they are compiled for, with a slash and an assembler that isn't the newest

    @property
    def evidence(self) -> str:
        return f"bits of PTX for {self.card} on an emulated processor"

    @property
    def options(self) -> tuple[str, ...]:
        return "--as", self.card

    def notice(self) -> str:
        what = f"compiled code, emulated processor: the PTX for {self.card}, its tensor cores' sums"
        return f"{what}; approximations as ex2.approx assumed correctly rounded; nothing ran on a GPU"

    def assuming(self, card: str) -> Backend:
        fusing = [f"{packed}/{version}" for packed in PACKED for version in FUSING]
        if card not in (*CARDS, *fusing):
            known = f"{', '.join(CARDS)}, and with the ptxas of CUDA {', '.join(fusing)}"
            raise ValueError(f"{card}: unknown to --backend ptx; its cards are {known}")
        return replace(self, card=card)

    def describe(self) -> dict[str, Any]:
        return {
            "triton": installed(),
            "as": self.card,
            "assembler": assembler(self.card),
            "assumed": {self.name: f"as {self.card} (compiled code, emulated processor; nothing ran on a GPU)"},
        }

    def repeats(self, kernel: Kernel) -> bool:
        return not kernel.external  # blocks run in the same order; a user's kernel may draw its own numbers

    def in_use(self) -> AbstractContextManager[Collection[str]]:
        from tiebreak.backends.ptx.session import executing  # triton may be missing

        return executing(self.card, CARDS[self.card.partition("/")[0]])


PTX = _Ptx(
    "ptx",
    "kernels in Triton, CuTe DSL or cuTile, compiled for an NVIDIA card, their PTX executed on this CPU",
    "cpu",
    EmulatedArithmetic(),
    not_interpreting,
    partial(triton_kernels, interpreted=True),
    composed=False,
    pace="executed",
    slower=15.0,
    budget=110.0,
    on_request=True,
)
