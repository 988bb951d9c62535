"""`tiebreak findings`: what it says of packages that are installed, by scripts that are made up here."""

from pathlib import Path

import pytest

from tiebreak.laboratory import findings
from tiebreak.laboratory.findings import KnownFinding, known_findings
from tiebreak.reports.cli import main
from tiebreak.reports.errors import UsageError

SCRIPTS = {
    "present": "print('off by 3'); raise SystemExit(1)",
    "absent": "print('as it should be')",
    "broken": "import nothing_of_this_name",
    "killed": "import os; os.abort()",
}


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        KnownFinding(
            name, "Wrong", f"**{name}: a thing**: 1.0, `k.py:3`", mended="one line", package="pytest", version="1"
        )
        for name in SCRIPTS
    ]
    rows += [
        KnownFinding("elsewhere", "Wrong", "a", package="pytest", version="1", machine="vax"),
        KnownFinding("lacking", "Wrong", "a", package="no-such-package", version="1"),
        KnownFinding("unasked", "Wrong", "a"),
    ]
    for row in rows[:-1]:
        (tmp_path / f"{row.id}.py").write_text(SCRIPTS.get(row.id, ""))
        object.__setattr__(row, "script", f"{row.id}.py")
    monkeypatch.setattr(findings, "known_findings", lambda: rows)
    monkeypatch.setattr(findings, "REPORTS", tmp_path)


@pytest.mark.usefixtures("known")
def test_each_state_is_told_with_its_reason(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    states = {
        line[15:39].strip(): line[:15].strip()
        for line in lines
        if line[:1].strip() and line[15:39].strip() in [*SCRIPTS, "elsewhere", "lacking"]
    }
    assert states == {
        "present": "present",
        "broken": "undecided",
        "killed": "undecided",
        "absent": "absent",
        "elsewhere": "absent",
        "lacking": "not installed",
    }
    text = "\n".join(lines)
    assert "(found in 1)" in lines[0]
    assert lines[0].endswith("present: a thing")
    assert [line.strip() for line in lines[1:3]] == ["off by 3", "mended by: one line"]
    assert "No module named 'nothing_of_this_name'" in text
    assert "it happens on vax alone" in text
    assert "pip install --no-deps no-such-package" in text
    assert lines[-1] == "docs/findings.md has 1 more finding, which no script asks for."


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(
    ("ids", "code"), [("present", 1), ("absent,lacking,elsewhere", 0), ("broken", 1), ("abs*,pres*", 1)]
)
def test_a_ci_fails_by_what_is_present_or_can_not_be_told(
    ids: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["findings", "absent", "--fail-if-present", ids]) == code
    assert ("FAILED" in capsys.readouterr().out) is bool(code)


@pytest.mark.usefixtures("known")
def test_an_unknown_name_is_bad_usage_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["findings", "--fail-if-present", "presant"]) == 2
    assert (
        capsys.readouterr().err
        == "tiebreak findings: --fail-if-present: unknown finding 'presant': did you mean present?\n"
    )
    with pytest.raises(UsageError, match="unknown finding 'unasked'"):
        findings.main(["unasked"])


def test_names_are_one_each_and_every_script_is_there() -> None:
    rows = known_findings()
    assert len({row.id for row in rows}) == len(rows) > 30
    folder = Path(__file__).parents[2] / "docs" / "reports"
    assert {row.script.partition("/")[0] for row in rows} - {""} == {
        path.parent.name for path in folder.glob("*/README.md")
    }
    for row in rows:
        assert not row.script or (row.package and row.version and (folder / row.script).is_file()), row.id
