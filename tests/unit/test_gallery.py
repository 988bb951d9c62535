"""The gallery's page is what its records make, and the records say what a whole run said."""

import gzip
from pathlib import Path

import pytest
from msgspec.structs import replace

from tiebreak.defects import made_up
from tiebreak.matrix.experiments.log_probabilities import LogProbabilities
from tiebreak.reports.records import store
from tiebreak.reports.records.record import NUMBERS, Estimate, NumbersRecord, Record, Run, Shown, TraceRecord
from tiebreak.studies import gallery


def record(kernel: str, bias: float, verdict: str, digest: str) -> Record:
    measures = {"bias": Estimate(0.123456789, 0.01), "hidden": 1.0}
    shown = Shown("bias", bias, verdict=verdict)
    return made_up.record(kernel, "ties", measures=measures, shown=shown, verdict=verdict, digest=digest, heads=16)


def run_of(*records: Record, level: str = "native", **fields: object) -> Run:
    platform = {"level": level, "torch": "2", "commit": "0123456789", "cpu_features": []} | fields
    return made_up.run(*records, platform=platform, options={"heads": "16"}, run=level)


def test_compact_form_keeps_what_tables_and_comparisons_read() -> None:
    numbers = {NUMBERS: NumbersRecord("errors", "nats", "inputs", (0.125,))}
    drawn = {"trace": TraceRecord((0.5,), ())}
    whole = run_of(replace(record("flash", 0.12, "biased", "aa"), evidence=numbers | drawn))
    kept = gallery.compact(whole)
    (one,) = kept.records
    assert one.measures["bias"] == Estimate(0.12346, 0.01)
    assert (one.evidence, kept.seconds) == (numbers, {})
    assert "hidden" not in one.measures.keys() | kept.measures.keys()


def test_table_counts_what_levels_and_machines_agree_in() -> None:
    fast = [record("flash", 0.23, "biased", "aa"), record("fair", 0.0, "unbiased", "cc")]
    slow = [record("flash", -0.02, "unbiased", "bb"), record("fair", 0.0, "unbiased", "cc")]
    arm = run_of(*fast, emulated="instructions emulated by QEMU 7.2", machine="aarch64")
    machines = {"made-up": {"native": run_of(*fast), "none": run_of(*slow, level="none")}, "qemu": {"native": arm}}
    assert list(gallery.whole(machines))[2:] == [
        "| `made-up` | Made-up 9000, torch 2, `0123456` | 2 | 2 | 1 | 0 | 1 |",
        "| `qemu` | aarch64, *emulated processor*, torch 2, `0123456` | 1 | 2 | 2 | 0 | 0 |",
        "| `made-up` beside `qemu` |  |  | 2 | 2 | 0 | 0 |",
    ]


def told(*values: float, inputs: str = "i") -> Record:
    """A cell of log-probabilities."""
    evidence = {NUMBERS: NumbersRecord("errors", "nats", inputs, values)}
    return replace(record("flash", 0.1, "biased", f"{values}"), experiment=LogProbabilities.kind, evidence=evidence)


def test_table_of_nats_has_every_level_beside_the_first_native_one() -> None:
    arm = run_of(told(3.0, 4.5), level="max", emulated="by QEMU", machine="aarch64")
    machines = {
        "arm": {"max": arm},
        "made-up": {"native": run_of(told(3.0, 4.0)), "none": run_of(told(3.0, 4.0, inputs="j"), level="none")},
    }
    assert list(gallery.nats(machines)) == [
        "| rms (mean), nats | flash |",
        "|---|---:|",
        "| `made-up/native` | 3.54 |",
        "| `arm/max` | 0.35 (+0.2) |",
        "| `made-up/none` | other inputs |",
    ]


def test_runs_of_log_probabilities_alone_are_kept_in_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FOLDER", "NATS"):
        monkeypatch.setattr(gallery, name, tmp_path / name)
    monkeypatch.setattr(gallery, "TABLES", [])
    cells = {"mixed": (told(0.5), record("fair", 0.1, "biased", "aa")), "nats": (told(0.5),)}
    for machine, own in cells.items():
        store.write(run_of(*own), tmp_path / "a.json")
        assert gallery.main([machine, str(tmp_path / "a.json")]) == 0
    assert list(gallery.kept(tmp_path / "FOLDER")) == ["mixed"]
    (kept,) = gallery.kept(tmp_path / "NATS")["nats"]["native"].records
    assert kept.evidence == told(0.5).evidence


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"commit": "0123456-dirty"}, "with changes"),
        ({"complete": False}, "interrupted"),
        ({"machine": "Mine"}, "small"),
    ],
)
def test_what_is_no_whole_run_of_a_commit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    fields: dict[str, object], message: str,
) -> None:  # fmt: skip
    monkeypatch.setattr(gallery, "FOLDER", tmp_path / "platforms")
    machine = str(fields.pop("machine", "mine"))
    run = run_of(record("flash", 0.12, "biased", "aa"), commit=fields.get("commit", "0123456"))
    store.write(replace(run, complete=bool(fields.get("complete", True))), tmp_path / "a.json")
    with pytest.raises(SystemExit) as ended:
        gallery.main([machine, str(tmp_path / "a.json")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "platforms").exists()


def test_compressed_records_are_read_and_broken_or_endless_ones_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(record("flash", 0.12, "biased", "aa"))
    packed = gzip.compress(store.as_text(run).encode())
    (tmp_path / "a.json.gz").write_bytes(packed)
    (tmp_path / "b.json.gz").write_bytes(packed[: len(packed) // 2])
    assert store.read(tmp_path / "a.json.gz").records[0].shown == Shown("bias", 0.12, verdict="biased")
    with pytest.raises(store.UnreadableRecordsError, match=r"b\.json\.gz: compressed, but broken: "):
        store.read(tmp_path / "b.json.gz")
    monkeypatch.setattr(store, "MAX_BYTES", 10_000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(store.UnreadableRecordsError, match="larger than"):
        store.read(tmp_path / "bomb.json.gz")
