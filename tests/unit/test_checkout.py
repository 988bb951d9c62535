"""conftest.py at the top: the tests of a checkout test that checkout, wherever pytest is called from."""

import os
import shutil
from pathlib import Path

import pytest

import tiebreak.kernels

HERE = Path(tiebreak.kernels.__file__).resolve().parents[1]
TEST = "def test_it() -> None: ...\n"


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Another clone, which nobody has installed: its settings, its conftest.py, and one test."""
    folder = tmp_path / "clone"
    (folder / "tests").mkdir(parents=True)
    for name in ("pyproject.toml", "conftest.py"):
        shutil.copy(HERE / name, folder)
    (folder / "tests" / "test_it.py").write_text(TEST)
    return folder


@pytest.mark.parametrize(("inside", "workers"), [(True, "0"), (False, "1")])
def test_a_clone_that_is_not_what_is_imported_is_refused(
    clone: Path, pytester: pytest.Pytester, inside: bool, workers: str
) -> None:
    """From its own folder and from another, before the plug-in of the other version looks at the options."""
    os.chdir(clone if inside else clone.parent)
    words = (str(clone / "tests"), "-p", "no:cacheprovider", "-n", workers, "--cases", "no_such_case")
    refused = pytester.runpytest_inprocess(*words, no_reraise_ctrlc=True)
    assert refused.ret == 2
    (line,) = (line for line in (*refused.outlines, *refused.errlines) if line)
    assert line == (
        f"Exit: tests of {clone}, but `import tiebreak` finds {HERE}: use this checkout's environment (make venv), or"
        f" install it: pip install -e {clone}"
    )
