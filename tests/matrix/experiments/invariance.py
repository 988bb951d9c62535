"""A call compared with itself under one change, on ever more heads until it is known whether other bits have a bias."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from tiebreak.backends.backend import Backend
from tiebreak.cases.measures import Measure
from tiebreak.cases.verdicts import LOOKS, Interval
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import split_words
from tiebreak.kernels.formats import Formats
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.experiment import Cell, Experiment, Kind, Pair, SelectionContext
from tiebreak.matrix.invariance.comparison import Comparison, Effect, Invariance
from tiebreak.matrix.invariance.knobs import GROUP, KNOBS, Knob
from tiebreak.matrix.invariance.session import Session
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records
from tiebreak.reports.tables.changes import worst

_DIFFERING, _DIFFERENCE = "differing_bits", "mean_difference"
_MEASURES = (
    Measure(
        _DIFFERING,
        "largest share of elements of O or a gradient that have other bits when the call is changed",
        worse="more",
        limit=0.0,
        share=0.1,
        term="batch invariance",
    ),
    Measure(
        _DIFFERENCE,
        "signed mean of O or a gradient of the changed call less that of the plain one, where it is farthest from 0; +"
        " is away from zero",
        unit="ulp",
        worse="farther",
        limit=0.02,
    ),
    Measure("bias_before", "bias of the plain call there", unit="ulp"),
    Measure("bias_after", "bias of the changed call there", unit="ulp"),
    Measure("control_bits", "least share of elements of O that a control changes: 0 of a knob that does nothing"),
)


@dataclass(frozen=True)
class KnobTurned(Experiment):
    """One knob."""

    kind: ClassVar[str] = "invariance"
    knob: Knob

    @property
    def name(self) -> str:
        """As `Experiment.name`."""
        return self.knob.name

    @property
    def version(self) -> int:
        """As `Experiment.version`."""
        return self.knob.version

    def described(self) -> records.CaseRecord:
        """As `Experiment.described`."""
        return records.CaseRecord(self.knob.about, self.knob.source, group=GROUP)

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        """As `Experiment.pairs`: all kernels but those for other formats."""
        return [pair for pair in asked.pairs if pair[1].unsuited(Formats.of(asked.fmt)) is None]

    def cost(self, backend: Backend) -> float:
        """As `Experiment.cost`: a hundred calls of a few heads."""
        return 2.0 * backend.call_steps

    def refusal(self, cell: Cell, bench: Workbench) -> str | None:
        """As `Experiment.refusal`: calling it tells."""
        del cell, bench
        return None

    def run(self, cell: Cell, bench: Workbench) -> Result:
        """As `Experiment.run`."""
        session = Session(cell, bench.settings.seed, bench.settings.heads)
        options = cell.kernel.caller.convention.options if isinstance(cell.kernel, UserKernel) else None
        declared = options is not None and self.knob.word in split_words(options.invariant)
        found = Invariance(session.comparisons, session.controls, declared)
        for look in range(LOOKS):
            for session.index in range(2**look // 2, 2**look):
                self.knob.turn(session)
            if not found.comparisons:
                raise CannotRunError("; ".join(session.refused))
            if found.settled:
                break
        name = worst(found.changes)
        return Result(
            measures=_measured(found, name),
            shown=_shown(found.comparisons[name]),
            invariance=found,
            heads=found.comparisons[name].heads,
            remedy="raise --heads",
            evidence={"changes": found.changes, "controls": found.controls},
        )


def _measured(found: Invariance, name: str) -> dict[str, Interval | float | None]:
    at = found.comparisons[name]
    return {
        _DIFFERING: max(each.share for each in found.comparisons.values()),
        _DIFFERENCE: at.difference,
        "bias_before": at.before.bias,
        "bias_after": at.after.bias,
        "control_bits": min(found.controls.values()),
    }


def _shown(worst: Comparison) -> records.Shown:
    """The farthest mean with its verdict; the share, 0, where no bit differs."""
    if worst.effect is Effect.NONE:
        return records.Shown.of(_DIFFERING, 0.0, spec=".0f")
    return records.Shown.of(_DIFFERENCE, worst.difference.mean, verdict=worst.record.verdict, spec="+.3f")


class _Invariances(Kind):
    """All knobs."""

    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        """As `Kind.offered`."""
        return () if captured is not None and not cases_named else tuple(map(KnobTurned, KNOBS))

    def measures(self) -> Mapping[str, Measure]:
        """As `Kind.measures`."""
        return {measure.name: measure for measure in _MEASURES}


KIND = _Invariances(
    KnobTurned.kind,
    records.ExperimentRecord(
        "a call compared with itself under one change",
        "0: the same bits; else the signed mean of the difference in ulps, + away from zero, farthest from 0 of all"
        " changes.\nB: with a bias (99.9 % beyond 0.05 ulp), ?: not known yet, neither: without one.",
    ),
    on_request=True,
)
