"""`tiebreak audit`: exit codes and words. The compiler is a stand-in; others test the real one."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from tiebreak.laboratory.audit import command
from tiebreak.laboratory.audit.compiling import NotCompiledError, Target
from tiebreak.reports import cli
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.store import UnreadableRecordsError

CAST, FP8 = "cvt.rn.bf16x2.f32 %r1, %r2, %r3;", "cvt.rn.satfinite.e4m3x2.f32 %rs1, %r2, %r3;"


class Compiler:
    """Compiles every kernel to its text; refuses what is in `refused`."""

    def __init__(self) -> None:
        self.texts = {"flash/forward": CAST, "fp8/forward": FP8}
        self.refused = {("sm_80", "fp8/forward")}

    def sources(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name) for name in self.texts]

    def compile_for(self, target: Target, kernel: SimpleNamespace) -> str:
        if (target.name, kernel.name) in self.refused:
            raise NotCompiledError("no fp8 there")
        return self.texts[kernel.name]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    made = Compiler()
    monkeypatch.setattr(command, "sources", made.sources)
    monkeypatch.setattr(command, "compile_for", made.compile_for)
    monkeypatch.setattr(command, "installed", lambda: "3.9.0")
    monkeypatch.setattr(command, "unavailable", lambda: None)
    return made


@pytest.fixture
def expectation(compiler: Compiler, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    path = tmp_path / "audit.json"
    assert command.main(["--targets", "sm_80,sm_90", "--expect", str(path), "--update"]) == 0
    capsys.readouterr()
    return path


def test_without_an_expectation_it_only_shows(compiler: Compiler, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--targets", "sm_80,sm_90"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "1/4 sm_80 flash/forward: read",
        "2/4 sm_80 fp8/forward: skipped: no fp8 there",
        "3/4 sm_90 flash/forward: read",
        "4/4 sm_90 fp8/forward: read",
    ]
    assert "cvt.rn.satfinite.e4m3x2.f32" in out
    assert "skipped sm_80 fp8/forward: no fp8 there" in out


def test_what_is_as_expected_holds_and_what_was_not_compared_is_told(
    expectation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(["--targets", "sm_80,sm_90", "--expect", str(expectation)]) == 0
    out = capsys.readouterr().out
    assert f"audit passed: 3 kernels compared with {expectation}, 1 skipped, 0 differences" in out
    assert "note" not in out
    monkeypatch.setattr(command, "installed", lambda: "4.0.0")
    assert command.main(["--targets", "sm_90", "--kernels", "fp8*", "--expect", str(expectation)]) == 0
    out = capsys.readouterr().out
    assert f"audit passed: 1 kernel compared with {expectation}, 0 skipped, 0 differences" in out
    assert f"note    {expectation} is of triton 3.9.0, this is 4.0.0" in out
    assert f"note    3 kernels of {expectation} were not selected" in out


@pytest.mark.parametrize(
    ("texts", "refused", "lines"),
    [
        (
            {"flash/forward": CAST.replace(".rn", ".rz"), "fp8/forward": FP8},
            set(),
            ["sm_90 flash/forward: output_casts: was cvt.rn.bf16x2.f32, is cvt.rz.bf16x2.f32"],
        ),
        (
            {"flash/forward": CAST, "fp8/forward": FP8},
            {("sm_90", "flash/forward")},
            ["sm_90 flash/forward: skipped: was no, is no fp8 there"],
        ),
        (
            {"flash/forward": CAST, "standard/output": FP8},
            set(),
            ["sm_90 fp8/forward: expected, but not compiled", "sm_90 standard/output: not in the expectation"],
        ),
    ],
)
def test_what_changed_fails(
    compiler: Compiler, expectation: Path, capsys: pytest.CaptureFixture[str],
    texts: dict[str, str], refused: set[tuple[str, str]], lines: list[str],
) -> None:  # fmt: skip
    compiler.texts, compiler.refused = texts, refused
    assert command.main(["--targets", "sm_90", "--expect", str(expectation)]) == 1
    out = capsys.readouterr().out
    assert "audit FAILED" in out
    assert [line.removeprefix("changed ") for line in out.splitlines() if line.startswith("changed ")] == lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--targets sm_75", "--targets: unknown target 'sm_75': did you mean sm_80 or "),
        ("--kernels flush", "--kernels: unknown kernel 'flush': did you mean flash/forward?"),
        ("--update", "--update: name the file to write with --expect FILE"),
        ("--targets sm_90 --expect audit.json --update", "audit.json: not updated: it has sm_80 flash/forward"),
        ("--expect none.json", "none.json: No such file"),
    ],
)
def test_bad_usage_is_refused_before_anything_is_compiled(
    expectation: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    before = expectation.read_bytes()
    monkeypatch.chdir(expectation.parent)
    with pytest.raises((UsageError, UnreadableRecordsError)) as refused:
        command.main(arguments.split())
    assert str(refused.value).startswith(message)
    assert capsys.readouterr() == ("", "")
    assert expectation.read_bytes() == before


def test_an_update_judges_nothing_and_is_shown_again_as_it_was(
    compiler: Compiler, expectation: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiler.texts["flash/forward"] = CAST.replace(".rn", ".rz")
    assert command.main(["--targets", "sm_*", "--expect", str(expectation), "--update"]) == 0  # of more targets, too
    shown = capsys.readouterr().out
    assert "FAILED" not in shown
    assert "cvt.rz.bf16x2.f32" in expectation.read_text()
    assert shown.endswith(f"expectation written: {expectation}\n")
    assert cli.main(["show", str(expectation)]) == 0
    assert capsys.readouterr().out == shown.removesuffix(f"expectation written: {expectation}\n")


def test_without_a_compiler_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "unavailable", lambda: "triton is not installed")
    with pytest.raises(UsageError, match=r"^nothing can be compiled here: triton is not installed$"):
        command.main([])
