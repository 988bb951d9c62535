"""The matrix: every backend x kernel x experiment x format, judged and recorded."""

import pytest

from tiebreak.matrix.budget import BudgetSpentError
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.plugin import ACCOUNT, WATCH, poison
from tiebreak.matrix.record_collector import PROPERTY
from tiebreak.matrix.recording import crashed_record, skipped_record
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.gate.expected import Excuses
from tiebreak.reports.records.decode import encode
from tiebreak.reports.records.record import CRASHED, NO_TIME, SKIPPED
from tiebreak.reports.terminal import runnable


def test_cell(cell: Cell, bench: Workbench, excuses: Excuses, request: pytest.FixtureRequest) -> None:
    watch = request.config.stash[WATCH]
    given_up = watch.given_up(cell)
    if given_up is None:
        try:
            with watch.over(cell):
                record = run_cell(cell, bench)
        except BudgetSpentError:
            record = skipped_record(cell, bench.settings, NO_TIME)
    else:
        record = crashed_record(cell, bench.settings, given_up, in_time=False)
    record = excuses.excuse(record)
    request.node.user_properties.append((PROPERTY, encode(record)))
    deadly = given_up is None and cell.kernel.name in watch.deadly
    if deadly or (record.outcome == CRASHED and cell.backend.poisoned()):
        poison(request.node)
    if record.outcome == SKIPPED:
        pytest.skip("; ".join(record.reasons))
    if record.excused is not None:
        pytest.xfail(record.excused)
    if not record.passes:
        account = "\n".join([f"{record.outcome} {record.id}", *record.reasons, f"rerun: {runnable(record.command)}"])
        request.node.stash[ACCOUNT] = account
        pytest.fail(account, pytrace=False)
