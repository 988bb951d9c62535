"""Run one cell: make inputs, run the kernel, measure, judge, record."""

import traceback
from dataclasses import replace
from pathlib import Path

from tiebreak.backends.backend import to_device
from tiebreak.kernels.external import ContractError
from tiebreak.matrix.cell import Cell, TrainingCell, blank_record, place
from tiebreak.matrix.judging import reasons, unsettled
from tiebreak.matrix.looks import Looks
from tiebreak.matrix.recording import results
from tiebreak.matrix.training import run_training
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports import records


def run_cell(cell: Cell | TrainingCell, bench: Workbench) -> records.Record:
    """Run one cell to its record. A kernel that raises crashes its own cell alone.

    Args:
        cell: what to run.
        bench: inputs and predictions shared with the other cells of its case.

    Returns:
        The record, whatever happened.
    """
    settings = bench.settings
    try:
        if isinstance(cell, TrainingCell):
            return run_training(cell, settings)
        inputs = bench.batch(cell.case, cell.fmt, 0).inputs
        refusal = cell.kernel.refusal(to_device(inputs, cell.backend.device))
        if refusal is not None:
            return blank_record(cell, settings, records.SKIPPED, (refusal,))
        return _run(cell, bench)
    except Exception as error:  # the kernel is not ours: whatever it raises belongs into its record
        return blank_record(cell, settings, records.CRASHED, (f"{place(cell, settings)}: {_told(error)}",))


def _run(cell: Cell, bench: Workbench) -> records.Record:
    looks = Looks(cell, bench)
    looks.look()
    fell = tuple(reasons(looks))
    doubts = () if fell else tuple(unsettled(looks))
    outcome = records.FELL if fell else records.INCONCLUSIVE if doubts else records.HELD
    blank = blank_record(cell, bench.settings, outcome, (*fell, *doubts), looks.heads())
    return replace(blank, **results(looks))


def _told(error: Exception) -> str:
    """One line: what was raised and, unless a broken contract says it all, the line of code that raised it."""
    text = (str(error).strip().splitlines() or ["no message"])[0]
    if isinstance(error, ContractError):
        return f"{type(error).__name__}: {text}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {text} ({Path(frame.filename).name}, line {frame.lineno})"
