"""Run one cell: put the kernel through its experiment, ask the checks, record."""

import logging
from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.external.loading import users_traceback
from tiebreak.kernels.kernel import Blame, CannotRunError, first_line
from tiebreak.matrix.checks import CONTRACT, ask_all, checks, contract_broken, judging
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.off import farthest_off
from tiebreak.matrix.options import command
from tiebreak.matrix.resolver import resolver
from tiebreak.matrix.trial import raised
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Answer, Record, outcome_of

_LOG = logging.getLogger("tiebreak.cells")


def run_cell(cell: Cell, bench: Workbench, caught: Callable[[Exception], object] = lambda error: None) -> Record:
    """Run one cell to its record, whatever happens: a kernel that raises crashes its own cell alone.

    `caught` is told what it raised.
    """
    settings = bench.settings
    _LOG.debug("cell %s", cell.id)
    try:
        with own_randomness(settings.seed):
            refusal = cell.experiment.refusal(cell, bench)
            if refusal is not None:
                return skipped_record(cell, settings, refusal)
            result = cell.experiment.run(cell, bench)
    except CannotRunError as error:
        if error.blame is Blame.CALL:
            return skipped_record(cell, settings, first_line(error))
        caught(error)
        broken = {CONTRACT: contract_broken(raised(error, cell.kernel))}
        return replace(blank_record(cell, settings, records.FAILED, broken), evidence=_traced(error))
    except pytest.skip.Exception as error:  # by the kernel, where people run it in tests of their own
        return skipped_record(cell, settings, first_line(error))
    except Exception as error:  # the kernel is not ours: whatever it raises belongs into its record
        caught(error)
        why = resolver().hint(cell) + raised(error, cell.kernel)
        return replace(ended_record(cell, settings, records.RUNS, why), evidence=_traced(error))
    answers, traced = ask_all(result), {}
    if result.backward_raised is not None:
        caught(result.backward_raised)
        traced = _traced(result.backward_raised)
    return replace(
        blank_record(cell, settings, outcome_of(answers, judging()), answers),
        verdict=result.verdict,
        tied=result.tied,
        in_training=result.in_training,
        shown=result.shown,
        heads=result.heads,
        measures=result.recorded,
        digest=result.digest,
        evidence={**result.evidence, **farthest_off(result, answers), **traced},
    )


def _traced(error: Exception) -> dict[str, str]:
    traced = users_traceback(error)
    return {records.TRACEBACK: traced} if traced else {}


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


def ended_record(cell: Cell, settings: Settings, check: str, why: str, *, passed: bool | None = False) -> Record:
    """The record of a cell that did not run to its end, or not in its time; which may tell nothing of the kernel."""
    answers = {check: Answer(passed, checks()[check].described.about, why)}
    return blank_record(cell, settings, outcome_of(answers, judging()), answers)


def skipped_record(cell: Cell, settings: Settings, why: str) -> Record:
    return replace(blank_record(cell, settings, records.SKIPPED), skipped=why)
