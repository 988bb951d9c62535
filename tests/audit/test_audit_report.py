"""The audit's record, file, table and comparison."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tiebreak.reports import audit as records
from tiebreak.reports.audit import Audit, Audits, differences
from tiebreak.reports.errors import UsageError
from tiebreak.reports.store import UnreadableRecordsError

ONE = Audit(
    target="sm_90",
    kernel="flash/forward",
    skipped=None,
    products=("wgmma k16 bf16*bf16 -> f32",),
    operand_casts=("cvt.rn.bf16x2.f32",),
    output_casts=("cvt.rn.bf16x2.f32",),
    exponential=("ex2.approx.ftz.f32",),
    exponent=("add",),
    logarithm=(),
    division=("div.rn.f32",),
    contraction=(),
    flushes=("ex2",),
    mode="to even",
    fused=0,
    separate=7,
)
SKIP = Audit.skip("sm_80", "fp8/forward", "no fp8 there")


def kept(path: Path, *audits: Audit, **changes: object) -> Path:
    records.write(replace(Audits(records.SCHEMA, "3.9.0", audits), **changes), path)  # type: ignore[arg-type]
    return path


def test_a_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = kept(tmp_path / "audit.json", SKIP, ONE)
    assert records.read(path) == Audits(records.SCHEMA, "3.9.0", (SKIP, ONE))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda plain: plain["audits"][0].pop("mode"), "audits[0].mode: missing"),
        (lambda plain: plain["audits"][0].update(extra=1), "audits[0].extra: unknown field"),
        (lambda plain: plain["audits"][0].update(fused="many"), "audits[0].fused: expected an integer of 64 bits"),
        (lambda plain: plain["audits"][0].update(products="wgmma"), "audits[0].products: expected a list"),
        (lambda plain: plain["audits"].append(plain["audits"][0]), "audits: sm_90 flash/forward twice"),
        (lambda plain: plain.update(schema=2), "schema: 2 is not 1, the one that this tiebreak reads"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused(
    change: Callable[[dict[str, object]], object], said: str, tmp_path: Path
) -> None:
    path = kept(tmp_path / "audit.json", ONE)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(UnreadableRecordsError) as refused:
        records.read(path)
    assert str(refused.value).startswith(f"{path}: {said}")
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"{", b"\xff", b"[" * 100_000])
def test_a_file_that_is_no_json_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "audit.json"
    path.write_bytes(content)
    with pytest.raises(UnreadableRecordsError, match=r"not JSON \(.+\)$"):
        records.read(path)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRecordsError, match="No such file"):
        records.read(tmp_path / "audit.json")


def test_equal_audits_do_not_differ_whatever_the_schedule() -> None:
    assert differences([ONE, SKIP], [replace(ONE, fused=0, separate=9), replace(SKIP, skipped="other words")]) == []


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("products", ("wgmma k32 bf16*bf16 -> f32",), "was wgmma k16 bf16*bf16 -> f32, is wgmma k32 bf16*bf16 -> f32"),
        ("operand_casts", ("cvt.rz.bf16x2.f32",), "was cvt.rn.bf16x2.f32, is cvt.rz.bf16x2.f32"),
        ("output_casts", (), "was cvt.rn.bf16x2.f32, is none"),
        ("exponential", ("ex2.approx.f32",), "was ex2.approx.ftz.f32, is ex2.approx.f32"),
        ("exponent", ("add", "fma"), "was add, is add, fma"),
        ("logarithm", ("lg2.approx.f32",), "was none, is lg2.approx.f32"),
        ("division", ("div.full.f32",), "was div.rn.f32, is div.full.f32"),
        ("contraction", ("fma",), "was none, is fma"),
        ("flushes", (), "was ex2, is none"),
        ("mode", "to even, rz", "was to even, is to even, rz"),
    ],
)
def test_every_field_that_rounds_is_compared(field: str, value: object, said: str) -> None:
    changed = replace(ONE, **{field: value})  # type: ignore[arg-type]
    assert differences([ONE], [changed]) == [f"sm_90 flash/forward: {field}: {said}"]


def test_a_kernel_that_one_side_lacks_is_no_pass() -> None:
    assert differences([ONE, SKIP], [ONE]) == ["sm_80 fp8/forward: expected, but not compiled"]
    assert differences([], [ONE]) == ["sm_90 flash/forward: not in the expectation"]


def test_a_skip_on_one_side_is_no_pass() -> None:
    skip = Audit.skip(ONE.target, ONE.kernel, "no ptxas")
    assert differences([ONE], [skip]) == ["sm_90 flash/forward: skipped: was no, is no ptxas"]
    assert differences([skip], [ONE]) == ["sm_90 flash/forward: skipped: was no ptxas, is no"]


def test_the_table_has_a_row_a_target_and_says_what_was_skipped() -> None:
    other = replace(SKIP, kernel=ONE.kernel)
    text = records.table([ONE, other], {"sm_90": "H100", "sm_80": "A100"})
    rows = {line[:12]: re.split(r"\s{2,}", line)[1:] for line in text.splitlines() if line.startswith("sm_")}
    assert rows["sm_80 (A100)"] == ["skip"] * 10
    assert rows["sm_90 (H100)"] == [
        "wgmma k16 bf16*bf16 -> f32",
        "cvt.rn.bf16x2.f32",
        "cvt.rn.bf16x2.f32",
        "ex2.approx.ftz.f32",
        "add",
        "none",
        "div.rn.f32",
        "none (0/7)",
        "ex2",
        "to even",
    ]
    assert "skipped sm_80 flash/forward: no fp8 there" in text
    assert text.endswith(records.LEGEND)


def test_an_update_of_less_than_the_file_has_is_refused(tmp_path: Path) -> None:
    path = kept(tmp_path / "audit.json", ONE, SKIP)
    before = path.read_bytes()
    with pytest.raises(UsageError, match="it has sm_80 fp8/forward, which was not compiled"):
        records.update(Audits(records.SCHEMA, "3.9.0", (ONE,)), path)
    assert path.read_bytes() == before
    records.update(Audits(records.SCHEMA, "4.0.0", (ONE, SKIP)), path)
    assert records.read(path).triton == "4.0.0"
