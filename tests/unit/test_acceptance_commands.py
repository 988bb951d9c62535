"""`--rules` in a run, and `tiebreak rules`: what records, verdict and table say; the gate takes no notice."""

import base64
import gzip
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tiebreak.laboratory.acceptance import OF_GRADIENTS, RULES
from tiebreak.reports import cli
from tiebreak.reports.records import store
from tiebreak.reports.records.record import RuleAnswer
from tiebreak.reports.verdict import verdicts

MatrixRun = Callable[..., pytest.RunResult]
CELLS = ("--backend=emulation", "--kernels=flash@paper", "--cases=tied_maxima[k=2],random_causal", "--heads=32")


def test_records_verdict_table_and_page_say_what_rules_do_and_the_gate_takes_no_notice(
    matrix: MatrixRun, pytester: pytest.Pytester, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert matrix(*CELLS, "--rules", "--save", "asked").ret == 0
    asked = pytester.path / "out" / "asked.json"
    gated = matrix(*CELLS, "--baseline", str(asked))
    assert gated.ret == 0
    gated.stdout.fnmatch_lines(["gate passed: 2 cells compared with *asked.json: 0 regressions, 0 better"])
    plain, told = (store.read(path).records for path in (pytester.path / "out" / "last.json", asked))
    assert [record.digest for record in plain] == [record.digest for record in told]
    assert all("rules" not in record.evidence for record in plain)
    for record in told:
        assert "--rules" in record.command.split()
        said = record.evidence["rules"]
        assert {name.removesuffix(OF_GRADIENTS) for name in said} == RULES.keys()
        assert said["ascend_recheck"] == RuleAnswer(None, needs=said["ascend_recheck"].needs)
        assert "200 heads" in said["ascend_recheck"].needs
    tied = next(record for record in told if record.case == "tied_maxima[k=2]")
    assert tied.evidence["rules"]["signed_mean"].passed is False

    (verdict,) = verdicts(store.read(asked))
    (finding,) = [each for each in verdict.findings if each.name == "rules"]
    assert finding.text.startswith("passes ")
    assert "acceptance rules on every input; turned down by " in finding.text
    assert "signed_mean (tied_maxima[k=2])" in finding.text
    assert "ascend_recheck" not in finding.text, "it could not tell"

    capsys.readouterr()
    assert cli.main(["rules", str(asked), "--cases", "tied*"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line.split("  ")[-1].strip() for line in lines if "  " in line}
    assert rows["tiebreak"].endswith("B")
    assert rows["signed_mean"].endswith("FAILS")
    assert rows["flash_attention_2"] == "0.50"
    assert rows["ascend_recheck"] == "needs"
    assert any(line.startswith("ascend_recheck needs 200 heads and more") for line in lines)
    assert not any("random_causal" in line for line in lines)

    assert cli.main(["page", str(asked), "-o", str(tmp_path / "page")]) == 0
    page = (tmp_path / "page" / "index.html").read_text(encoding="utf-8")
    data = re.search(r'<script type="application/gzip" id="data">(.*?)</script>', page)
    assert data is not None
    page = gzip.decompress(base64.b64decode(data[1])).decode()
    assert re.search(r"passes \d+ of \d+ acceptance rules; turned down by [^\"]*signed_mean", page)


def test_the_list_has_formula_and_source_of_every_rule(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["rules"]) == 0
    printed = capsys.readouterr().out
    for name, rule in RULES.items():
        assert all(text in printed for text in (name, rule.formula, rule.source, rule.note))
    assert cli.main(["rules", "ascend_l*"]) == 0
    assert capsys.readouterr().out.count("commercial_standard.md") == 3


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["flash_atention_3"], "unknown rule 'flash_atention_3': did you mean flash_attention_2 or flash_attention_3?"),
        (["missing.json"], "missing.json"),
        (["vllm", "--cases", "random"], "--cases: it narrows what a file of records says; name one"),
        (["{unasked}"], "no rule was asked of its cells; run the matrix, or `tiebreak check`, with --rules"),
        (["{unasked}", "vllm"], "give one file of records alone"),
    ],
)
def test_what_it_cannot_make_sense_of_is_refused_in_a_line(
    words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unasked = Path(store.__file__).parents[1] / "baselines" / "emulation.json"
    assert cli.main(["rules", *(word.format(unasked=unasked) for word in words)]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
