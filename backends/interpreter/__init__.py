"""Triton kernels on a CPU: Triton's own interpreter, made to round as the language defines it.

Upstream's interpreter holds bf16 as 16 bits of an integer: its cast truncates, its products multiply those bits (triton
issue 11584, closed as unsupported). Here a number of a narrow format is a number; see `builder`.
"""

from collections.abc import Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from tiebreak.backends.backend import Backend
from tiebreak.backends.emulation.arithmetic import EmulatedArithmetic
from tiebreak.backends.interpreter.assumptions import CARDS, EXACT, PACKED, Assumptions, assembler
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.triton.compiling import not_interpreting
from tiebreak.kernels.triton.loading import installed
from tiebreak.kernels.triton.roster import triton_kernels


@dataclass(frozen=True)
class _Interpreter(Backend):
    """A backend for Triton kernels alone: on a CPU, rounding as a card is assumed to."""

    assumed: Assumptions = EXACT

    @property
    def evidence(self) -> str:
        return f"bits in the interpreter{f', as {self.assumed.name} is assumed to round' * bool(self.options)}"

    @property
    def options(self) -> tuple[str, ...]:
        return () if self.assumed == EXACT else ("--as", self.assumed.name)

    def notice(self) -> str:
        return self.assumed.about

    def assuming(self, card: str) -> Backend:
        if card not in CARDS:
            older = (
                f" with {assembler(name)}; --backend ptx has others"
                if (name := card.partition("/")[0]) in PACKED
                else ""
            )
            raise ValueError(f"{card}: unknown; the cards are {', '.join(CARDS)}{older}")
        return replace(self, assumed=CARDS[card])

    def describe(self) -> dict[str, Any]:
        described: dict[str, Any] = {"triton": installed(), **self.assumed.described()}
        if self.options:
            # Reports add this to the backend's name.
            described["assumed"] = {self.name: f"as {self.assumed.name} (assumed; nothing ran on a GPU)"}
        return described

    def repeats(self, kernel: Kernel) -> bool:
        return not kernel.external  # programs run one after the other; a user's may draw its own numbers

    def in_use(self) -> AbstractContextManager[Collection[str]]:
        from tiebreak.backends.interpreter.session import interpreting  # triton may be missing

        return interpreting(self.assumed)


INTERPRETER = _Interpreter(
    "interpreter",
    "Triton kernels, in Triton's interpreter on this CPU",
    "cpu",
    EmulatedArithmetic(),
    not_interpreting,
    partial(triton_kernels, interpreted=True),
    composed=False,
    pace="interpreted",
    slower=15.0,
    budget=110.0,
)
