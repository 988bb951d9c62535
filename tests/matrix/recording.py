"""From a cell and what came of it to its record."""

import shlex
from collections.abc import Mapping

from msgspec.structs import replace

from tiebreak.cases.verdicts import Interval
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.options import rerun
from tiebreak.matrix.result import Result
from tiebreak.matrix.settings import Settings
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Answer, Estimate, Record, Value, finite


def command(cell: Cell, settings: Settings) -> str:
    """The command that reruns one cell, as pytest's own name runs it."""
    return shlex.join(["pytest", *settings.matrix, *rerun(cell, settings)])


def blank_record(cell: Cell, settings: Settings, outcome: str, answers: Mapping[str, Answer] | None = None) -> Record:
    """The record of a cell that has an outcome but no result."""
    declared = cell.kernel.declaration
    return Record(
        id=cell.id,
        backend=cell.backend.name,
        kernel=cell.kernel.name,
        case=cell.experiment.name,
        case_version=cell.experiment.version,
        format=cell.fmt.name,
        seed=settings.seed,
        heads=0,
        experiment=cell.experiment.kind,
        outcome=outcome,
        command=command(cell, settings),
        plan=declared.label if declared else None,
        answers=answers or {},
    )


def crashed_record(cell: Cell, settings: Settings, why: str, *, in_time: bool = True, own: bool = True) -> Record:
    """The record of a cell that did not run to its end, or not in its time: which tells nothing of a kernel's own."""
    check, outcome = (
        (records.RUNS, records.CRASHED)
        if in_time
        else (records.IN_TIME, records.TIMED_OUT if own else records.INCONCLUSIVE)
    )
    return blank_record(cell, settings, outcome, {check: Answer(False if own else None, checks()[check].about, why)})


def skipped_record(cell: Cell, settings: Settings, why: str) -> Record:
    """The record of a cell that can't run."""
    return replace(blank_record(cell, settings, records.SKIPPED), skipped=why)


def result_record(
    cell: Cell, settings: Settings, result: Result, outcome: str, answers: Mapping[str, Answer]
) -> Record:
    """The record of a cell with a result."""
    return replace(
        blank_record(cell, settings, outcome, answers),
        verdict=result.verdict,
        tied=result.tied,
        in_training=result.in_training,
        shown=result.shown,
        heads=result.heads,
        measures={name: recorded(value) for name, value in result.measures.items() if value is not None},
        digest=result.digest,
        evidence=dict(result.evidence),
    )


def recorded(value: Interval | float) -> Value:
    """A measured value as records have it."""
    return Estimate.of(value.mean, value.half_width) if isinstance(value, Interval) else finite(value)
