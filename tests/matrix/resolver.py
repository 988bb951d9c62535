"""The plug-in that finds the plan of a kernel that declares none; without one such a plan is not known."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from torch import Tensor

from tiebreak.kernels.inputs import Gradients
from tiebreak.matrix.experiment import Cell, Kind, Offer
from tiebreak.matrix.result import HeldTo
from tiebreak.matrix.sample import Sample
from tiebreak.matrix.workbench import Settled, SharedBatch, Workbench
from tiebreak.plugins import Door
from tiebreak.reports.records.record import ExperimentRecord, Explanation, Record


@dataclass(frozen=True)
class BackwardPasses(ABC):
    """The known backward passes that a kernel's gradients are compared with."""

    name: str  # of the backward pass, as reports have it
    bits: Mapping[str, Mapping[str, float]]  # by backward pass, the share of equal bits of dQ, dK and dV
    slips: Mapping[str, float]  # usual mistakes that explain what is wrong, and their share of its squared error

    @abstractmethod
    def added_to(self, sample: Sample, gradients: Gradients, o: Tensor, batch: SharedBatch) -> Sample:
        """Return the sample with the errors of a batch's gradients, and of the passes that they are held to."""


class Resolver(Kind):
    """A kind of experiment that also tells which plan a kernel follows; this one knows of none."""

    def plan_of(self, cell: Cell, bench: Workbench) -> Settled:
        """Return what is known of the plan of a kernel that declares none, before its cells."""
        return Settled("nothing: no plug-in that tells plans is here")

    def resolved(self, sample: Sample, settled: Settled) -> Sample:
        """Return a sample of a kernel that declares none with how known plans fit, and the one that it is held to."""
        return sample

    def backward(self, sample: Sample, held_to: HeldTo, settled: Settled) -> BackwardPasses | None:
        """Return what the gradients of a user's kernel are compared with."""
        return None

    def slips(self, sample: Sample) -> Mapping[str, float]:
        """Return the usual mistakes that explain a wrong output, and the share of its bits that each has."""
        return {}

    def hint(self, cell: Cell) -> str:
        """Return what helps where a kernel raised, to be told before its error; empty: nothing is known."""
        return ""

    def explained(self, run: Iterable[Record]) -> Mapping[str, Explanation]:
        """Return the best plan of every kernel whose records tell of one, by backend-kernel."""
        return {}


@cache
def resolver() -> Resolver:
    """Return the first that a plug-in brings."""
    every = Door[Offer]("tiebreak.experiments", Offer).usable().values()
    return next((each for each in every if isinstance(each, Resolver)), Resolver("", ExperimentRecord("")))


def plan_of(cell: Cell, bench: Workbench) -> Settled:
    """Return what is known of the plan of a cell's kernel, before its cells."""
    declared = cell.kernel.declaration
    return resolver().plan_of(cell, bench) if declared is None else Settled("what it declares", declared.label)
