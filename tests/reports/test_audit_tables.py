"""Audits as tables: on the terminal, on the page and by the verbs that take files of either kind."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

import tiebreak.reports
from tiebreak.defects.made_up import Call
from tiebreak.reports.audit.record import Audits
from tiebreak.reports.audit.tables import HEADERS, LEGEND, audit_tables
from tiebreak.reports.page.command import page
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables.grids import text as as_text

COMMITTED = Path(tiebreak.reports.__file__).parent / "baselines" / "audit.json"
EVIL = "</script><script>document.title='hacked'</script>&\"'<img src=x onerror=alert(1)>"


def table(audits: Audits, width: int | None = None) -> str:
    return as_text(audit_tables(audits), width=width)


def rows(text: str) -> dict[str, list[str]]:
    """By target, the texts of its row in a table for the terminal."""
    found = (re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if re.match(r"(sm_|gfx)\w+ \(", line))
    return {name: texts for name, *texts in found}


def tables(html: str) -> list[list[list[str]]]:
    """The cells of every table on a page, row by row."""
    return [
        [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in re.findall("<tr>(.*?)</tr>", table)]
        for table in re.findall('<table class="grid">(.*?)</table>', html)
    ]


def summaries(html: str) -> list[str]:
    return re.findall("<summary>(.*?)</summary>", html)


def test_the_table_has_a_row_a_target_and_says_what_was_skipped(audits: Audits) -> None:
    flash, fp8 = (table(replace(audits, audits=part)) for part in (audits.audits[::2], audits.audits[1::2]))
    assert rows(flash) == {
        "sm_80 (A100)": ["wgmma k16 bf16*bf16 -> f32", "cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32",
                         "ex2.approx.ftz.f32", "add", "none", "div.rn.f32", "none (0/7)", "ex2", "to even"],
        "sm_90 (H100, H200)": ["wgmma k16 bf16*bf16 -> f32", "cvt.rn.bf16x2.f32", "cvt.rn.bf16x2.f32",
                               "ex2.approx.ftz.f32", "add", "none", "div.rn.f32", "none (0/7)", "ex2", "to even"],
        "gfx942 (MI300)": ["mfma k8 bf16*bf16 -> f32, mfma k8 f16*f16 -> f32", "cvt.rn.bf16x2.f32",
                           "v_add3_u32 0x7fff + last bit", "ex2.approx.ftz.f32", "add", "none", "div.rn.f32",
                           "none (0/7)", "ex2", "to even"],
    }  # fmt: skip
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
    github = show("--format", "github")
    assert "| sm_90 (H100, H200) |" in github
    assert "-> f32" in github
    assert r"sm\_90 (H100, H200)" in show("--format", "latex")
    assert show("--format", "json") == Path("1.json").read_text(encoding="utf-8")
    assert "flash/forward" not in show("--kernels", "fp8*")
    Path("again.json").write_text(show("--format", "json", "--kernels", "fp8*"), encoding="utf-8")
    assert {record.kernel for record in store.load(Path("again.json"), Audits).audits} == {"fp8/forward"}


def test_csv_has_a_line_a_target_and_kernel(audits: Audits, tiebreak: Call) -> None:
    lines = list(csv.DictReader(io.StringIO(tiebreak("show", audits, "--format", "csv").out)))
    assert len(lines) == len(audits.audits)
    skipped, amd = lines[1], lines[4]
    assert (skipped["target"], skipped["skipped"], skipped["products"]) == ("sm_80", "no fp8 there", "")
    assert (amd["triton"], amd["cards"], amd["skipped"]) == ("3.9.0", "MI300", "")
    assert amd["products"] == "mfma k8 bf16*bf16 -> f32 | mfma k8 f16*f16 -> f32"
    assert (amd["logarithm"], amd["separate"]) == ("", "7")


def test_the_page_has_a_table_a_kernel_with_a_row_a_target(audits: Audits) -> None:
    html = page([], [], [], {"Triton 3.9.0": audits})
    assert summaries(html) == ["flash/forward", "fp8/forward"]
    flash, fp8 = tables(html)
    assert flash[0] == list(HEADERS)
    assert [row[0] for row in flash[1:]] == ["sm_80 (A100)", "sm_90 (H100, H200)", "gfx942 (MI300)"]
    assert flash[3][1] == "mfma k8 bf16*bf16 -&gt; f32<br>mfma k8 f16*f16 -&gt; f32"
    assert [len(row) for row in flash] == [len(HEADERS)] * 4
    assert fp8[1] == ["sm_80 (A100)", *["skip"] * (len(HEADERS) - 1)]
    assert "<p>skipped sm_80 fp8/forward: no fp8 there</p>" in html
    assert "<p>Compiled by Triton 3.9.0 and read from the assembly. Nothing in it ran on a GPU.<br>" in html


def test_a_page_of_an_audit_alone_has_nothing_of_runs_and_one_of_a_run_nothing_of_audits(
    audits: Audits, telling: Run
) -> None:
    alone, without = page([], [], [], {"a": audits}), page([telling], ["here"], [])
    both = page([telling], ["here"], [], {"a": audits})
    for mark in ('id="findings"', 'id="map"', 'id="pooled"', 'id="all"', "<script"):
        assert mark not in alone
        assert mark in without
        assert mark in both
    for mark in ('id="audit"', "Compiled by Triton"):
        assert mark in alone
        assert mark not in without
        assert mark in both


def test_the_command_makes_a_page_of_runs_and_audits_whatever_their_order(
    audits: Audits, telling: Run, tiebreak: Call
) -> None:
    newer = replace(audits, triton="4.0.0")
    for order in ([telling, audits, newer], [audits, newer, telling]):
        assert tiebreak("page", *order, "-o", "page").code == 0
        html = Path("page", "index.html").read_text(encoding="utf-8")
        assert "Made-up 9000" in html
        assert re.findall("<h3>(.*?)</h3>", html) == ["Triton 3.9.0", "Triton 4.0.0"]
        assert html.count("<details open>") == 2  # the first of each file
        assert summaries(html)[1:5] == 2 * ["flash/forward", "fp8/forward"]  # after the key's


def test_the_same_audit_or_run_twice_is_refused(audits: Audits, telling: Run, tiebreak: Call) -> None:
    told = tiebreak("page", audits, audits, "-o", "page")
    assert told == (2, "", "tiebreak page: 2.json: the same as in 1.json; give each once\n")
    same = replace(telling, run="b" * 32)
    told = tiebreak("page", same, audits, same, "-o", "page")
    assert told == (2, "", "tiebreak page: 3.json: the same as in 1.json; give each once\n")
    assert not Path("page").exists()


AUDIT = "an audit of compiled kernels: tiebreak show, page and audit --expect take it\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("compare RUN AUDIT", f"2.json: {AUDIT}"),
        ("gate AUDIT RUN", f"1.json: {AUDIT}"),
        ("gate new.json AUDIT --update-baseline", f"2.json: {AUDIT}"),
        ("show AUDIT --cases tied*", "--cases: 1.json is an audit of compiled kernels; --kernels alone narrows it\n"),
        ("show AUDIT --backend cpu", "--backend: 1.json is an audit"),
        ("show AUDIT --only fell", "--only: 1.json is an audit"),
        ("show AUDIT --kernels nope", "--kernels: unknown kernel 'nope': known are flash/forward, fp8/forward\n"),
    ],
)
def test_verbs_of_runs_say_what_an_audit_is_and_what_it_does_not_have_is_refused(
    words: str, message: str, audits: Audits, telling: Run, tiebreak: Call
) -> None:
    verb, *rest = words.split()
    told = tiebreak(verb, *({"AUDIT": audits, "RUN": telling}.get(word, word) for word in rest))
    assert (told.code, told.out) == (2, "")
    assert told.err.startswith(f"tiebreak {verb}: {message}")
    assert told.err.count("\n") == 1
    assert not Path("new.json").exists()


def test_a_file_that_has_both_is_no_audit(telling: Run) -> None:
    plain = {**json.loads(store.as_text(telling)), "audits": []}
    with pytest.raises(store.UnreadableRecordsError, match="a: an audit of compiled kernels"):
        store.parse(json.dumps(plain).encode(), Path("a"))


def test_the_committed_audit_is_shown(tiebreak: Call) -> None:
    assert "gfx950 (MI350)" in tiebreak("show", COMMITTED).out
    assert tiebreak("page", COMMITTED, "-o", ".").code == 0
    kept = store.load(COMMITTED, Audits)
    shown = tables(Path("index.html").read_text(encoding="utf-8"))
    assert [len(rows) for rows in shown] == [1 + len(kept.cards)] * len(kept.kernels)
