"""Records of a measure, a check, a case and a kind of experiment that nothing in reports/ has ever heard of.

They describe themselves, so every report shows them and the gate holds them without a change.
"""

import base64
import csv
import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tiebreak.defects.made_up import run
from tiebreak.matrix.record_collector import properties
from tiebreak.reports.cli import main
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


@pytest.fixture
def kept(keep: Callable[[Run, str], Path]) -> Callable[..., Path]:
    """Keeps a run of such cells, with what the file says of them."""

    def write(name: str, *records: Record) -> Path:
        made = Run(
            run().platform,
            run().options,
            records,
            measures={
                "wobble": MeasureRecord("how far it swings", "deg", worse="more", limit=0.5, column=True),
                "flips": MeasureRecord("how often it turns over", worse="less", limit=0.0),
            },
            checks={"returns": CheckRecord("whether it swings back", judges=True)},
            cases={"fast_swing": CaseRecord("a fast swing", "the attic")},
            experiments={"pendulum": ExperimentRecord("a swing", "how far it swings, in degrees.", "wobble")},
            run=name,
        )
        return keep(made, name)

    return write


Kept = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


def test_a_file_keeps_them_and_fits_the_schema(kept: Kept) -> None:
    plain = json.loads(kept("a", swing()).read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator(schema_of("records")).validate(plain)
    (record,) = store.read(kept("a", swing())).records
    assert record == swing()


@pytest.mark.parametrize("tablefmt", ["simple", "github", "latex"])
def test_show_has_a_table_with_the_legend_of_the_experiment(kept: Kept, tablefmt: str, capsys: Capture) -> None:
    assert main(["show", str(kept("a", swing())), "--format", tablefmt]) == 0
    out = capsys.readouterr().out
    for text in ("abacus, fp9", "beads", "1.0 deg ·", "how far it swings, in degrees."):
        assert text in out
    assert main(["show", str(kept("b", swing(met=False)))]) == 0
    out = capsys.readouterr().out
    assert "!1.0 deg!" in out
    assert "fell abacus-beads-fast_swing-fp9\n    it did not come back\n" in out


def test_csv_has_columns_of_them(kept: Kept, capsys: Capture) -> None:
    assert main(["show", str(kept("a", swing())), "--format", "csv"]) == 0
    (row,) = csv.DictReader(io.StringIO(capsys.readouterr().out))
    columns = {
        name: row[name] for name in ("wobble", "wobble_half_width", "flips", "returns", "returns_met", "experiment")
    }
    assert columns == {
        "wobble": "1.0",
        "wobble_half_width": "0.125",
        "flips": "2.0",
        "returns": "it swings back",
        "returns_met": "True",
        "experiment": "pendulum",
    }


def test_json_has_them_with_what_they_are(kept: Kept, capsys: Capture) -> None:
    path = kept("a", swing())
    assert main(["show", str(path), "--format", "json"]) == 0
    assert capsys.readouterr().out == path.read_text(encoding="utf-8")


def test_junit_has_properties_of_them() -> None:
    shown = dict(properties(swing()))
    assert shown["tiebreak.wobble"] == 1.0
    assert shown["tiebreak.wobble_half_width"] == 0.125
    assert shown["tiebreak.flips"] == 2.0
    assert shown["tiebreak.returns_met"] is True


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
def test_the_gate_holds_them_to_their_own_limits(kept: Kept, new: Record, message: str | None, capsys: Capture) -> None:
    old = kept("old", swing())
    assert main(["gate", str(old), str(kept("new", new))]) == (0 if message is None else 1)
    out = capsys.readouterr().out
    assert ("worse   " in out) == (message is not None)
    assert message is None or f"worse   {new.id}: {message}" in out


def test_the_command_line_sets_their_limits(kept: Kept) -> None:
    old, new = str(kept("old", swing())), str(kept("new", swing(1.8)))
    assert main(["gate", old, new]) == 1
    assert main(["gate", old, new, "--fail", "wobble:1"]) == 0
    assert main(["gate", old, new, "--fail", "wibble:1"]) == 2


def test_compare_puts_them_side_by_side(kept: Kept, capsys: Capture) -> None:
    assert main(["compare", str(kept("a", swing())), str(kept("b", swing(2.0)))]) == 0
    out = capsys.readouterr().out
    assert "1 cell on 2 platforms: 1 agree in verdict, not in bits" in out
    assert re.search(r"~ beads fast_swing +a 1\.00±0\.125 deg +b 2\.00±0\.125 deg", out)


def test_the_page_has_them_in_map_and_table(kept: Kept, tmp_path: Path) -> None:
    assert (
        main(["page", str(kept("a", swing(), swing(id="x", case="fast_swing", kernel="b"))), "-o", str(tmp_path)]) == 0
    )
    html = (tmp_path / "index.html").read_text(encoding="utf-8")
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


def test_a_baseline_keeps_their_evidence_and_drops_nothing(kept: Kept, tmp_path: Path) -> None:
    baseline = tmp_path / "base" / "line.json"
    assert main(["gate", str(baseline), str(kept("a", swing())), "--update-baseline"]) == 0
    (record,) = store.read(baseline).records
    assert record == swing()
