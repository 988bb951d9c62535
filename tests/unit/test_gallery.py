"""The gallery's page is what its records make, and the records say what a whole run said."""

import gzip
from pathlib import Path

import pytest
from msgspec.structs import replace

from tiebreak.reports.records import store
from tiebreak.reports.records.record import CaseRecord, Estimate, ExperimentRecord, MeasureRecord, Record, Run, Shown
from tiebreak.studies import gallery


def record(kernel: str, bias: float, verdict: str, digest: str) -> Record:
    return Record(
        f"cpu-{kernel}-ties-bf16", "cpu", kernel, "ties", 1, "bf16", 1, 16, "call", "measured", "pytest",
        shown=Shown("bias", bias, verdict=verdict), verdict=verdict, digest=digest,
        measures={"bias": Estimate(0.123456789, 0.01), "hidden": 1.0}, evidence={"paper": "stable"},
    )  # fmt: skip


def run_of(*records: Record, level: str = "native", **fields: object) -> Run:
    platform = {"cpu": "Made-up 9000", "level": level, "torch": "2", "commit": "0123456789"} | fields
    measures = {"bias": MeasureRecord("bias", column=True), "hidden": MeasureRecord("hidden")}
    cases, experiments = {"ties": CaseRecord("ties")}, {"call": ExperimentRecord("a call")}
    options = {"heads": "16"}
    return Run(platform, options, records, measures, {}, cases, experiments, seconds={"a": 1.0}, run=level)


def test_compact_form_keeps_what_tables_and_comparisons_read() -> None:
    whole = run_of(record("flash", 0.12, "biased", "aa"))
    kept = gallery.compact(whole)
    (one,) = kept.records
    assert one == replace(whole.records[0], measures={"bias": Estimate(0.12346, 0.01)}, evidence={})
    assert (set(kept.measures), kept.seconds) == ({"bias"}, {})


def test_tables_count_and_put_levels_that_agree_in_one_column() -> None:
    fast = [record("flash", 0.23, "biased", "aa"), record("fair", 0.0, "unbiased", "cc")]
    slow = [record("flash", -0.02, "unbiased", "bb"), record("fair", 0.0, "unbiased", "cc")]
    levels = {"native": run_of(*fast), "avx2": run_of(*fast, level="avx2"), "none": run_of(*slow, level="none")}
    lines = list(gallery.whole({"made-up": levels}))
    assert "| `none` | 2 | 0 | 0 |" in lines
    assert "Of 2 cells that all have, 1 agree to the bit, 0 in verdict alone, 1 disagree." in lines
    assert "| kernel, case | `native`<br>`avx2` | `none` |" in lines
    assert "| `flash` `ties` | +0.23 B | -0.02 |" in lines


def test_an_emulated_processor_is_marked() -> None:
    fields = {"emulated": "instructions emulated by QEMU 7.2", "machine": "aarch64"}
    levels = {"aarch64-max": run_of(record("flash", 0.23, "biased", "aa"), level="aarch64-max", **fields)}
    lines = list(gallery.whole({"qemu": levels}))
    assert lines[2].startswith("aarch64, *emulated processor*, torch 2,")
    assert lines[2].endswith(" Instructions emulated by QEMU 7.2.")


def test_cells_that_show_the_same_share_a_row() -> None:
    shown = {"fast": (0.23, "biased", "a"), "slow": (-0.02, "unbiased", "b")}
    levels = {
        level: run_of(*(record(kernel, bias, verdict, digest) for kernel in ("one", "two", "three")), level=level)
        for level, (bias, verdict, digest) in shown.items()
    }
    rows = [line for line in gallery.whole({"made-up": levels}) if line.startswith("| `one`")]
    assert rows == ["| `one` `ties`, 2 more | +0.23 B | -0.02 |"]


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


def test_compressed_records_are_read_and_broken_ones_refused(tmp_path: Path) -> None:
    run = run_of(record("flash", 0.12, "biased", "aa"))
    packed = gzip.compress(store.as_text(run).encode())
    (tmp_path / "a.json.gz").write_bytes(packed)
    (tmp_path / "b.json.gz").write_bytes(packed[: len(packed) // 2])
    assert store.read(tmp_path / "a.json.gz").records[0].shown == Shown("bias", 0.12, verdict="biased")
    with pytest.raises(store.UnreadableRecordsError, match=r"b\.json\.gz: compressed, but broken: "):
        store.read(tmp_path / "b.json.gz")


def test_compressed_file_that_unpacks_without_end_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MAX_BYTES", 10_000)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * 1_000_000))
    with pytest.raises(store.UnreadableRecordsError, match="larger than"):
        store.read(tmp_path / "bomb.json.gz")
