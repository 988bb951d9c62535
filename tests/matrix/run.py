"""Run one cell: put the kernel through its experiment, ask the checks, record."""

from collections.abc import Mapping

from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.kernel import CannotRunError, Whose
from tiebreak.matrix.checks import ask_all, checks
from tiebreak.matrix.checks.contract import CHECK as CONTRACT
from tiebreak.matrix.checks.contract import broken
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.raised import first_line, raised
from tiebreak.matrix.recording import blank_record, result_record, skipped_record
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import RUNS, Answer, Record, outcome_of


def run_cell(cell: Cell, bench: Workbench) -> Record:
    """Run one cell to its record. A kernel that raises crashes its own cell alone.

    Args:
        cell: what to run.
        bench: inputs and predictions shared with the other cells of its case.

    Returns:
        The record, whatever happened.
    """
    settings = bench.settings
    try:
        with own_randomness(settings.seed):
            refusal = cell.experiment.refusal(cell, bench)
            if refusal is not None:
                return skipped_record(cell, settings, refusal)
            result = cell.experiment.run(cell, bench)
    except CannotRunError as error:
        if error.whose is Whose.CALL:
            return skipped_record(cell, settings, first_line(error))
        return _without_result(cell, bench, {CONTRACT.name: broken(raised(error, cell.kernel))})
    except Exception as error:  # the kernel is not ours: whatever it raises belongs into its record
        return _without_result(cell, bench, {RUNS: Answer(False, checks()[RUNS].about, raised(error, cell.kernel))})
    answers = ask_all(result)
    return result_record(cell, settings, result, outcome_of(answers, judging()), answers)


def judging() -> frozenset[str]:
    """Names of the checks that are about a cell's rounding."""
    return frozenset(name for name, check in checks().items() if check.judges)


def _without_result(cell: Cell, bench: Workbench, answers: Mapping[str, Answer]) -> Record:
    return blank_record(cell, bench.settings, outcome_of(answers, judging()), answers)
