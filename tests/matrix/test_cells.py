"""The matrix: every backend x kernel x case x format, judged and recorded."""

import json

import pytest

from tiebreak.matrix.cell import Cell, TrainingCell
from tiebreak.matrix.plugin import ACCOUNT, PROPERTY, poison
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import CRASHED, PASSING, SKIPPED


def test_cell(cell: Cell | TrainingCell, bench: Workbench, request: pytest.FixtureRequest) -> None:
    record = run_cell(cell, bench)
    request.node.user_properties.append((PROPERTY, json.dumps(record.as_dict())))
    if record.outcome == CRASHED and cell.backend.poisoned():
        poison(request.node)
    if record.outcome == SKIPPED:
        pytest.skip("; ".join(record.reasons))
    if record.outcome not in PASSING:
        account = "\n".join([f"{record.outcome} {record.id}", *record.reasons, f"rerun: {record.command}"])
        request.node.stash[ACCOUNT] = account
        pytest.fail(account, pytrace=False)
