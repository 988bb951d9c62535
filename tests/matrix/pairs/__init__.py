"""Pairs: two kernels on the same inputs, what separates them, and how far apart they are in log-probabilities."""

from dataclasses import dataclass

from tiebreak.backends.backend import Backend
from tiebreak.kernels.kernel import Declaration, Kernel
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

DECLARED = "declared"  # what a plan rests on that its author names


@dataclass(frozen=True)
class Side:
    """One of two kernels that are compared."""

    name: str  # as it was asked for
    backend: Backend
    kernel: Kernel  # one that declares nothing declares nothing here either
    plan: Declaration | None  # that it declares, or follows by its bits, or the nearest; None: nothing could be told
    known: bool  # whether it follows that plan, and the plan is not merely the nearest
    rests_on: str = DECLARED  # what the plan rests on, in words

    @property
    def place(self) -> str:
        """Return where it runs, with the card that is assumed there."""
        return " ".join([self.backend.name, *self.backend.options]).replace("--", "")


def bits_of(share: float | None, evidence: str, inputs: int, *, known: bool = True) -> str:
    """Return in words that a plan, or the nearest one, has a share of a side's bits on so many inputs."""
    nearest = "" if known else "nearest, none is known: "
    return f"{nearest}{percent(share)} of {evidence} on {counted(inputs, 'input')}"
