"""Records of a measure, a check, a case and a kind of experiment that nothing in reports/ has ever heard of.

They describe themselves, so every report shows them and the gate holds them without a change.
"""

import base64
import csv
import gzip
import io
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tiebreak.defects.made_up import Call, run
from tiebreak.matrix.record_collector import properties
from tiebreak.reports.gate.gate import update
from tiebreak.reports.records import store
from tiebreak.reports.records.record import (
    Answer,
    CaseRecord,
    CheckRecord,
    Estimate,
    ExperimentRecord,
    MeasureRecord,
    Record,
    Run,
    Shown,
)
from tiebreak.reports.schemas import schema_of

KEY = {"count": 3, "where": ["a", {"b": None}]}  # evidence of a kind of its own


def swing(wobble: float = 1.0, flips: float = 2.0, *, met: bool = True, **fields: Any) -> Record:
    """A cell that was put through an experiment called pendulum."""
    answer = Answer(met, "it swings back", "" if met else "it did not come back")
    base: dict[str, Any] = {
        "id": "abacus-beads-fast_swing-fp9",
        "backend": "abacus",
        "kernel": "beads",
        "case": "fast_swing",
        "case_version": 7,
        "format": "fp9",
        "seed": 1,
        "heads": 0,
        "experiment": "pendulum",
        "outcome": "held" if met else "fell",
        "command": "pytest tests/matrix --cases fast_swing",
        "shown": Shown("wobble", wobble, "deg", spec=".1f"),
        "measures": {"wobble": Estimate(wobble, 0.125), "flips": flips},
        "answers": {"returns": answer},
        "digest": f"{wobble}",
        "evidence": {"beads": KEY},
    }
    return Record(**(base | fields))


def attic(*cells: Record) -> Run:
    """A run of such cells, with what the file says of them."""
    return Run(
        run().platform,
        run().options,
        cells or (swing(),),
        measures={
            "wobble": MeasureRecord("how far it swings", "deg", worse="more", limit=0.5, column=True),
            "flips": MeasureRecord("how often it turns over", worse="less", limit=0.0),
        },
        checks={"returns": CheckRecord("whether it swings back", judges=True)},
        cases={"fast_swing": CaseRecord("a fast swing", "the attic")},
        experiments={"pendulum": ExperimentRecord("a swing", "how far it swings, in degrees.", "wobble")},
        run="a" * 32,
    )


def test_a_file_and_a_baseline_keep_them_and_fit_the_schema(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = store.as_text(attic())
    jsonschema.Draft202012Validator(schema_of("records")).validate(json.loads(text))
    assert store.parse(text.encode(), Path("a")).records == (swing(),)
    update(attic(), Path("line.json"))
    assert store.read(Path("line.json")).records == (swing(),)


def test_show_has_a_table_with_the_legend_of_the_experiment(tiebreak: Call) -> None:
    out = tiebreak("show", attic()).out
    for text in ("abacus, fp9", "beads", "1.0 deg ·", "how far it swings, in degrees."):
        assert text in out
    out = tiebreak("show", attic(swing(met=False))).out
    assert "!1.0 deg!" in out
    assert "fell abacus-beads-fast_swing-fp9\n    it did not come back\n" in out


def test_csv_has_columns_of_them_and_json_what_they_are(tiebreak: Call) -> None:
    (row,) = csv.DictReader(io.StringIO(tiebreak("show", attic(), "--format", "csv").out))
    expected = {"wobble": "1.0", "wobble_half_width": "0.125", "flips": "2.0", "returns": "it swings back",
                "returns_met": "True", "experiment": "pendulum"}  # fmt: skip
    assert {name: row[name] for name in expected} == expected
    assert tiebreak("show", attic(), "--format", "json").out == Path("1.json").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (swing(1.7), None),  # beyond the limit, not beyond both intervals
        (swing(1.8), "wobble +1.8000 ±0.1250 deg, +1.0000 ±0.1250 in the baseline"),
        (swing(flips=1.0), "flips 1, 2 in the baseline"),
        (swing(flips=3.0), None),
        (swing(measures={"wobble": Estimate(None, None), "flips": 2.0}), "NaN or missing: wobble, interval of wobble;"),
        (swing(met=False), "fell, held in the baseline: it did not come back"),
        (swing(answers={}), "returns no longer asked: it swings back, in the baseline"),
    ],
)
def test_the_gate_holds_them_to_their_own_limits(new: Record, message: str | None, tiebreak: Call) -> None:
    told = tiebreak("gate", attic(), attic(new))
    assert told.code == (0 if message is None else 1)
    assert ("worse   " in told.out) == (message is not None)
    assert message is None or f"worse   {new.id}: {message}" in told.out


def test_the_command_line_sets_their_limits_and_junit_has_properties_of_them(tiebreak: Call) -> None:
    limits: tuple[tuple[str, ...], ...] = ((), ("--fail", "wobble:1"), ("--fail", "wibble:1"))
    assert [tiebreak("gate", attic(), attic(swing(1.8)), *words).code for words in limits] == [1, 0, 2]
    shown = dict(properties(swing()))
    expected = {"wobble": 1.0, "wobble_half_width": 0.125, "flips": 2.0, "returns_met": True}
    assert {name: shown[f"tiebreak.{name}"] for name in expected} == expected


def test_compare_puts_them_side_by_side(tiebreak: Call) -> None:
    out = tiebreak("compare", attic(), attic(swing(2.0))).out
    assert "1 cell on 2 platforms: 1 agree in verdict, not in bits" in out
    assert re.search(r"~ beads fast_swing +a 1\.00±0\.125 deg +b 2\.00±0\.125 deg", out)


def test_the_page_has_them_in_map_and_table(tiebreak: Call) -> None:
    assert tiebreak("page", attic(swing(), swing(id="x", kernel="b")), "-o", ".").code == 0
    html = Path("index.html").read_text(encoding="utf-8")
    assert "<p>pendulum: how far it swings, in degrees.</p>" in html
    match = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', html)
    assert match
    data = json.loads(gzip.decompress(base64.b64decode(match[1])))
    assert data["measures"] == [
        {"name": "wobble", "unit": "deg", "about": "how far it swings", "column": True},
        {"name": "flips", "unit": "", "about": "how often it turns over", "column": False},
    ]
    # The panel has every measure, an estimate with its half width, whether it is a column or not.
    for cell in data["cells"]:
        (record,) = cell["records"]
        assert record["measures"] == [["wobble", 1.0, 0.125], ["flips", 2.0, None]]
        assert (record["text"], cell["backend"]) == ("1.0 deg ·", "abacus")
