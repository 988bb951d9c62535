"""Profiles against the cells of default runs."""

from dataclasses import replace
from pathlib import Path

import pytest

from tiebreak.laboratory.statement.format import faults_of_runs
from tiebreak.laboratory.statement.profiles import PROFILES, profile
from tiebreak.matrix.run import blank_record
from tiebreak.matrix.selection import Selection, cells
from tiebreak.matrix.workbench import Settings
from tiebreak.reports.records.record import CRASHED, Record, Run


def records(selection: Selection) -> list[Record]:
    return [blank_record(cell, Settings(), CRASHED) for cell in cells(selection)[0]]


def missing(records: list[Record], name: str, kernel: str | None = None) -> list[str]:
    """The cells that a profile misses in a run of these records, by their ids."""
    run = Run({"commit": "c" * 40}, {"kernel": kernel}, tuple(records))
    lines = faults_of_runs({"run.json": run}, profile(name))
    return [line.removeprefix("missing: ").split(",")[0] for line in lines if line.startswith("missing: ")]


@pytest.mark.parametrize("backend", ["emulation", "cpu"])
def test_a_default_run_is_the_full_profile_cell_by_cell(backend: str) -> None:
    whole = records(Selection(backends=backend, experiments="call,contract,training"))  # other kinds are in no profile
    assert [missing(whole, name) for name in PROFILES] == [[]] * len(PROFILES)
    for taken in whole[::397]:  # a few: each takes a look at all
        assert missing([record for record in whole if record is not taken], "full") == [taken.id]


def test_a_users_kernel_has_each_case_of_a_profile(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("def mine(q, k, v, *, causal=False, scale=None):\n    return q\n")
    whole = records(Selection(kernel=(f"{path}:mine",)))
    assert missing(whole, "full", "mine.py:mine") == []
    calls = [record for record in whole if record.experiment in ("call", "contract")]
    assert missing(calls, "inference", "mine.py:mine") == []
    trained = [record.id for record in whole if record.experiment == "training"]
    assert missing(calls, "full", "mine.py:mine") == trained
    assert missing(calls, "training", "mine.py:mine") == trained


def test_profiles_need_no_device_and_ask_the_same_of_every_one() -> None:
    asked = profile("full").kernels_on
    assert asked("cuda") == asked("ascend") == asked("torch:mps") == asked("cpu")
    assert asked("interpreter") == {}


def test_the_hash_is_of_what_is_asked_for() -> None:
    full = profile("full")
    assert len({profile(name).hash for name in PROFILES}) == len(PROFILES)
    assert replace(full, versions={**full.versions, "random": 99}).hash != full.hash
    assert replace(full, heads=32).hash != full.hash
    assert replace(full, about="other words").hash == full.hash
