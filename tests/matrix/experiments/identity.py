"""Which plan a user's kernel follows, by the search that `tiebreak identify` makes: one cell, on separate inputs."""

from dataclasses import dataclass
from typing import ClassVar

from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.matrix.experiment import Cell, Experiment, Kind, SelectionContext
from tiebreak.matrix.identification.identity import identify
from tiebreak.matrix.result import Result
from tiebreak.matrix.settling import UnidentifiedError, plan_of, probe_of
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records

_BITS = "bits_of_plan"


@dataclass(frozen=True)
class Identification(Experiment):
    """The experiment that searches for a user's kernel's plan."""

    kind: ClassVar[str] = "identity"
    time_limit: ClassVar[float] = 300.0
    name: ClassVar[str] = "identity"
    version: ClassVar[int] = 1

    def described(self) -> records.CaseRecord:
        return records.CaseRecord("which rounding plan it follows, as tiebreak identify finds it", "this suite")

    def is_for(self, kernel: Kernel, context: SelectionContext) -> bool:
        return isinstance(kernel, UserKernel) and kernel.declaration is None and super().is_for(kernel, context)

    def run(self, cell: Cell, bench: Workbench) -> Result:
        try:
            plan_of(cell, bench)  # first: if it ends the process, the other cells know
            identity = identify(probe_of(cell, bench), bench.settings.seed, beyond_known=False)
        except UnidentifiedError as error:
            raise CannotRunError(str(error)) from error
        share = identity.share or 0.0
        return Result(
            measures={_BITS: share},
            shown=records.Shown.of(_BITS, share, spec=".4f"),
            evidence={records.IDENTITY: identity.explanation},
        )


KIND = Kind(
    Identification.kind,
    records.ExperimentRecord(
        "the plan that a user's kernel follows, where it declares none",
        "share of bits that the plan has of inputs by which it was not chosen; the verdict names it.",
    ),
    experiments=(Identification(),),
    measured={_BITS: records.MeasureRecord("share of bits that the plan has, of inputs by which it was not chosen")},
)
