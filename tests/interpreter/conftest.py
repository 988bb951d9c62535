"""Kernels of a few lines, to be interpreted."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tiebreak.kernels.triton.compiling import not_interpreting

if (reason := not_interpreting()) is not None:
    pytest.skip(reason, allow_module_level=True)

import triton

from tiebreak.backends.interpreter.assumptions import EXACT, Assumptions
from tiebreak.backends.interpreter.session import interpreting

Launch = Callable[..., None]


@pytest.fixture
def launch() -> Launch:
    """Interprets one program of a function as a card would; before and after it Triton is upstream's."""

    def launched(function: Any, *args: object, card: Assumptions = EXACT, **constants: object) -> None:
        kernel = function if hasattr(function, "run") else triton.jit(function)
        with interpreting(card):
            kernel[(1,)](*args, **constants)

    return launched


FEW_LINES = Path(__file__).with_name("few_lines.py")


@pytest.fixture
def file(tmp_path: Path) -> Callable[..., str]:
    """A file with a Triton kernel, as a target: as it is, or with another exponential, or with something on top."""

    def written(exponential: str | None = None, names: str = "") -> str:
        text = FEW_LINES.read_text()
        usual = "tl.math.exp2(s - new[:, None])"
        assert usual in text
        text = text.replace(usual, exponential or usual).replace("import torch\n", f"import torch\n{names}\n", 1)
        path = tmp_path / "mine.py"
        path.write_text(text)
        return f"{path}:attention"

    return written
