"""findings/: each script has the form by which anybody can run it. `make findings` runs them, with the network."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from tiebreak.laboratory import findings
from tiebreak.laboratory.findings import SURPRISES, surprises
from tiebreak.reports.cli import main

pytestmark = pytest.mark.quick

SCRIPTS = sorted(SURPRISES.glob("*.sh"))
FORM = re.compile(
    r"#!/usr/bin/env bash\n"
    r"# (?P<sentence>[^\n]*\d+\.\d+[^\n]*: [^\n]*)\n"
    r"(?:# [^\n]*\n)*# A guess was [^\n]*\n(?:# [^\n]*\n)*# Seen: [^\n]*\n(?:# [^\n]*\n)*"
    r"set -euo pipefail\n"
    r'folder="\$\(mktemp -d\)"\n'
    r"trap 'rm -rf \"\$folder\"' EXIT\n"
    r'"\$\{PYTHON:-python3\}" -m venv "\$folder/venv"\n'
    r'"\$folder/venv/bin/pip" install --quiet --no-compile --only-binary :all: (?P<pins>[^\n]*)\n'
    r"\"\$folder/venv/bin/python\" - <<'PYTHON'\n(?P<body>.*)PYTHON\n",
    re.DOTALL,
)


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) > 6


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_pins_what_it_installs_in_a_folder_of_its_own_and_asserts_what_it_says(path: Path) -> None:
    form = FORM.fullmatch(path.read_text(encoding="utf-8"))
    assert form is not None, "see the others: sentence with a version, guess, output, folder, pins, program"
    assert os.access(path, os.X_OK)
    assert all(re.fullmatch(r"[\w.-]+(?:\[\w+\])?==[\w.]+", pin.strip("'")) for pin in form["pins"].split())
    program = ast.parse(form["body"])
    assert any(isinstance(node, ast.Assert) for node in ast.walk(program))
    imported = {node.module for node in ast.walk(program) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(program) if isinstance(node, ast.Import) for name in node.names}
    assert not any((module or "").startswith("tiebreak") for module in imported)
    assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_the_command_names_them_and_runs_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(findings, "answer_of", lambda each: findings.ScriptAnswer(each, findings.State.ABSENT))
    assert main(["findings"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line[15:].split()[0] for line in lines if line.startswith("not asked")} == set(surprises())
