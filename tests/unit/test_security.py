"""What SECURITY.md says of reading files: nothing executes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tiebreak.kernels

HERE = Path(tiebreak.kernels.__file__).resolve().parents[1]
SOURCES = ("kernels", "backends", "cases", "reports", "tests/matrix", "tests/programs", "tests/laboratory")
EXECUTING = {
    *("eval", "exec", "compile", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"),
    *("joblib.load", "yaml.load", "yaml.unsafe_load", "os.system"),
}


#: What executes nothing with this keyword.
WITH = {"torch.load": "weights_only=True", "np.load": "allow_pickle=False", "numpy.load": "allow_pickle=False"}


def calls(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Every call by its dotted name, with its keywords."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {f"{word.arg}={ast.unparse(word.value)}" for word in node.keywords}


def test_reading_a_file_runs_nothing() -> None:
    found = [
        f"{path.relative_to(HERE)}: {name}"
        for folder in SOURCES
        for path in sorted((HERE / folder).rglob("*.py"))
        for name, keywords in calls(ast.parse(path.read_text(encoding="utf-8")))
        if name in EXECUTING or WITH.get(name, "") not in {"", *keywords}
    ]
    assert found == []


def test_its_page_names_the_limit_of_a_file_of_records() -> None:
    from tiebreak.reports.records.store import MAX_BYTES

    assert f"at most {MAX_BYTES // 2**20} MiB" in (HERE / "SECURITY.md").read_text(encoding="utf-8")
