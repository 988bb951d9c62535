"""The audit's record, file and comparison."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import ONE
from tiebreak.reports.audit.record import Audit, Audits, check_update, differences
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import UnreadableRecordsError, UnwritableFolderError

KeepAudits = Callable[[Audits, str], Path]
SKIP = Audit.skip("sm_80", "fp8/forward", "no fp8 there")


def test_a_file_comes_back_as_it_was_written(audits: Audits, keep: KeepAudits) -> None:
    assert store.load(keep(audits, "audit"), Audits) == audits
    assert audits.kernels == ["flash/forward", "fp8/forward"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain["audits"][0].pop("mode"), "audits[0]: Object missing required field `mode`"),
        (lambda plain: plain["audits"][0].update(extra=1), "audits[0]: Object contains unknown field `extra`"),
        (lambda plain: plain["audits"][0].update(fused="many"), "audits[0].fused: Expected `int`, got `str`"),
        (lambda plain: plain["audits"][0].update(products="wgmma"), "audits[0].products: Expected `array`, got `str`"),
        (lambda plain: plain["audits"].append(plain["audits"][0]), "audits: sm_80 flash/forward twice"),
        (lambda plain: plain["audits"][0].update(target="a\nb"), r"cards.a\nb: missing"),
        (lambda plain: plain["cards"].pop("sm_90"), "cards.sm_90: missing"),
        (lambda plain: plain.pop("cards"), "Object missing required field `cards`"),
        (lambda plain: plain.pop("schema"), "schema: missing is not 7"),
        (lambda plain: plain.update(schema=1), "schema: 1 is not 7, the one that this tiebreak reads: make the file"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, audits: Audits, keep: KeepAudits
) -> None:
    path = keep(audits, "audit")
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(UnreadableRecordsError) as refused:
        store.load(path, Audits)
    assert str(refused.value).startswith(f"{path}: {message}")
    assert len(str(refused.value).splitlines()) == 1


def test_records_of_a_run_are_refused_as_such(telling: Run, keep: Callable[[Run, str], Path]) -> None:
    path = keep(telling, "run")
    with pytest.raises(UnreadableRecordsError) as refused:
        store.load(path, Audits)
    assert str(refused.value).startswith(f"{path}: records of a run: tiebreak show, page, ")


def test_equal_audits_do_not_differ_whatever_the_schedule() -> None:
    others = [replace(ONE, fused=0, separate=9), replace(SKIP, skipped="other words")]
    assert differences([ONE, SKIP], others) == []


@pytest.mark.parametrize(
    ("field", "value", "message"),
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
def test_every_field_that_rounds_is_compared(field: str, value: object, message: str) -> None:
    assert differences([ONE], [replace(ONE, **{field: value})]) == [f"sm_90 flash/forward: {field}: {message}"]


def test_a_kernel_that_one_side_lacks_is_no_pass() -> None:
    assert differences([ONE, SKIP], [ONE]) == ["sm_80 fp8/forward: expected, but not compiled"]
    assert differences([], [ONE]) == ["sm_90 flash/forward: not in the expectation"]


def test_a_skip_on_one_side_is_no_pass() -> None:
    skip = Audit.skip("sm_90", "flash/forward", "no ptxas")
    assert differences([ONE], [skip]) == ["sm_90 flash/forward: skipped: was no, is no ptxas"]
    assert differences([skip], [ONE]) == ["sm_90 flash/forward: skipped: was no ptxas, is no"]


def test_an_update_takes_all_that_the_file_has(audits: Audits, keep: KeepAudits, tmp_path: Path) -> None:
    coming = {(audit.target, audit.kernel) for audit in audits.audits}
    path = keep(audits, "audit")
    check_update(path, coming)
    check_update(path, coming | {("sm_121", "flash/forward")})
    check_update(tmp_path / "new" / "audit.json", coming)
    with pytest.raises(UsageError, match="it has sm_80 fp8/forward, not asked for"):
        check_update(path, coming - {("sm_80", "fp8/forward")})
    with pytest.raises(UnwritableFolderError, match="cannot write"):
        check_update(path / "audit.json", coming)
    path.write_text("{")
    with pytest.raises(UnreadableRecordsError):
        check_update(path, coming)
