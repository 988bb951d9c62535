"""Nothing in reports/ knows a measure, a check, a case, a shift rule or a kind of experiment by name.

Every name that the suite has is looked for: where a string of a program is nothing but that name, it is known there.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiebreak.reports
from tiebreak.cases.gpt2.snippets import SNIPPETS
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.kernels.shift_rules import SHIFT_RULES
from tiebreak.matrix.checks import checks
from tiebreak.matrix.experiments import kinds
from tiebreak.reports.records import record

FOLDER = Path(tiebreak.reports.__file__).parent
_NESTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def known() -> dict[str, str]:
    """What every name is one of, without the words that records themselves are written in."""
    names = dict.fromkeys(checks(), "check") | dict.fromkeys(SHIFT_RULES, "shift rule")
    names |= dict.fromkeys((case.name for case in SCRIPTED), "case") | dict.fromkeys(SNIPPETS, "case")
    names |= dict.fromkeys(kinds(), "kind of experiment")
    names |= {name: "measure" for kind in kinds().values() for name in kind.measured}
    vocabulary = {value for name, value in vars(record).items() if name.isupper() and isinstance(value, str)}
    return {name: kind for name, kind in names.items() if name not in vocabulary}


def strings(path: Path) -> Iterator[tuple[int, str]]:
    """The strings of a program with their lines; of Python's, not those that document it."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".js":
        for number, line in enumerate(text.splitlines(), start=1):
            yield from ((number, found[1]) for found in re.findall(r"""(["'`])(.*?)\1""", line))
        return
    tree = ast.parse(text)
    documentation = {id(node.body[0].value) for node in ast.walk(tree)
                     if isinstance(node, _NESTED) and node.body and isinstance(node.body[0], ast.Expr)}  # fmt: skip
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.lineno, node.value


def findings(folder: Path) -> Iterator[str]:
    """Names in the programs of a folder, as they are told."""
    names = known()
    for path in sorted((*folder.rglob("*.py"), *folder.rglob("*.js"))):
        where = path.relative_to(folder).as_posix()
        yield from (f"{where}:{line}: {names[text]} {text!r}" for line, text in strings(path) if text in names)


def test_no_program_of_reports_has_a_name_of_the_others() -> None:
    assert list(findings(FOLDER)) == []


@pytest.mark.parametrize(
    ("file", "program"),
    [
        ("a.py", 'def f(record):\n    """The bias."""\n    return record.number("rms_ulps")\n'),
        ("deep/a.py", "def f(record):\n    return f\"{record.passed('repeatable')} of a run\"\n"),
        ("a.js", "const kind = cell.experiment === 'training';\n"),
    ],
    ids=["measure", "check", "kind"],
)
def test_a_name_is_found(file: str, program: str, tmp_path: Path) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(program, encoding="utf-8")
    assert len(list(findings(tmp_path))) == 1
