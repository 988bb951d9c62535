"""Audits: their file and comparison, and what verbs make of them on the terminal and on the page."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import Call
from tiebreak.laboratory.audit.records import KIND, LEGEND, Audit, Audits, audit_tables, differences, kinds
from tiebreak.reports.page.command import page
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import UnreadableRecordsError
from tiebreak.reports.tables.grids import text

SKIP = Audit.skip("sm_80", "fp8/forward", "no fp8 there")
UNGATED = ("target", "kernel", "skipped", "fused", "separate")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plain: plain["audits"].append(plain["audits"][0]), "audits: sm_80 flash/forward twice"),
        (lambda plain: plain["audits"][0].update(target="a\nb"), r"cards.a\nb: missing"),
        (lambda plain: plain.update(schema=1), "schema: 1 is not 7, the one that this tiebreak reads: make the file"),
    ],
)
def test_a_file_with_a_wrong_field_is_refused(
    change: Callable[[dict[str, Any]], object], message: str, audits: Audits, telling: Run, keep: Callable[..., Path]
) -> None:
    path, run = keep(audits, "audit"), keep(telling, "run")
    assert store.load(path, Audits) == audits
    with pytest.raises(UnreadableRecordsError, match="records of a run: tiebreak show, page, "):
        store.load(run, Audits)
    plain = json.loads(path.read_text())
    change(plain)
    path.write_text(json.dumps(plain))
    with pytest.raises(UnreadableRecordsError) as refused:
        store.load(path, Audits)
    assert str(refused.value).startswith(f"{path}: {message}")
    assert len(str(refused.value).splitlines()) == 1


def test_every_field_that_rounds_is_compared_and_no_schedule(audits: Audits) -> None:
    one = audits.audits[2]
    for field in set(Audit.__struct_fields__) - set(UNGATED):
        changed = replace(one, **{field: "other" if field == "mode" else ("other",)})
        was = ", ".join(kinds(getattr(one, field)))
        assert differences([one], [changed]) == [f"sm_90 flash/forward: {field}: was {was}, is other"]
    assert differences([one, SKIP], [replace(one, fused=0, separate=9), replace(SKIP, skipped="other words")]) == []
    skip = Audit.skip("sm_90", "flash/forward", "no ptxas")
    assert differences([skip], [one]) == ["sm_90 flash/forward: skipped: was no ptxas, is no"]


def rows(shown: str) -> dict[str, list[str]]:
    """By target, the texts of its row in a table for the terminal."""
    found = (re.split(r"\s{2,}", line.strip()) for line in shown.splitlines() if re.match(r"(sm_|gfx)\w+ \(", line))
    return {name: texts for name, *texts in found}


def test_the_table_has_a_row_a_target_and_says_what_was_skipped(audits: Audits) -> None:
    flash, fp8 = (
        text(audit_tables(replace(audits, audits=part))) for part in (audits.audits[::2], audits.audits[1::2])
    )
    nvidia = ["wgmma k16 bf16*bf16 -> f32", "cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32", "ex2.approx.ftz.f32", "add",
              "none", "div.rn.f32", "none (0/7)", "ex2", "to even"]  # fmt: skip
    amd = ["mfma k8 bf16*bf16 -> f32, mfma k8 f16*f16 -> f32", nvidia[1], "v_add3_u32 0x7fff + last bit", *nvidia[3:]]
    assert rows(flash) == {"sm_80 (A100)": nvidia, "sm_90 (H100, H200)": nvidia, "gfx942 (MI300)": amd}
    assert rows(fp8)["sm_80 (A100)"] == ["skip"] * 10
    assert "skipped sm_80 fp8/forward: no fp8 there" in fp8
    assert "skipped sm_80" not in flash
    assert fp8.endswith(f"Nothing in it ran on a GPU.\n{LEGEND}")


def test_show_takes_an_audit_in_every_format(audits: Audits, tiebreak: Call) -> None:
    def show(*words: str) -> str:
        told = tiebreak("show", audits, *words)
        assert told.code == 0
        return told.out

    assert set(rows(show())) == {"sm_80 (A100)", "sm_90 (H100, H200)", "gfx942 (MI300)"}
    assert "| sm_90 (H100, H200) |" in show("--format", "github")
    assert r"sm\_90 (H100, H200)" in show("--format", "latex")
    assert show("--format", "json") == Path("1.json").read_text(encoding="utf-8")
    assert "flash/forward" not in show("--kernels", "fp8*")
    lines = list(csv.DictReader(io.StringIO(show("--format", "csv"))))
    assert len(lines) == len(audits.audits)
    skipped, amd = lines[1], lines[4]
    assert (skipped["target"], skipped["skipped"], skipped["products"]) == ("sm_80", "no fp8 there", "")
    assert (amd["triton"], amd["cards"], amd["logarithm"], amd["separate"]) == ("3.9.0", "MI300", "", "7")
    assert amd["products"] == "mfma k8 bf16*bf16 -> f32 | mfma k8 f16*f16 -> f32"


def test_the_page_has_a_table_a_kernel_with_a_row_a_target(audits: Audits) -> None:
    html = page([], [], [], [KIND.page({Path("audit.json"): audits})])
    flash, fp8 = (
        [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]
        for table in re.findall('<table class="grid">(.*?)</table>', html)
    )
    assert [row[0] for row in flash[1:]] == ["sm_80 (A100)", "sm_90 (H100, H200)", "gfx942 (MI300)"]
    assert flash[3][1] == "mfma k8 bf16*bf16 -&gt; f32<br>mfma k8 f16*f16 -&gt; f32"
    assert [len(row) for row in flash] == [len(flash[0])] * 4
    assert fp8[1] == ["sm_80 (A100)", *["skip"] * (len(flash[0]) - 1)]
    assert "<p>skipped sm_80 fp8/forward: no fp8 there</p>" in html
    assert "<p>Compiled by Triton 3.9.0 and read from the assembly. Nothing in it ran on a GPU.<br>" in html
    for mark in ('id="findings"', 'id="map"', 'id="pooled"', 'id="all"', "<script"):
        assert mark not in html, "a page of an audit alone has nothing of runs"


def test_a_page_of_runs_and_audits_has_both_whatever_their_order(audits: Audits, telling: Run, tiebreak: Call) -> None:
    newer = replace(audits, triton="4.0.0")
    for order in ([telling, audits, newer], [telling], [audits, newer]):
        assert tiebreak("page", *order, "-o", "page").code == 0
        html = Path("page", "index.html").read_text(encoding="utf-8")
        both = audits in order
        assert ("Made-up 9000" in html) == (telling in order)
        assert re.findall("<h3>(.*?)</h3>", html) == (["Triton 3.9.0", "Triton 4.0.0"] if both else [])
        assert ('id="audit"' in html) == ("Compiled by Triton" in html) == both
    # Of the audits alone: the first of each file is open.
    assert html.count("<details open>") == 2
    assert re.findall("<summary>(.*?)</summary>", html) == 2 * ["flash/forward", "fp8/forward"]


AUDIT = "an audit of compiled kernels: tiebreak show, page and audit --expect take it\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare RUN AUDIT", f"2.json: {AUDIT}"),
        ("gate AUDIT RUN", f"1.json: {AUDIT}"),
        ("gate new.json AUDIT --update-baseline", f"2.json: {AUDIT}"),
        ("page AUDIT AUDIT -o new.json", "2.json: the same as in 1.json; give each once\n"),
        ("page RUN AUDIT RUN -o new.json", "3.json: the same as in 1.json; give each once\n"),
        ("show AUDIT --cases tied*", "--cases: 1.json is an audit of compiled kernels; --kernels alone narrows it\n"),
        ("show AUDIT --kernels nope", "--kernels: unknown kernel 'nope': known are flash/forward, fp8/forward\n"),
    ],
)
def test_verbs_of_runs_say_what_an_audit_is_and_what_it_does_not_have_is_refused(
    words: str, message: str, audits: Audits, telling: Run, tiebreak: Call
) -> None:
    verb, *rest = words.split()
    run = replace(telling, run="b" * 32)
    told = tiebreak(verb, *({"AUDIT": audits, "RUN": run}.get(word, word) for word in rest))
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"tiebreak {verb}: {message}")
    assert told.err.count("\n") == 1
    assert not Path("new.json").exists()
