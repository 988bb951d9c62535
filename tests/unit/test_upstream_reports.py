"""docs/reports: each script shows what its report says, with the package that it is about, and the change mends it.

Packages are looked for in this environment and in the folders of unpacked wheels in TIEBREAK_SOURCES. Another version
than the report's is tried too: the reason of its skip says whether it is cured.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path

import numpy as np
import pytest
import torch

from tiebreak.cases.feature_cases import EVERY
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.laboratory.findings import KnownFinding, installed, known_findings
from tiebreak.matrix.checks import checks
from tiebreak.matrix.questions.usage import QUESTIONS

FOLDER = Path(__file__).parents[2] / "docs" / "reports"
REPORTS = {each.id: each for each in known_findings() if each.script}
CHANGED = sorted(name for name, report in REPORTS.items() if report.changes)
FINDINGS = (FOLDER.parent / "findings.md").read_text(encoding="utf-8")
ARM = "arm-bf16-sums"
WITHOUT_AVX2 = {"ATEN_CPU_CAPABILITY": "default"}
COMMAND = re.compile(r"^(\d+)(?:,(\d+))?([ac])\n((?:.*\n)*?)\.\n", re.MULTILINE)  # of ed, as `diff -e` writes it


def root_and_version(package: str) -> tuple[str, str]:
    """Where a package is and which it is; the test is skipped where there is none."""
    found = next(installed(package), None)
    if found is None:
        pytest.skip(f"{package} is not installed: pip install --no-deps {package}")
    return found


def run(name: str, path: str, more: Mapping[str, str] = WITHOUT_AVX2) -> subprocess.CompletedProcess[str]:
    script = FOLDER / REPORTS[name].script
    environment = {**os.environ, **more, "PYTHONPATH": path}
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, env=environment)
    if "pack_vnni2 is only supported" in done.stderr:
        pytest.skip("PyTorch packs for this CPU's AMX whatever ATEN_CPU_CAPABILITY says")
    assert done.returncode in (0, 1), done.stderr
    assert not done.stderr.startswith("Traceback"), done.stderr
    return done


def mended(text: str, script: str) -> str:
    """A file with an ed script applied: from its end to its beginning, so that line numbers hold."""
    lines = text.splitlines(keepends=True)
    for first, last, verb, new in COMMAND.findall(script):
        start = int(first) if verb == "a" else int(first) - 1
        lines[start : int(last or first)] = new.splitlines(keepends=True)
    return "".join(lines)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"[-+]?\d+(?:\.\d+)?(?:e[-+]\d+)?", text)]


def decimals(number: str) -> int:
    return len(number.partition(".")[2])


def shown(name: str) -> str:
    """What the report says that its script prints."""
    page = (FOLDER / name / "README.md").read_text(encoding="utf-8")
    block = re.search(r"```text\n(.*?)```", page, re.DOTALL)
    assert block is not None, name
    return block[1]


def refuse_another_machine(report: KnownFinding) -> None:
    if report.machine not in ("", platform.machine()):
        pytest.skip(f"it happens on {report.machine}")
    if report.compiles and not os.environ.get("TIEBREAK_COMPILE"):
        pytest.skip("it compiles C++: TIEBREAK_COMPILE=1 runs it")


@pytest.mark.parametrize("name", sorted(REPORTS))
def test_script_prints_what_its_report_says(name: str) -> None:
    report = REPORTS[name]
    refuse_another_machine(report)
    if name.startswith("pytorch-cpu") and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("it happens with AVX2 alone")
    root, version = root_and_version(report.package)
    done = run(name, root, {})
    if version != report.version:
        cured = "still does it" if done.returncode else "is cured: docs/findings.md should say so"
        pytest.skip(f"the report is about {report.version}; {report.package} {version} {cured}")
    if name == ARM:
        pytest.skip(f"its table is of emulated processors; on this one the script ends with {done.returncode}")
    assert done.returncode == 1, done.stdout
    assert re.sub(r"\d", "", done.stdout) == re.sub(r"\d", "", shown(name))
    assert numbers(done.stdout) == pytest.approx(numbers(shown(name)), rel=0.02)


@pytest.mark.parametrize("name", CHANGED)
def test_change_of_a_few_lines_mends_it(name: str, tmp_path: Path) -> None:
    report = REPORTS[name]
    root, version = root_and_version(report.package)
    if version != report.version:
        pytest.skip(f"the change is one of {report.version}, not of {version}")
    top = next(iter(report.changes)).partition("/")[0]
    shutil.copytree(Path(root, top), tmp_path / top, ignore=shutil.ignore_patterns("__pycache__"))
    for file, change in report.changes.items():
        script = (FOLDER / name / change).read_text(encoding="utf-8")
        (tmp_path / file).write_text(mended((tmp_path / file).read_text(encoding="utf-8"), script), encoding="utf-8")
    done = run(name, f"{tmp_path}{os.pathsep}{root}", {})
    assert done.returncode == 0, done.stdout


def test_exponential_without_avx2_is_right() -> None:
    done = run("pytorch-cpu-exp", "")
    assert done.returncode == 0, done.stdout


def test_constants_of_the_exponential_are_as_good_as_the_report_says() -> None:
    page = (FOLDER / "pytorch-cpu-exp" / "README.md").read_text(encoding="utf-8")
    fraction = np.linspace(0, 1, 20_001)
    for said in ("now", "mended"):
        row = next(line for line in page.splitlines() if line.startswith(f"| {said} |")).split("|")[2:-1]
        y = fraction - np.polyval([float(cell) for cell in row[3::-1]], fraction)
        relative = 2.0 ** np.floor(y) * (1 + y - np.floor(y)) / 2.0**fraction - 1
        assert 1 + relative[0] == pytest.approx(eval(row[4]), abs=1e-7)
        assert np.abs(relative).max() == pytest.approx(float(row[5]), rel=2e-3)


def test_every_report_is_in_the_list_and_among_the_findings() -> None:
    assert {path.parent.name for path in FOLDER.glob("*/README.md")} == set(REPORTS)
    assert set(re.findall(r"\(reports/([\w-]+)/README\.md\)", FINDINGS)) == set(REPORTS)


def test_how_large_a_finding_is_stands_in_its_report() -> None:
    linked = [row for row in FINDINGS.splitlines() if "](reports/" in row]
    assert len(linked) >= len(REPORTS)
    for row in linked:
        cells = row.split("|")
        (name,) = re.findall(r"reports/([\w-]+)/", row)
        report = (FOLDER / name / "README.md").read_text(encoding="utf-8")
        for number in re.findall(r"[-+]?\d[\d,]*(?:\.\d+)?", re.sub(r"\([0-9a-f]{7}\)", "", cells[2])):
            rounded = any(float(number.replace(",", "")) == round(each, decimals(number)) for each in numbers(report))
            assert number in report or rounded, (name, number)


def test_what_guards_a_finding_exists() -> None:
    guards = {case.name for case in EVERY} | set(SNIPPETS) | {question.name for question in QUESTIONS} | set(checks())
    rows = [line.split("|")[1:-1] for line in FINDINGS.splitlines() if line.startswith("| ")]
    cells = [row[4] for row in rows if len(row) == 6]
    assert len(cells) > 25
    for name in {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}:
        assert any(fnmatch(guard, f"{name}*") for guard in guards), name


def test_changes_are_applied_as_ed_applies_them() -> None:
    assert mended("1\n2\n3\n4\n", "4a\nfive\n.\n2,3c\ntwo\nthree\n.\n1c\none\n.\n") == "one\ntwo\nthree\n4\nfive\n"
