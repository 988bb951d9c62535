"""Output on the terminal: its width, colours, commands to paste, no control characters from a record."""

import os
import re
import shlex
import shutil
import sys
from functools import cache
from pathlib import Path
from time import monotonic
from typing import TextIO

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.store import one_line, write_text

STDOUT = "-"  # instead of a file

_COLOURS = {"!": "31", "?": "33"}  # marks of cells that failed and that are not known yet: red, yellow
_MARKED = re.compile(r"([!?])(?! )[^!?\n]*?\1|^(?:failed|crashed|timed_out) .*$", re.MULTILINE)
_PYTEST = "pytest"
_EVERY = 60.0  # seconds at least between lines of progress in a log: services end a job that is silent for ten minutes
_told_at = dict[TextIO, float]()  # when the last was written, or the first could have been


def width() -> int:
    """Return columns of the terminal, or what COLUMNS says; 120 where there is none."""
    return shutil.get_terminal_size((120, 24)).columns


def clean(text: str) -> str:
    """Return the text with control characters but line ends spelled out: names in a file of records may carry some."""
    return "\n".join(map(one_line, text.split("\n")))


def show(text: str) -> None:
    """Print tables and lists, whose strings come from records.

    On a terminal that can, failures are red and undecided ones yellow, unless NO_COLOR is set (no-color.org).
    """
    text = clean(text)
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = _MARKED.sub(lambda match: f"\033[{_COLOURS.get(match[1], '31')}m{match[0]}\033[0m", text)
    print(text)


def say(text: str, stream: TextIO | None = None) -> None:
    """Write progress, to standard error by default: over a terminal's last line, else a line a minute at most."""
    stream, moment = stream or sys.stderr, monotonic()
    if stream.isatty():
        stream.write(f"\r{text:80.80}\r")
    elif text and moment >= _told_at.setdefault(stream, moment) + _EVERY:
        _told_at[stream] = moment
        print(text, file=stream)
    stream.flush()


def check_folders(**files: str | None) -> None:
    """Raise UsageError, before any work, if one of the files that flags name is in no folder."""
    for flag, file in files.items():
        if file not in (None, STDOUT) and not Path(file).parent.is_dir():
            raise UsageError(f"--{flag} {file}: there is no folder {Path(file).parent}")


def write(text: str, file: str | None) -> None:
    """Write a text to the file that a flag names, if it is given, or as it is to the terminal."""
    if file == STDOUT:
        sys.stdout.write(text)
    elif file is not None:
        write_text(text, Path(file))


def runnable(command: str) -> str:
    """Return a record's command as it runs in this environment: `pytest` where the shell finds this environment's."""
    words = command.split(" ", 1)
    return " ".join([_pytest(os.getcwd()), *words[1:]]) if words[0] == _PYTEST else command


@cache
def _pytest(folder: str) -> str:
    """Return how pytest is called from a folder: by name, or through this Python, which `make` leaves off the PATH."""
    shells = shutil.which(_PYTEST)
    executable = Path(sys.executable).parent / _PYTEST
    if shells is not None and executable.exists() and os.path.samefile(shells, executable):
        return _PYTEST
    python = os.path.relpath(sys.executable, folder)
    shorter = python if not python.startswith("..") else sys.executable
    return f"{shlex.quote(shorter)} -m {_PYTEST}"
