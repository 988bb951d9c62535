"""What goes wrong with a kernel that someone else wrote, and where."""

import sysconfig
import traceback
from pathlib import Path

# Where code stands that is not a user's: Python's own, other packages', and the suite's.
_SUITE = (str(Path(__file__).parents[2] / name) for name in ("kernels", "backends", "cases", "reports", "tests"))
_NOT_THEIRS = ("<", *_SUITE, *sysconfig.get_paths().values())


class LoadError(ValueError):
    """The kernel can't be found, imported or called as it is; one line."""


def is_users(file: str) -> bool:
    """Whether code in a file is neither installed nor the suite's."""
    return not file.startswith(_NOT_THEIRS)


def place_of(error: BaseException, file: str | None = None) -> str:
    """Where something was raised, behind a space: ` (k.py, line 3)`; empty where no line is known.

    Args:
        error: what was raised.
        file: the deepest line of this file, or where there is none the deepest of all; None: the deepest line that is
            neither installed nor the suite's.
    """
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if frame.filename == file]
    outside = [frame for frame in frames if is_users(frame.filename)]
    chosen = (outside if file is None else own or frames)[-1:]
    return "".join(f" ({Path(frame.filename).name}, line {frame.lineno})" for frame in chosen)
