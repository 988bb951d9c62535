"""Planted defects fall where docs/power.md says and by the checks it names, and their sound twins pass there."""

import re
from functools import lru_cache

import pytest

from tiebreak.backends.backend import CPU
from tiebreak.cases.gpt2.snippets import TWO_LAYERS
from tiebreak.defects.declared import honest
from tiebreak.defects.planted import DEFECTS, USERS, Defect, on, twin
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.experiments.training import TrainingRun
from tiebreak.matrix.record_collector import described
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import FELL, HELD, PREDICTION, Record, Run
from tiebreak.reports.verdict import verdicts
from tiebreak.studies.pages import read_rows
from tiebreak.studies.power import CASES, EXPERIMENTS, CaughtRow, run_one
from tiebreak.studies.power import CAUGHT as TABLE

_HEADS = 16  # of users' kernels in which nothing is to fall


ROWS = {row.defect: row for row in read_rows(TABLE, CaughtRow)}
CAUGHT = sorted((name for name, row in ROWS.items() if row.case), key=lambda name: ROWS[name].case)
MISSED = [name for name, row in ROWS.items() if not row.case]
#: Defects that are usual mistakes, as verdicts name them.
SLIPS = {
    "descale_of_k": "V is multiplied by K's factors",
    "causal_strict": "the causal mask hides a row's own key",
    "causal_skipped": "the mask is not applied",
    "causal_upper_left": "the causal mask is aligned to the upper left",
    "heads_tiled": "query head h reads key head h mod the number of key heads",
    "scale_ignored": "the scale that is given is not taken",
    "sink_twice": "the sink is counted twice",
    "sink_dropped": "the sink is left out",
    "scaled_twice": "scores are scaled twice",
    "soft_cap_not_planned": "the soft cap is not applied",
    "soft_cap_without_division": "the tanh is of scores that are not divided by the cap",
    "last_tile_filled_up": "keys of 0 are counted past the end, up to a multiple of 64",
}
TWIN_CELLS = sorted({(ROWS[name].case, DEFECTS[name].fmt.name, DEFECTS[name].twin) for name in CAUGHT})


@lru_cache(maxsize=1)
def _bench(case: str, fmt: str, heads: int) -> Workbench:
    """What the cells of one case share: the tests go case by case."""
    del case, fmt
    return Workbench(Settings(seed=1, heads=heads))


def _run(kernel: str, case: str, fmt: str = BF16.name, heads: int = _HEADS) -> Record:
    return run_one(kernel, case, fmt, _bench(case, fmt, heads))


def test_there_are_forty_defects_and_the_data_have_them_all() -> None:
    assert len(DEFECTS) >= 40
    assert list(ROWS) == list(DEFECTS)


@pytest.mark.parametrize("defect", DEFECTS.values(), ids=DEFECTS)
def test_a_reason_belongs_to_what_is_missed_and_to_nothing_else(defect: Defect) -> None:
    assert bool(defect.missed) == (not ROWS[defect.name].case)


@pytest.mark.parametrize("name", CAUGHT)
def test_a_caught_defect_falls_by_the_checks_of_its_case(name: str) -> None:
    row = ROWS[name]
    record = _run(name, row.case, DEFECTS[name].fmt.name, row.heads)
    unmet = {check for check, answer in record.answers.items() if answer.met is False}
    assert record.outcome == FELL, record
    assert record.reasons
    assert unmet == set(row.checks.split())
    cell = Cell(on(DEFECTS[name].arithmetic), DEFECTS[name].kernel, EXPERIMENTS[row.case], BF16)
    (verdict,) = verdicts(described(Run({}, {}, (record,)), {record.id: cell}))
    assert verdict.ok is False
    assert re.search("WRONG on 1 of 1 input|FELL by .* on 1 input", verdict.headline)
    named = [finding.text.partition(" (")[0] for finding in verdict.findings if finding.name == "looks like"]
    assert named == ([SLIPS[name]] if name in SLIPS else [])


@pytest.mark.parametrize(("case", "fmt", "name"), TWIN_CELLS)
def test_its_sound_twin_passes(case: str, fmt: str, name: str) -> None:
    record = _run(name, case, fmt, _HEADS if name in USERS else 256)
    assert record.passes, record.reasons
    assert "slips" not in record.evidence


@pytest.mark.parametrize("name", MISSED)
def test_a_missed_defect_runs_and_passes_the_accuracy_baseline(name: str) -> None:
    """Else it would be caught, or would not run at all."""
    record = _run(name, "random")
    assert record.passes, record.reasons


@pytest.mark.parametrize(
    ("name", "outcome"), [("tiled", HELD), ("saved_in_a_global", FELL), ("o_saved_in_a_global", FELL)]
)
def test_training_of_two_layers_tells_what_is_kept_in_a_global(name: str, outcome: str) -> None:
    kernel = DEFECTS[name].kernel if name in DEFECTS else twin(name)
    record = run_cell(Cell(CPU, kernel, TrainingRun(TWO_LAYERS), BF16), Workbench(Settings(seed=1)))
    assert record.outcome == outcome, record.reasons
    assert {check for check, answer in record.answers.items() if answer.met is False} <= {"claim"}


def test_v2_as_printed_is_right_but_for_the_negative_branch() -> None:
    assert _run("as_printed_v2", "tied_maxima[k=2]", heads=256).outcome == HELD


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.chaotic or case.cancels])
def test_a_case_that_cannot_be_predicted_records_no_prediction(case: str) -> None:
    """Else an exemption would read as a prediction that was met."""
    cell = Cell(on(), honest("flash@fused"), Call(CASES[case]), BF16)
    record = run_cell(cell, Workbench(Settings(seed=1, heads=256)))
    assert PREDICTION not in record.answers
    assert "predicted_bias" not in record.measures
