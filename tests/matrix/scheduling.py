"""Which worker runs which cell, and when."""

from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.gpt2.snippets import SNIPPETS

_QUEUED = 2  # tests that a worker has before it, at least


def _words(nodeid: str) -> list[str]:
    """Backend, kernel, case and format]; empty for what is no cell."""
    _, _, cell = nodeid.partition("::test_cell[")
    return cell.split("-") if cell else []  # no name has a dash


def _length(nodeid: str) -> int:
    """How long a test takes, about, in training steps with attention in one layer; 0 where nothing is known."""
    match _words(nodeid):
        case [_, _, name, *_] if name in SNIPPETS:
            return SNIPPETS[name].steps * (1 if SNIPPETS[name].silent_before else 2)
        case [backend, *_]:
            return BACKENDS[backend].call_steps if backend in BACKENDS else Backend.call_steps
    return 0


class CaseScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Groups the matrix by case and format; a training run, as every other test, is a group of its own.

    The longest groups come first: one that starts last keeps its worker busy while the others have nothing to do.
    """

    def _split_scope(self, nodeid: str) -> str:
        case = _words(nodeid)[2:]
        if not case or case[0] in SNIPPETS:
            return nodeid
        return f"{nodeid.partition('::')[0]}::{'-'.join(case)}"

    def __init__(self, config: pytest.Config, log: Any = None) -> None:
        super().__init__(config, log)
        self.leaving: set[Any] = set()  # workers that end themselves: no cell of theirs is to blame

    def _assign_work_unit(self, node: Any) -> None:
        """Give a worker the next group; before the very first, put the queue that xdist has filled in order."""
        if not any(self.assigned_work.values()):
            groups = dict(self.workqueue)
            for scope in sorted(groups, key=lambda scope: -sum(map(_length, groups[scope]))):
                self.workqueue.move_to_end(scope)
        super()._assign_work_unit(node)

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
