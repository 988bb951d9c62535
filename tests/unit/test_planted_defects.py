"""Planted defects fall by the checks that their rows name, and their sound twins pass there."""

import re
from collections.abc import Callable
from functools import cache

import pytest

from tiebreak.cases.gpt2.snippets import TWO_LAYERS
from tiebreak.defects.declared import honest
from tiebreak.defects.kernel import SOUND
from tiebreak.defects.planted import DEFECTS, Defect, on, twin
from tiebreak.kernels.formats import BF16
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiment import Cell
from tiebreak.matrix.experiments.training import TrainingRun
from tiebreak.matrix.record_collector import described
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import FAILED, IN_TIME, PASSED, PREDICTION, RUNS, Record, Run
from tiebreak.reports.verdict import verdicts
from tiebreak.studies.cells import CASES, judged
from tiebreak.studies.power import EXPERIMENTS, run_one

_HEADS = 256  # of kernels that declare a plan, in which nothing is to fall
#: Checks that no wrong kernel of one call is needed for: of ends, of heads, and of training.
_OTHERS = {RUNS, IN_TIME, "log_probabilities", "loss"}
#: What the calls that are wrong have in common, by planted defect.
WHERE = {
    "merged_by_another_scale": "parameter = scale",
    "last_part_of_a_batch": "batch = 3 and keys >= 321",
    "wide_heads_unscaled": "d = 256",
    "late_window": "window = 60",
    "alibi_of_the_first": "full = bh and parameter = alibi",
    "alibi_upper_left": "parameter = alibi and keys >= 129",
    "rows_of_v_side_by_side": "d_v >= 128",
    "entries_in_16_bits": "batch = 65536",
    "pages_of_128": "page = 256",
    "maximum_from_minus_100": "lse <= -300",
}
BY_CASE = sorted(DEFECTS.values(), key=lambda defect: (defect.case, defect.fmt.name, defect.heads))


@cache
def _bench(heads: int) -> Workbench:
    """What cells share of one case, for the tests go case by case, and what a kernel was asked before."""
    return Workbench(Settings(seed=1, heads=heads))


@cache
def _run(kernel: str, case: str, fmt: str, heads: int) -> Record:
    return run_one(kernel, case, fmt, _bench(heads))


@pytest.mark.parametrize("check", sorted(set(checks()) - _OTHERS))
def test_every_check_alone_catches_a_defect(check: str) -> None:
    assert check in {defect.checks for defect in BY_CASE}


@pytest.mark.parametrize("defect", BY_CASE, ids=[defect.name for defect in BY_CASE])
def test_a_defect_fails_by_the_checks_of_its_row_and_is_named_and_its_sound_twin_passes(
    defect: Defect, alike: Callable[[str], None]
) -> None:
    alike(defect.case)
    record = _run(defect.name, defect.case, defect.fmt.name, defect.heads)
    assert record.outcome == FAILED, record
    assert record.reasons
    assert {check for check, answer in record.answers.items() if answer.passed is False} == set(defect.checks.split())
    cell = Cell(on(defect.arithmetic), defect.kernel, EXPERIMENTS[defect.case], BF16)
    (verdict,) = verdicts(described(Run({}, {}, (record,)), {record.id: cell}))
    assert verdict.ok is False
    assert verdict.headline.startswith("FAIL: ")
    named = [finding.text.partition(" (")[0] for finding in verdict.findings if finding.name == "looks like"]
    assert named == ([defect.slip] if defect.slip else [])
    if defect.name in WHERE:
        assert record.answers["usage"].why.startswith(f"wrong where {WHERE[defect.name]}: ")
        assert [finding.text for finding in verdict.findings if finding.name == "wrong where"] == [WHERE[defect.name]]
    sound = _run(defect.twin, defect.case, defect.fmt.name, defect.heads if defect.twin in SOUND else _HEADS)
    assert sound.passes, sound.reasons
    assert "slips" not in sound.evidence


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("scaled_twice", r"O is off by \d\d % of its size"),
        ("p_in_e4m3", r"O is off by 0\.\d+ % of its size: it follows flash@fused_fp8.*"),
        ("blind_rows_nan", "O is NaN or Inf in 4,096 of 4,096 elements"),
        ("added_mask", None),
        ("unscaled_dk", r"dK is off by \d{3} % of its size"),
        ("heads_of_a_group_not_added", r"d[KV] is off by \d\d % of its size.*"),
        ("sink_gradient_of_one_entry", r"dSink is off by \d\d % of its size"),
    ],
)
def test_the_output_that_is_farthest_off_is_named_with_its_share_of_the_reference(name: str, off: str | None) -> None:
    defect = DEFECTS[name]
    found = _run(name, defect.case, defect.fmt.name, defect.heads).evidence.get("off", {})
    assert [bool(re.fullmatch(off or "", text)) for text in found] == ([] if off is None else [True]), found


@pytest.mark.parametrize(("name", "outcome"), [("tiled", PASSED), ("saved_in_a_global", FAILED)])
def test_training_of_two_layers_tells_what_is_kept_in_a_global(name: str, outcome: str) -> None:
    kernel = DEFECTS[name].kernel if name in DEFECTS else twin(name)
    record = judged(kernel, TrainingRun(TWO_LAYERS), bench=_bench(_HEADS))
    assert record.outcome == outcome, record.reasons
    assert {check for check, answer in record.answers.items() if answer.passed is False} <= {"claim"}


def test_defects_of_some_shapes_are_planted() -> None:
    assert WHERE.keys() <= DEFECTS.keys()


def test_v2_as_printed_is_right_but_for_the_negative_branch() -> None:
    assert _run("as_printed_v2", "tied_maxima[k=2]", BF16.name, _HEADS).outcome == PASSED


@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.chaotic or case.cancels])
def test_a_case_that_cannot_be_predicted_records_no_prediction(case: str) -> None:
    """Else an exemption would read as a prediction that passed."""
    record = judged(honest("flash@fused"), case, backend=on(), bench=_bench(_HEADS))
    assert PREDICTION not in record.answers
    assert "predicted_bias" not in record.measures


def test_a_kernel_of_flash_attention_1_whose_sink_comes_last_is_not_blamed() -> None:
    """P is cast without the sink then, which the plan of its other inputs has in every row sum."""
    sound = _run("flash_1", "sink_at_maximum", BF16.name, _HEADS)
    assert sound.passes, sound.reasons
