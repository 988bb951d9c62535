import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import Call, failing, record, run
from tiebreak.reports.records import store
from tiebreak.reports.records.record import CaseRecord, Run
from tiebreak.reports.terminal import runnable

pytestmark = pytest.mark.quick


@pytest.fixture
def show(telling: Run, tiebreak: Call) -> Callable[..., str]:
    """Calls the verb on a run with a bit of everything; its output."""

    def call(*words: str) -> str:
        told = tiebreak("show", telling, *words)
        assert told.code == 0
        return told.out

    return call


def test_the_table_shows_every_cell_and_what_failed(show: Callable[..., str]) -> None:
    out = show()
    assert "17 cells: 12 passed, 3 failed, 1 crashed, 1 skipped" in out
    assert f"failed cpu-sdpa-no_tail-bf16\n    claim failed: unbiased\n    rerun: {runnable('pytest')}" in out
    for text in ("+0.23 B ·", "!+0.23 B!", "!NaN!", "skip", "!crash!", "emulation, bf16", "cpu, bf16"):
        assert text in out


def test_csv_has_intervals_answers_and_excuses(tiebreak: Call) -> None:
    cells = record(), failing(case="b", excused="known", answers={"repeatable": None})
    held, failed = csv.DictReader(io.StringIO(tiebreak("show", run(*cells), "--format", "csv").out))
    assert (held["bias"], held["bias_half_width"]) == ("0.01", "0.02")
    assert "max_ulps_half_width" not in held
    assert (held["claim"], held["claim_passed"], held["repeatable_passed"]) == ("as claimed", "True", "True")
    assert (failed["claim_passed"], failed["repeatable"], failed["repeatable_passed"]) == ("False", "", "")
    assert (failed["excused"], failed["reasons"], held["excused"]) == ("known", "claim failed: unbiased", "")
    assert tiebreak("show", run(*cells), "--format", "csv", "--only", "timed_out").out == "id\n"


def test_filters_take_lists_globs_and_names_with_brackets(show: Callable[..., str]) -> None:
    assert "5 cells" in show("--kernels", "fa*")
    assert "2 cells" in show("--cases", "tied_maxima[k=2]")
    assert "4 cells" in show("--cases", "tied_maxima[k=?],", "--kernels", "fair")
    assert "3 cells" in show("--cases", "no_tail,huge,odd", "--backend", "cpu")
    assert show("--only", "crashed").startswith("cpu, bf16")
    assert "missing" not in show("--only", "passed", "--backend", "emulation")
    assert show("--only", "undecided").strip() == "0 cells"


@pytest.mark.parametrize(
    ("flag", "hint"), [("--kernels", "known are flash@train, sdpa, fair, flash@paper"), ("--cases", "leave --cases")]
)
def test_an_unknown_name_lists_the_known_ones_where_they_are_few(
    flag: str, hint: str, telling: Run, tiebreak: Call
) -> None:
    refused = tiebreak("show", telling, flag, "nope")
    assert refused.err.startswith(f"tiebreak show: {flag}: unknown {flag[2:-1]} 'nope': {hint}")
    assert (refused.code, refused.err.count("\n")) == (2, 1)


def test_cases_stand_in_the_order_of_their_groups(tiebreak: Call) -> None:
    cases = {name: CaseRecord(name, group=group) for name, group in (("zebra", "ties"), ("ant", "range"))}
    out = tiebreak("show", replace(run(record(case="ant"), record(case="zebra")), cases=cases)).out
    assert out.index("zebra") < out.index("ant ")


def test_json_is_a_file_of_records_again(show: Callable[..., str]) -> None:
    run = store.decoded(show("--format", "json", "--only", "failed").encode(), Path("-"), Run)
    assert {record.case for record in run.records} == {"no_tail", "huge", "train_lm"}


def test_an_interrupted_run_is_called_so(tiebreak: Call) -> None:
    assert "INCOMPLETE" in tiebreak("show", run(complete=False)).out
    assert json.loads(Path("1.json").read_text(encoding="utf-8"))["complete"] is False
