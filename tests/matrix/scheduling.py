"""Which worker runs which cell."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tiebreak.cases.gpt2.snippets import SNIPPETS

_QUEUED = 2  # tests that a worker has before it, at least


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Groups the matrix by case and format; a training run, as every other test, is a group of its own."""

    def _split_scope(self, nodeid: str) -> str:
        path, _, cell = nodeid.partition("::test_cell[")
        # backend-kernel-case-format]: no name has a dash.
        case = cell.split("-")[2:]
        if not case or case[0] in SNIPPETS:
            return nodeid
        return f"{path}::{'-'.join(case)}"

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self.leaving: set[Any] = set()  # workers that end themselves: no cell of theirs is to blame

    def remove_node(self, node: Any) -> str | None:
        """The test that killed a worker; the rest of its work goes to the others.

        xdist 3.8 queues that test again, and finished groups too, whose completion it then awaits forever.
        """
        workload = self.assigned_work.pop(node)
        left = [(scope, test) for scope, unit in workload.items() for test, done in unit.items() if not done]
        killer = left.pop(0)[1] if left and node not in self.leaving else None
        for scope, test in left:
            self.workqueue.setdefault(scope, {})[test] = False
        for other in self.nodes:
            self._reschedule(other)
        return killer

    def _reschedule(self, node: Any) -> None:
        """Keep a worker busy: it runs its last test only when it knows the next or that there is none.

        xdist 3.8 hands out one group a time, after which a replacement with a group of one waits forever.
        """
        if node.shutting_down or node not in self.registered_collections:
            return
        while self.workqueue and self._pending_of(self.assigned_work[node]) <= _QUEUED:
            self._assign_work_unit(node)
        if not self.workqueue:
            node.shutdown()
