"""Tables of docs/ between marks are what their makers make: whole where that is quick, elsewhere a row or a column."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.formats import BF16, FP8_E4M3, Formats
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.plans import Cast
from tiebreak.kernels.reference import reference
from tiebreak.studies import __main__ as command
from tiebreak.studies import bits, eight_bits, pages, rules
from tiebreak.studies.pages import PageTable, read_rows, renewed, write_rows

SLOW = {"fix", "truncation", rules.CASE}


def columns(page: str, source: str) -> dict[str, dict[str, str]]:
    """The columns of a table of a page by its head, each by the first cell of its rows."""
    marked = (pages.DOCS / page).read_text(encoding="utf-8").partition(f"<!-- from {source} -->")[2]
    lines = marked.partition("<!--")[0].strip().splitlines()
    (_, *heads), _, *rows = (line.strip("| ").split(" | ") for line in lines)
    return {head.strip("`"): {row[0]: row[place] for row in rows} for place, head in enumerate(heads, 1)}


@pytest.mark.parametrize(
    "table",
    [each for each in command.TABLES if each.source not in SLOW],
    ids=lambda each: f"{each.page}: {each.source}",
)
def test_a_table_is_what_its_maker_makes(table: PageTable) -> None:
    assert not table.is_stale(), f"python -m tiebreak.studies {table.page} renews it"


def test_a_table_stands_between_its_marks_and_nothing_else_changes() -> None:
    page = "before\n<!-- from a -->\nold\n<!-- end -->\nrest <!-- end -->\n"
    assert renewed(page, "a", ["new"]) == "before\n<!-- from a -->\n\nnew\n\n<!-- end -->\nrest <!-- end -->\n"
    with pytest.raises(ValueError, match="from b"):
        renewed(page, "b", ["new"])


def test_a_stale_table_is_named_then_renewed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pages, "DOCS", tmp_path)
    monkeypatch.setattr(command, "TABLES", [PageTable("a.md", "x", lambda: ["new"])])
    (tmp_path / "a.md").write_text("<!-- from x -->\n\nold\n\n<!-- end -->\n", encoding="utf-8")
    codes = [command.main(words) for words in (["--stale"], ["x"], ["--stale", "a.md"])]
    assert codes == [1, 0, 0]
    assert capsys.readouterr().out.splitlines() == ["stale: a.md, x", "stale: a.md, x", "as made: a.md, x"]
    with pytest.raises(SystemExit) as ended:
        command.main(["b.md"])
    assert ended.value.code == 2
    assert "unknown table 'b.md': known are a.md, x" in capsys.readouterr().err


def test_frozen_rows_come_back_with_the_commit_they_were_measured_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "commit", lambda: "0123456789")
    rows = read_rows(bits.CSV, bits.Row)[:2]
    write_rows(tmp_path / "a.csv", rows)
    assert read_rows(tmp_path / "a.csv", bits.Row) == rows
    assert pages.measured_at(tmp_path / "a.csv") == "`0123456`"


def agrees(column: dict[str, str]) -> bool:
    """Whether `signed_mean` fails a kernel where this suite calls it biased, and only there."""
    return column["this suite"].endswith("B") is column["`signed_mean`"].startswith("**")


def test_columns_of_rules_are_what_a_run_gives_and_a_signed_mean_agrees_with_this_suite() -> None:
    bench, told = rules.bench_of(rules.CASE, rules.HEADS), columns("rules.md", rules.CASE)
    assert tuple(told) == tuple(rules.KERNELS)
    assert rules.column(bench, "stabilized@paper") == told["stabilized@paper"]
    assert all(map(agrees, told.values()))


def test_a_column_of_fixes_in_8_bits_is_what_a_run_gives() -> None:
    name = "fp8_random"
    inputs = next(case for case in SCRIPTED if case.name == name).make(eight_bits.SEED, 0, eight_bits.HEADS, BF16)
    ref, column = reference(inputs).o, columns("fewer-bits.md", "fix")[name]
    assert {told: column[told] for told in eight_bits.FIX} == {
        told: eight_bits.fix_row(kernel, inputs, ref) for told, kernel in eight_bits.FIX.items()
    }


def test_e4m3_is_worse_than_e5m2_where_the_maximum_lags_and_better_after_the_change() -> None:
    """What users of FlashAttention-4 saw (flash-attention issue 2716), by the deviation of the logits."""
    keys, queries, d = 4096, 64, 128
    q, k, v = (
        x.clamp(-3, 3).to(torch.float8_e4m3fn).float()[None, None]
        for x in (eight_bits.normal(queries, d), eight_bits.normal(keys, d), eight_bits.normal(keys, d + 1)[:, 1:])
    )

    def errors(plan: str) -> Iterator[float]:
        for deviation in (0.25, 0.5, 1.0, 1.5, 2.0):
            formats, scale = Formats.of(BF16, v=FP8_E4M3), deviation / math.sqrt(d)
            inputs = AttentionInputs(q, k, v, torch.zeros_like(q), formats, softmax_scale=scale)
            plain = eight_bits.attend("flash@fused,base=2", inputs)
            yield float((eight_bits.attend(f"lazy_4@{plan},base=2", inputs) - plain).norm() / plain.norm())

    before, e5m2, after = map(list, map(errors, ("fused_fp8_offset", "fused_e5m2_offset", "fused_fp8_offset_4")))
    assert [one > other for one, other in zip(before, e5m2, strict=True)] == [False, False, True, True, True]
    assert all(one < 0.55 * other for one, other in zip(after, e5m2, strict=True))


@pytest.mark.parametrize("power", [0, 4, 8])
def test_where_a_sink_makes_half_of_the_others_0_is_the_closed_form_of_the_paper(power: int) -> None:
    """arXiv 2606.06521: with P-bar times 2^power, from a sink of 10 ln 2 + power ln 2 - delta_k on, within 5 %."""
    scores, places = eight_bits.normal(64, 4096), slice(0, 4)
    closed = (10 + power) * math.log(2) - scores[:, places].amax(-1).mean().item()

    def lost(height: float) -> float:
        s = scores.clone()
        s[:, places] += height
        p_bar = torch.exp(s - s.amax(-1, keepdim=True)) * 2.0**power
        low = eight_bits.ARITHMETIC.cast(p_bar, Cast(FP8_E4M3, saturates=True))
        return (low[:, places.stop :] == 0).float().mean().item()

    assert lost(0.975 * closed) < 0.5 <= lost(1.025 * closed)


def test_frozen_bits_are_whole_and_drawn() -> None:
    rows = read_rows(bits.CSV, bits.Row)
    wanted = [(fmt, case, kernel) for fmt in bits.FORMATS for case in bits.CASES for kernel in bits.KERNELS]
    assert [(row.format, row.case, row.kernel) for row in rows] == wanted
    assert bits.PICTURE.read_text(encoding="utf-8") == bits.picture(rows)


def test_frozen_bits_are_what_a_run_gives() -> None:
    frozen = {(row.format, row.case, row.kernel): row for row in read_rows(bits.CSV, bits.Row)}
    for row in bits.rows(bits.Task("fp8_e4m3", "tied_maxima[k=2]"), ("flash@paper", "flash@fused", "fair")):
        kept = frozen[row.format, row.case, row.kernel]
        assert row.verdict == kept.verdict
        for name in ("bias", "delta_bias", "coherence_excess"):
            assert getattr(row, name) == pytest.approx(getattr(kept, name), rel=1e-4)
