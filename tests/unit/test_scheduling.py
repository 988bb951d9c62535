"""The order in which workers get groups of tests."""

import inspect
from dataclasses import replace
from importlib.metadata import version
from types import SimpleNamespace

import pytest

from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.roster import composed_kernel
from tiebreak.matrix import scheduling
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.training import TrainingRun
from tiebreak.matrix.scheduling import CaseScheduling, cell_id

CASES = {case.name: case for case in SCRIPTED}
FORMATS = {fmt.name: fmt for fmt in (BF16, FP16)}

# As they are collected; the number of cells of each group of calls behind it.
TESTS = {
    "test_other": 1,
    "test_cell[interpreter-{}-random_odd-bf16]": 1,
    "test_cell[emulation-{}-no_tail-bf16]": 2,
    "test_cell[emulation-{}-random-bf16]": 20,
    "test_cell[emulation-{}-train_drift-bf16]": 1,
    "test_cell[emulation-{}-train_lm-bf16]": 1,
    "test_cell[emulation-{}-train_runaway-bf16]": 1,
    "test_cell[emulation-{}-train_large_logits-bf16]": 1,
}


SECONDS = {"train_lm": 30, "train_runaway": 25, "random": 1, "random_odd": 15, "train_drift": 12,
           "train_large_logits": 5, "no_tail": 1}  # fmt: skip


class Worker:
    """Stands in for xdist's: keeps what it is given."""

    gateway = SimpleNamespace(id="gw0")

    def __init__(self) -> None:
        self.given: list[int] = []
        self.shutting_down = False

    def send_runtest_some(self, indices: list[int]) -> None:
        self.given += indices

    def shutdown(self) -> None:
        self.shutting_down = True


def order(pytester: pytest.Pytester, tests: list[str], together: frozenset[str] = frozenset()) -> list[str]:
    """In which order one worker gets the tests, as it completes them."""
    named = {name: cell(name) for test in tests if (name := cell_id(test))}
    worker, scheduling = Worker(), CaseScheduling(pytester.parseconfig("--tx=popen"), None, named)
    scheduling.together = together
    scheduling.add_node(worker)
    scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    done = 0
    while done < len(worker.given):
        scheduling.mark_test_complete(worker, worker.given[done])
        done += 1
    assert worker.shutting_down
    assert not scheduling.assigned_work[worker], "what is done is counted through at every test"
    return [tests[index] for index in worker.given]


def cell(name: str) -> Cell:
    """The cell of an id: backend and experiment decide when it runs, and whether its kernel is a user's."""
    backend, kernel, experiment, fmt = name.split("-")
    known = TrainingRun(SNIPPETS[experiment]) if experiment in SNIPPETS else OneCall(CASES[experiment])
    return Cell(BACKENDS[backend], replace(composed_kernel("standard"), external=kernel == "mine"), known, FORMATS[fmt])


def cases(tests: list[str]) -> list[str]:
    """The groups that tests are of, in their order."""
    return list(dict.fromkeys(test.split("-")[2] if "-" in test else test for test in tests))


def test_the_longest_groups_come_first(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what their cells take together, not by how many they are."""
    monkeypatch.setattr(scheduling, "cost", lambda cell: SECONDS[cell.experiment.name])
    tests = [f"a.py::{test.format(f'k{i}')}" for test, count in TESTS.items() for i in range(count)]
    ordered = order(pytester, tests)
    assert sorted(ordered) == sorted(tests)
    expected = ["train_lm", "train_runaway", "random", "random_odd", "train_drift", "train_large_logits", "no_tail"]
    assert cases(ordered) == [*expected, "a.py::test_other"]


def test_a_users_kernel_shows_whether_it_ends_before_its_long_cells(pytester: pytest.Pytester) -> None:
    names = ("no_tail", "train_drift", "tied_maxima[k=2]", "random")
    tests = [f"a.py::test_cell[cpu-mine-{name}-bf16]" for name in names]
    assert cases(order(pytester, tests)) == ["tied_maxima[k=2]", "random", "train_drift", "no_tail"]


def test_what_is_run_again_is_run_alone_and_last(pytester: pytest.Pytester) -> None:
    """A worker dies in the first cell of a group: the rest of the group comes before it."""
    tests = [f"a.py::test_cell[cpu-mine-{name}-{fmt}]" for name in list(CASES)[:6] for fmt in FORMATS]
    dead, heir = Worker(), Worker()
    scheduling = CaseScheduling(
        pytester.parseconfig("--tx=popen", "--tx=popen"),
        None,
        {cell_id(test): cell(cell_id(test)) for test in tests},
        another_try=lambda worker, test: worker == "gw0",
    )
    for worker in (dead, heir):
        scheduling.add_node(worker)
        scheduling.add_node_collection(worker, tests)
    scheduling.schedule()
    first = dead.given[0]
    assert scheduling.remove_node(dead) is None, "it is not reported yet"
    done = 0
    while done < len(heir.given):
        scheduling.mark_test_complete(heir, heir.given[done])
        done += 1
    assert sorted(heir.given) == list(range(len(tests)))
    assert heir.given[-1] == first
    assert heir.shutting_down


@pytest.mark.parametrize(
    "name", ["_split_scope", "_assign_work_unit", "_reschedule", "mark_test_complete", "remove_node"]
)
def test_what_is_overridden_is_there_in_this_version_of_xdist(name: str) -> None:
    """Its own faults are why: where they are mended, the override goes (xdist 3.8 had them)."""
    ours, theirs = (inspect.signature(getattr(kind, name)).parameters for kind in CaseScheduling.__mro__[:2])
    assert list(ours) == list(theirs)
    assert version("pytest-xdist").startswith("3.")


def test_tests_of_a_file_that_share_what_takes_long_to_make_are_one_group(pytester: pytest.Pytester) -> None:
    """Others, of which nothing is known, keep their order."""
    tests = ["a.py::test_2", "b.py::test_1", "a.py::test_1", "b.py::test_2"]
    assert order(pytester, tests, frozenset({"b.py"})) == [tests[index] for index in (1, 3, 0, 2)]
