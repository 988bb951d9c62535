"""Reports of 10 runs with 5,000 records each. Run with ``pytest -o python_files='bench_*.py' tests/bench``."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from pytest_benchmark.fixture import BenchmarkFixture

from tiebreak.reports.cli import main
from tiebreak.reports.records import store
from tiebreak.reports.records.record import CaseRecord, Estimate, HistogramRecord, TraceRecord

FILES, KERNELS, CASES = 10, 50, 100
SAMPLE = Path(__file__).parents[2] / "examples" / "my-kernel" / "baseline.json"


@pytest.fixture(scope="session")
def large(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], list[Path]]:
    """Files of records like real ones: every measure, in another one bit, now and then a trace."""
    folder = tmp_path_factory.mktemp("records")

    def make(files: int, cells: int) -> list[Path]:
        paths = [folder / f"{cells}-{number}.json" for number in range(files)]
        for number, path in enumerate(paths):
            if not path.exists():
                _write(path, number, cells)
        return paths

    return make


def _write(path: Path, number: int, cells: int) -> None:
    sample = store.read(SAMPLE)
    base = next(record for record in sample.records if "prediction" in record.answers)
    trace = TraceRecord(tuple(key * 1.234567890123e-5 for key in range(128)), (3, 9))
    drawn = {"trace": trace, "histogram": HistogramRecord(-2.0, 0.0625, (1000,) * 64, 0)}
    cases = {f"case[k={number}]": CaseRecord("made up") for number in range(cells // KERNELS + 1)}
    records = []
    for cell in range(cells):
        kernel, case = f"kernel_{cell % KERNELS}@paper", f"case[k={cell // KERNELS}]"
        bias = Estimate(0.23 * (cell % 7) / 7 + 1.2345678e-7 * number * (cell % 3 == 0), 0.01234567890123)
        fields = {"id": f"cpu-{kernel}-{case}-bf16", "kernel": kernel, "case": case}
        record = replace(base, **fields, measures={**base.measures, "bias": bias})
        if cell % 3 == 0:
            record = replace(record, digest=f"{number:016x}")
        records.append(replace(record, evidence=drawn) if cell % 100 == 0 else record)
    platform = {**sample.platform, "level": f"level-{number}"}
    seconds = {record.id: 0.123 for record in records}
    changed = {"records": tuple(records), "platform": platform, "cases": cases, "seconds": seconds}
    store.write(replace(sample, **changed, run=str(number)), path)


Large = Callable[[int, int], list[Path]]


def timed(benchmark: BenchmarkFixture, rounds: int, make: Callable[..., Any], *arguments: Any) -> Any:
    """What `make` returns; a fixed number of rounds, for calls of seconds."""
    return benchmark.pedantic(make, args=arguments, rounds=rounds)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("cells", [1250, 2500, 5000])
def test_reading_is_linear_in_records(benchmark: BenchmarkFixture, large: Large, cells: int) -> None:
    (path,) = large(1, cells)
    benchmark.group = "read"
    run = timed(benchmark, 3, store.read, path)
    assert len(run.records) == cells


def test_parsing_json_alone(benchmark: BenchmarkFixture, large: Large) -> None:
    text = large(1, 5000)[0].read_text(encoding="utf-8")
    benchmark.group = "read"
    timed(benchmark, 3, json.loads, text)


def test_show_10_files(benchmark: BenchmarkFixture, large: Large, capsys: pytest.CaptureFixture[str]) -> None:
    """Below 3 seconds."""
    paths = large(FILES, KERNELS * CASES)
    benchmark.group = "10 files of 5,000 records"
    codes = timed(benchmark, 1, lambda: {main(["show", str(path)]) for path in paths})
    assert codes == {0}


@pytest.mark.parametrize("more", [[], ["--all"]], ids=["differing", "all"])
def test_compare_10_files(
    benchmark: BenchmarkFixture, large: Large, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Below 3 seconds."""
    paths = large(FILES, KERNELS * CASES)
    benchmark.group = "10 files of 5,000 records"
    assert timed(benchmark, 1, main, ["compare", *map(str, paths), *more]) == 0


def test_page_of_10_files(benchmark: BenchmarkFixture, large: Large, tmp_path: Path) -> None:
    """Below 15 seconds and 5 MB."""
    paths = large(FILES, KERNELS * CASES)
    benchmark.group = "10 files of 5,000 records"
    assert timed(benchmark, 1, main, ["page", *map(str, paths), "-o", str(tmp_path)]) == 0
    size = (tmp_path / "index.html").stat().st_size
    benchmark.extra_info["bytes"] = size
    assert size < 5_000_000
