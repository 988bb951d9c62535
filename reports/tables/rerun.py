"""Commands that a reader can paste: as they run where the reader stands."""

import os
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path

_PYTEST = "pytest"


def runnable(command: str) -> str:
    """Return a record's command as it runs in this environment: `pytest` where the shell finds this environment's."""
    words = command.split(" ", 1)
    return " ".join([_pytest(os.getcwd()), *words[1:]]) if words[0] == _PYTEST else command


@cache
def _pytest(folder: str) -> str:
    """Return how pytest is called from a folder: by name, or through this Python, which `make` leaves off the PATH."""
    shells = shutil.which(_PYTEST)
    own = Path(sys.executable).parent / _PYTEST
    if shells is not None and own.exists() and os.path.samefile(shells, own):
        return _PYTEST
    python = os.path.relpath(sys.executable, folder)
    shorter = python if not python.startswith("..") else sys.executable
    return f"{shlex.quote(shorter)} -m {_PYTEST}"
