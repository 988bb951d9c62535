"""The matrix: every backend x kernel x experiment x format, judged and recorded."""

import pytest

from tiebreak.kernels.external.loading import users_part
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.plugin import ACCOUNT, BENCH, EXCUSES, WATCH, poison
from tiebreak.matrix.record_collector import PROPERTY
from tiebreak.matrix.run import ended_record, run_cell, skipped_record
from tiebreak.matrix.scheduling import cost
from tiebreak.matrix.watch import BudgetSpentError, cpu
from tiebreak.reports.records.decode import encode
from tiebreak.reports.records.record import CRASHED, IN_TIME, NO_TIME, SKIPPED, TRACEBACK
from tiebreak.reports.tables.run import again


def test_cell(cell: Cell, request: pytest.FixtureRequest) -> None:
    stash = request.config.stash
    watch, bench = stash[WATCH], stash[BENCH]
    given_up, caught = watch.given_up(cell), list[Exception]()
    if given_up is None:
        began = cpu()
        try:
            with watch.over(cell):
                record = run_cell(cell, bench, caught.append)
            if record.skipped is None:
                watch.pace.add(cost(cell), cpu() - began)
        except BudgetSpentError:
            record = skipped_record(cell, bench.settings, NO_TIME)
    else:
        record = ended_record(cell, bench.settings, IN_TIME, given_up)
    record = stash[EXCUSES].excuse(record)
    request.node.user_properties.append((PROPERTY, encode(record)))
    if record.outcome == CRASHED and cell.backend.poisoned():
        poison(request.node)
    if record.outcome == SKIPPED:
        pytest.skip("; ".join(record.reasons))
    if record.excused is not None:
        pytest.xfail(record.excused)
    if not record.passes:
        traced = (
            [record.evidence[TRACEBACK]] if request.config.get_verbosity() > 0 and TRACEBACK in record.evidence else []
        )
        account = "\n".join([f"{record.outcome} {record.id}", *record.reasons, *traced, *again(record)])
        request.node.stash[ACCOUNT] = account
        debugged = caught and request.config.getoption("usepdb", False)
        if debugged and (error := users_part(caught[0], to_the_last=True)) is not None:
            raise error  # for the debugger, which ends in its last frame
        pytest.fail(account, pytrace=False)
