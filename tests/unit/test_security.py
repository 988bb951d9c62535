"""What SECURITY.md says of reading files: nothing executes."""

import ast
from collections.abc import Iterator
from pathlib import Path

import tiebreak.kernels

HERE = Path(tiebreak.kernels.__file__).resolve().parents[1]
SOURCES = ("kernels", "backends", "cases", "reports", "tests/matrix", "tests/programs", "tests/laboratory")
EXECUTING = {
    *("eval", "exec", "compile", "pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open"),
    *("joblib.load", "yaml.load", "yaml.unsafe_load", "np.load", "numpy.load", "os.system"),
}


def calls(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """Every call by its dotted name, with those of its keywords that are true."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            true = {word.arg for word in node.keywords if word.arg and ast.unparse(word.value) == "True"}
            yield ast.unparse(node.func), true


def test_reading_a_file_runs_nothing() -> None:
    found = [
        f"{path.relative_to(HERE)}: {name}"
        for folder in SOURCES
        for path in sorted((HERE / folder).rglob("*.py"))
        for name, true in calls(ast.parse(path.read_text(encoding="utf-8")))
        if name in EXECUTING or (name == "torch.load" and "weights_only" not in true)
    ]
    assert found == []


def test_its_page_names_the_limit_of_a_file_of_records() -> None:
    from tiebreak.reports.records.store import MAX_BYTES

    assert f"at most {MAX_BYTES // 2**20} MiB" in (HERE / "SECURITY.md").read_text(encoding="utf-8")
