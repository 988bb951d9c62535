"""The table of bias against the number of bits: right where the matrix knows the answer, and what the picture shows."""

from pathlib import Path

import pytest

from tiebreak.programs.pages import bits
from tiebreak.programs.pages.tables import read_rows
from tiebreak.reports.records import store

ROOT = Path(__file__).parents[2]


def test_picture_is_what_the_table_makes() -> None:
    assert bits.PICTURE.read_text(encoding="utf-8") == bits.picture(read_rows(bits.TABLE, bits.Row))


def test_table_is_whole() -> None:
    rows = [(row.format, row.case, row.kernel) for row in read_rows(bits.TABLE, bits.Row)]
    wanted = [
        (fmt, case, kernel) for fmt in (*bits.MANTISSAS, *bits.OTHERS) for case in bits.CASES for kernel in bits.KERNELS
    ]
    assert rows == wanted


def test_seven_bits_are_bf16() -> None:
    # Another way to the same numbers: there q, k and V are drawn in bf16, and the plan names it.
    baseline = store.read(ROOT / "reports" / "baselines" / "emulation.json").records
    known = {
        (record.case, record.kernel): record
        for record in baseline
        if record.heads == bits.HEADS and record.verdict != "nonfinite"
    }
    rows = [row for row in read_rows(bits.TABLE, bits.Row) if row.format == "E8M7" and (row.case, row.kernel) in known]
    assert len(rows) > 60
    for row in rows:
        assert row.bias == pytest.approx(known[row.case, row.kernel].number("bias"), rel=1e-4), row


def test_rows_are_what_a_run_gives() -> None:
    kernels = ("flash@paper", "flash@fused", "fair")
    wanted = {(row.format, row.case, row.kernel): row for row in read_rows(bits.TABLE, bits.Row)}
    for row in bits.rows(("fp8_e4m3",), ("tied_maxima[k=2]",), kernels):
        kept = wanted[row.format, row.case, row.kernel]
        assert row.verdict == kept.verdict
        assert row.bias == pytest.approx(kept.bias, rel=1e-4)
        assert row.delta_bias == pytest.approx(kept.delta_bias, rel=1e-4)
        assert row.coherence_excess == pytest.approx(kept.coherence_excess, rel=1e-4)
