"""Audits as tables: on the terminal, on the page and by the verbs that take files of either kind."""

import csv
import io
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import tiebreak.reports
from tiebreak.reports.audit.record import Audits
from tiebreak.reports.audit.tables import HEADERS, LEGEND, audit_tables
from tiebreak.reports.cli import main
from tiebreak.reports.page.command import page
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables.grids import text as as_text

Keep = Callable[[Run, str], Path]
KeepAudits = Callable[[Audits, str], Path]
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


def test_show_takes_an_audit_in_every_format(
    audits: Audits, keep_audits: KeepAudits, capsys: pytest.CaptureFixture[str]
) -> None:
    path = keep_audits(audits, "audit")

    def show(*arguments: str) -> str:
        assert main(["show", str(path), *arguments]) == 0
        return capsys.readouterr().out

    assert set(rows(show())) == {"sm_80 (A100)", "sm_90 (H100, H200)", "gfx942 (MI300)"}
    github = show("--format", "github")
    assert "| sm_90 (H100, H200) |" in github
    assert "-> f32" in github
    assert r"sm\_90 (H100, H200)" in show("--format", "latex")
    assert show("--format", "json") == path.read_text(encoding="utf-8")
    assert "flash/forward" not in show("--kernels", "fp8*")
    (path.parent / "again.json").write_text(show("--format", "json", "--kernels", "fp8*"), encoding="utf-8")
    assert {record.kernel for record in store.load(path.parent / "again.json", Audits).audits} == {"fp8/forward"}


def test_csv_has_a_line_a_target_and_kernel(
    audits: Audits, keep_audits: KeepAudits, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(keep_audits(audits, "audit")), "--format", "csv"]) == 0
    lines = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
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


def test_the_command_makes_a_page_of_runs_and_audits_whatever_their_order_and_names(
    audits: Audits, telling: Run, keep: Keep, keep_audits: KeepAudits, tmp_path: Path
) -> None:
    run, kept = keep(telling, "audit"), keep_audits(audits, "run")
    newer = keep_audits(replace(audits, triton="4.0.0"), "newer")
    for order in ([run, kept, newer], [kept, newer, run]):
        assert main(["page", *map(str, order), "-o", str(tmp_path / "page")]) == 0
        html = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
        assert "Made-up 9000" in html
        assert re.findall("<h3>(.*?)</h3>", html) == ["Triton 3.9.0", "Triton 4.0.0"]
        assert html.count("<details open>") == 2  # the first of each file
        assert summaries(html)[1:5] == 2 * ["flash/forward", "fp8/forward"]  # after the key's


def test_the_same_audit_or_run_twice_is_refused(
    audits: Audits,
    telling: Run,
    keep: Keep,
    keep_audits: KeepAudits,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, two, run = keep_audits(audits, "one"), keep_audits(audits, "two"), keep(telling, "run")
    output = ["-o", str(tmp_path / "page")]
    assert main(["page", str(one), str(two), *output]) == 2
    assert f"{two}: the same as in {one}" in capsys.readouterr().err
    assert main(["page", str(run), str(one), str(run), *output]) == 2
    assert f"{run}: the same as in {run}" in capsys.readouterr().err
    assert not (tmp_path / "page").exists()


@pytest.mark.parametrize(
    "arguments",
    [
        ["compare", "RUN", "AUDIT"],
        ["gate", "AUDIT", "RUN"],
        ["gate", "new.json", "AUDIT", "--update-baseline"],
    ],
)
def test_verbs_of_runs_say_what_an_audit_is_and_which_take_it(
    arguments: list[str],
    audits: Audits,
    telling: Run,
    keep: Keep,
    keep_audits: KeepAudits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"AUDIT": keep_audits(audits, "a"), "RUN": keep(telling, "b")}
    assert main([str(files.get(word, word)) for word in arguments]) == 2
    out, err = capsys.readouterr()
    message = "an audit of compiled kernels: tiebreak show, page and audit --expect take it"
    assert (out, err) == ("", f"tiebreak {arguments[0]}: {files['AUDIT']}: {message}\n")
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["show", "AUDIT", "--cases", "tied*"], "--cases: AUDIT is an audit of compiled kernels; --kernels alone"),
        (["show", "AUDIT", "--backend", "cpu"], "--backend: AUDIT is an audit"),
        (["show", "AUDIT", "--only", "fell"], "--only: AUDIT is an audit"),
        (["show", "AUDIT", "--kernels", "nope"], "--kernels: unknown kernel 'nope': known are flash/forward, fp8/"),
    ],
)
def test_what_an_audit_does_not_have_is_refused(
    arguments: list[str],
    message: str,
    audits: Audits,
    keep_audits: KeepAudits,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    path = keep_audits(audits, "a")
    assert main([str(path) if word == "AUDIT" else word for word in arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"tiebreak {arguments[0]}: {message.replace('AUDIT', str(path))}")
    assert err.count("\n") == 1
    assert not (tmp_path / "page").exists()


def test_a_file_that_has_both_is_no_audit(telling: Run, keep: Keep) -> None:
    plain = {**json.loads(keep(telling, "a").read_text()), "audits": []}
    with pytest.raises(store.UnreadableRecordsError, match="a: an audit of compiled kernels"):
        store.parse(json.dumps(plain).encode(), Path("a"))


def test_the_committed_audit_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(COMMITTED)]) == 0
    assert "gfx950 (MI350)" in capsys.readouterr().out
    assert main(["page", str(COMMITTED), "-o", str(tmp_path)]) == 0
    kept = store.load(COMMITTED, Audits)
    shown = tables((tmp_path / "index.html").read_text(encoding="utf-8"))
    assert [len(rows) for rows in shown] == [1 + len(kept.cards)] * len(kept.kernels)
