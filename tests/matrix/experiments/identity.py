"""Which plan a user's kernel follows, by the search that `tiebreak identify` makes: one cell, on separate inputs."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.formats import Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import CannotRunError, Kernel
from tiebreak.matrix.experiment import Cell, Experiment, SelectionContext
from tiebreak.matrix.identification import settling
from tiebreak.matrix.identification.attribution import plan_fits, plan_held_to, slip_bits
from tiebreak.matrix.identification.backward_attribution import BackwardHeldTo, backward_held_to
from tiebreak.matrix.identification.explain import explain
from tiebreak.matrix.identification.identity import identify
from tiebreak.matrix.resolver import Resolver
from tiebreak.matrix.result import HeldTo, Result
from tiebreak.matrix.sample import Sample
from tiebreak.matrix.workbench import Settled, Workbench
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
            settling.plan_of(cell, bench)  # first: if it ends the process, the other cells know
            identity = identify(settling.probe_of(cell, bench), bench.settings.seed, beyond_known=False)
        except settling.UnidentifiedError as error:
            raise CannotRunError(str(error)) from error
        share = identity.share or 0.0
        return Result(
            measures={_BITS: share},
            shown=records.Shown.of(_BITS, share, spec=".4f"),
            evidence={records.IDENTITY: identity.explanation},
        )


def _runs_at(cell: Cell, d: int) -> bool:
    """Return whether a small plain call of this head dimension returns."""
    ones = torch.ones(1, 1, 128, d)
    with suppress(Exception):
        cell.backend.run(cell.kernel, AttentionInputs(ones, ones, ones, ones, Formats.of(cell.fmt)), gradients=False)
        return True
    return False


class _Resolver(Resolver):
    def hint(self, cell: Cell) -> str:
        kernel = cell.kernel
        if not isinstance(kernel, UserKernel) or kernel.caller.convention.options.head_dims or cell.backend.poisoned():
            return ""
        runs = [] if _runs_at(cell, 64) else [d for d in (128, 256) if _runs_at(cell, d)]
        dims = ",".join(map(str, runs))
        return f"it runs at d = {dims} and not at 64, so say --declare 'head_dims=[{dims}]'; " if runs else ""

    def plan_of(self, cell: Cell, bench: Workbench) -> Settled:
        return settling.plan_of(cell, bench)

    def resolved(self, sample: Sample, settled: Settled) -> Sample:
        fits = plan_fits(sample, settled)
        return replace(sample, fits=fits, held_to=plan_held_to(sample, fits, settled))

    def backward(self, sample: Sample, held_to: HeldTo, settled: Settled) -> BackwardHeldTo | None:
        output, shown = sample.outputs[0], settled.backward if held_to.plan == settled.followed else None
        if output.gradients is None:
            return None
        return backward_held_to(output.gradients, output.o, held_to.declaration, sample.bench.batch(0), shown)

    def slips(self, sample: Sample) -> Mapping[str, float]:
        return slip_bits(sample.outputs[0].o, sample.bench.batch(0), sample.cell.backend, sample.held_to)

    def explained(self, run: Iterable[records.Record]) -> Mapping[str, records.Explanation]:
        return explain(run)


KIND = _Resolver(
    Identification.kind,
    records.ExperimentRecord(
        "the plan that a user's kernel follows, where it declares none",
        "share of bits that the plan has of inputs by which it was not chosen; the verdict names it.",
    ),
    experiments=(Identification(),),
    measured={_BITS: records.MeasureRecord("share of bits that the plan has, of inputs by which it was not chosen")},
)
