"""Shipped code can be read by a stranger: a class name stands for one class, and docstrings are no headless clauses."""

import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).parents[2]
MOST = {"Of": 0, "What": 10, "Whether": 10}  # docstrings that may begin with a word that needs a verb before it
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
SHIPPED = ("backends", "cases", "kernels", "reports", "tests/matrix", "tests/programs")


def sources() -> dict[str, str]:
    """Return the text of every shipped module, by its path in the checkout."""
    paths = [path for folder in SHIPPED for path in sorted((CHECKOUT / folder).rglob("*.py"))]
    return {path.relative_to(CHECKOUT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def ambiguous_classes(texts: dict[str, str]) -> Iterator[str]:
    """Yield a line for every class name that several classes of these sources have."""
    places = defaultdict(list)
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    yield from (f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1)


def headless(texts: dict[str, str]) -> Iterator[str]:
    """Yield a line for every word that begins more docstrings of these sources than it may."""
    nodes = (node for text in texts.values() for node in ast.walk(ast.parse(text)) if isinstance(node, _DOCUMENTED))
    first = Counter(text.split()[0] for node in nodes if (text := ast.get_docstring(node)))
    yield from (
        f"{word}: {first[word]} docstrings, at most {most}" for word, most in MOST.items() if first[word] > most
    )


@pytest.fixture(scope="module")
def shipped() -> dict[str, str]:
    texts = sources()
    assert len(texts) > 150, "the sources were not found"
    return texts


def test_a_class_name_stands_for_one_class(shipped: dict[str, str]) -> None:
    assert list(ambiguous_classes(shipped)) == []


def test_two_classes_of_one_name_are_found() -> None:
    texts = {"a.py": "class Call:\n    pass\n", "b.py": "def f():\n    class Call:\n        pass\n"}
    assert list(ambiguous_classes(texts)) == ["Call: a.py:1, b.py:2"]


def test_few_docstrings_lack_a_verb(shipped: dict[str, str]) -> None:
    assert list(headless(shipped)) == []


def test_docstrings_without_a_verb_are_found() -> None:
    texts = {
        "a.py": '"""Of a module."""\n' + 'def f():\n    """What it does."""\n' * 11 + 'class A:\n    """Whether."""\n'
    }
    assert list(headless(texts)) == ["Of: 1 docstrings, at most 0", "What: 11 docstrings, at most 10"]
