import io
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tiebreak.defects.made_up import Call
from tiebreak.laboratory.audit.records import Audits
from tiebreak.reports import cli, terminal
from tiebreak.reports.records.record import Run

Keep = Callable[[Run, str], Path]


def test_the_version_is_the_package_s(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"tiebreak {version('tiebreak')}\n"


VERBS = [tuple(name.split(".")) for name in cli.verbs()]
GROUPS = {words[0] for words in VERBS if len(words) > 1}


@pytest.mark.parametrize("words", [*VERBS, ("statement", "--verify")], ids=" ".join)
def test_every_verb_has_help(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*words, "--help"]) == 0
    assert f"usage: tiebreak {' '.join(words)}" in capsys.readouterr().out


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None
from tiebreak.reports import cli
for words in sys.argv[1:]:
    print(words, cli.main([*words.split(), "--help"]))
"""


def test_a_verb_without_torch_says_so_in_one_line_and_those_of_records_need_none() -> None:
    verbs = [" ".join(words) for words in VERBS]
    done = subprocess.run([sys.executable, "-c", WITHOUT_TORCH, *verbs], capture_output=True, text=True, check=True)
    codes = dict(line.rpartition(" ")[::2] for line in done.stdout.splitlines() if line.rpartition(" ")[0] in verbs)
    lacking = [name for name in verbs if codes[name] == "2"]
    assert {"check", "identify", "pair", "shrink", "lab train"} <= set(lacking)
    assert not {"show", "compare", "gate", "page", "schema"} & set(lacking)
    wanted = [f"tiebreak {name}: needs PyTorch, which is not installed: pip install torch" for name in lacking]
    assert done.stderr.splitlines() == wanted


@pytest.mark.parametrize("name", ["", *sorted(GROUPS)])
def test_help_says_what_there_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([name] if name else ["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    verbs = dict.fromkeys(words[-1] if name else words[0] for words in VERBS if not name or words[0] == name)
    assert [line.split()[0] for line in lines if line.startswith("  ")] == list(verbs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "tiebreak: a verb is missing: known are check, show, compare, gate, audit"),
        ("shew", "tiebreak: unknown verb 'shew': known are check, show, compare, gate"),
        ("list case", "tiebreak list: unknown verb 'case': known are backends, cases, kernels, plans"),
        ("show", "tiebreak show: the following arguments are required: FILE"),
        ("show none.json", "tiebreak show: none.json: No such file or directory"),
        ("show none.json --format xml", "tiebreak show: argument --format: invalid choice: 'xml'"),
        ("compare none.json", "tiebreak compare: one file alone has nothing to compare with"),
        ("gate a.json b.json --fail bias", "tiebreak gate: --fail: 'bias': expected NAME:NUMBER"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(words: str, message: str, tiebreak: Call, tmp_path: Path) -> None:
    told = tiebreak(*words.split())
    assert (told.code, told.out, told.err.count("\n")) == (2, "", 1)
    assert told.err.startswith(message)
    assert list(tmp_path.iterdir()) == []


def test_the_command_loads_neither_torch_nor_numpy(telling: Run, audits: Audits, keep: Callable[..., Path]) -> None:
    path, other, audit = (str(keep(data, name)) for data, name in ((telling, "a"), (telling, "b"), (audits, "c")))
    page = ["page", path, audit, "-o", str(Path(path).parent / "p")]
    calls = [["show", path], ["show", audit], ["compare", path, other], ["gate", path, other], page]
    script = (
        "import sys; from tiebreak.reports.cli import main; main(['--help'])\n"
        "assert not {'tiebreak.reports.tables.show', 'tabulate'} & set(sys.modules)\n"
        f"codes = [main(call) for call in {calls}]\n"
        "heavy = {'torch', 'numpy', 'pytest', 'jsonschema'} & set(sys.modules)\n"
        "sys.exit(f'{codes} {heavy}' if heavy or any(codes) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_reader_that_has_had_enough_changes_no_exit_code(telling: Run, keep: Keep) -> None:
    path, failed = keep(telling, "a"), keep(replace(telling, records=()), "b")
    command = [sys.executable, "-m", "tiebreak.reports.cli", "gate", str(path), str(failed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == cli.FAILED


@pytest.mark.parametrize(
    ("tty", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colours_only_on_a_terminal_that_wants_them(
    tty: bool, environment: dict[str, str], expected: bool, telling: Run, tiebreak: Call, monkeypatch: Any
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
    out = tiebreak("show", telling).out
    assert ("\033[31m!+0.23 B!\033[0m" in out) is expected
    assert ("\033" in out) is expected


def test_progress_without_a_terminal_is_a_line_a_minute_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    for moment, text in {5: "a", 64: "b", 65: "c", 66: "d", 124: "e", 126: "f", 200: ""}.items():
        monkeypatch.setattr(terminal, "monotonic", lambda moment=moment: float(moment))
        terminal.say(text, stream)
    assert stream.getvalue() == "c\nf\n"


def test_control_characters_of_a_file_do_not_reach_the_terminal() -> None:
    assert terminal.clean("a\x1b[31m\x9b\r\nb ±") == "a\\x1b[31m\\x9b\\r\nb ±"
