"""A user's kernel called in other ways: small calls on normal numbers, compared with each other."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tiebreak.backends.backend import Backend
from tiebreak.cases.measures import Measure
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.formats import Formats
from tiebreak.matrix.experiment import Cell, Experiment, Kind, Pair, SelectionContext
from tiebreak.matrix.result import Result
from tiebreak.matrix.usage.device_kernels import called_as_users
from tiebreak.matrix.usage.questions import GROUP, QUESTIONS, Question
from tiebreak.matrix.usage.session import BATCH, HEADS, Session
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records

_MEASURES = (
    Measure("other_bits", "largest share of elements of O or a gradient that have other bits in the other call"),
    Measure("difference_ulps", "largest difference between the two calls", "ulp"),
    Measure("error_ratio", "mean squared error of the worst head over that of the plain call", worse="more", limit=1.0),
    Measure("nan_let_in", "largest share of O, dQ, dK or dV that a NaN or Inf makes one which a mask hides"),
    Measure("lse_ulps", "largest error of the log-sum-exp, in fp32 ulps", "ulp"),
    Measure("lse_error_over_bound", "largest error of the log-sum-exp as a share of what rounding allows"),
)


@dataclass(frozen=True)
class Usage(Experiment):
    """One question about how a kernel is used."""

    kind: ClassVar[str] = "usage"
    question: Question

    @property
    def name(self) -> str:
        """As `Experiment.name`."""
        return self.question.name

    @property
    def version(self) -> int:
        """As `Experiment.version`."""
        return self.question.version

    @property
    def tags(self) -> frozenset[str]:
        """As `Experiment.tags`."""
        return frozenset({"usage"})

    def described(self) -> records.CaseRecord:
        """As `Experiment.described`."""
        return records.CaseRecord(self.question.about, self.question.source, group=GROUP)

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        """As `Experiment.pairs`: users' kernels; where the question is named, a device's own kernels too.

        In a default run of the suite they are not asked: they take copies of their arguments, and keep no state.
        """
        return [
            (backend, kernel)
            for backend, kernel in asked.pairs
            if isinstance(kernel, UserKernel)
            or (asked.cases_named and not kernel.composed and kernel.unsuited(Formats.of(asked.fmt)) is None)
        ]

    def cost(self, backend: Backend) -> float:
        """As `Experiment.cost`: a dozen calls of a few heads."""
        return backend.call_steps / 4

    def refusal(self, cell: Cell, bench: Workbench) -> str | None:
        """As `Experiment.refusal`: calling it tells."""
        del cell, bench
        return None

    def run(self, cell: Cell, bench: Workbench) -> Result:
        """As `Experiment.run`."""
        kernel = cell.kernel
        if not isinstance(kernel, UserKernel):
            kernel = called_as_users(kernel, cell.backend, cell.fmt)
        session = Session(cell, kernel, bench.settings.seed)
        with session.calling():
            self.question.ask(session)
        measures = session.measured
        return Result(
            measures=measures,
            shown=_shown(measures, session.unit),
            relations=tuple(session.relations),
            heads=BATCH * HEADS,
        )


def _shown(measures: Mapping[str, float], unit: str) -> records.Shown:
    """The first of them."""
    name = next(iter(measures))
    return records.Shown.of(name, measures[name], unit, spec=".2g")


class _Usages(Kind):
    """All of them."""

    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        """As `Kind.offered`."""
        return () if captured is not None and not cases_named else tuple(map(Usage, QUESTIONS))

    def measures(self) -> Mapping[str, Measure]:
        """As `Kind.measures`."""
        return {measure.name: measure for measure in _MEASURES}

    def hint(self) -> str:
        """As `Kind.hint`."""
        return (
            f"{QUESTIONS[0].name} and its like are asked of users' kernels, which --kernel names, and of a device's own"
            f" where --cases names the question"
        )


KIND = _Usages(
    Usage.kind,
    records.ExperimentRecord(
        "a user's kernel called in other ways, on the same numbers",
        "share of elements with other bits in the other call; as good are others of equal accuracy;\n"
        "of the log-sum-exp its largest error in fp32 ulps, and its base;"
        " of hidden NaN the share of O or a gradient lost.",
    ),
)
