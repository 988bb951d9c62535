"""What did not hold, as GitHub shows it beside the lines of the kernel's file."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiebreak.reports.gate.gate import Outcome
from tiebreak.reports.records.record import Run

_MOST = 10  # that GitHub takes of one step
_AT = re.compile(r"\((\S+), line (\d+)\)")  # of a reason that says where the kernel raised

Place = tuple[str, int]  # a file and a line


def annotations(run: Run, outcome: Outcome | None, places: Mapping[str, Place]) -> list[str]:
    """Workflow commands: an error a cell that fails the run, or that the gate found worse.

    Args:
        run: the records.
        outcome: what the gate found; None: there was none.
        places: by kernel, where its function stands.
    """
    errors = {record.id: (record.case, record.outcome, record.reasons, record.kernel)
              for record in run.records if record.fails}  # fmt: skip
    for change in outcome.worse if outcome is not None else ():
        record = change.record
        errors.setdefault(record.id, (record.case, "worse than in the baseline", (change.text,), record.kernel))
    lines = [
        _error(f"{case}: {what}", "; ".join(reasons), _place(places.get(kernel), reasons))
        for case, what, reasons, kernel in errors.values()
    ]
    more = len(lines) - _MOST
    return lines if more <= 0 else [*lines[: _MOST - 1], _error(f"{more + 1} more cells", "see the summary", None)]


def _place(place: Place | None, reasons: Sequence[str]) -> Place | None:
    """Return the line that raised, where a reason names one of the kernel's own file; else the function's."""
    if place is None:
        return None
    file, line = place
    named = (found for reason in reasons for found in _AT.findall(reason))
    return file, next((int(at) for name, at in named if name == Path(file).name), line)


def _error(title: str, text: str, place: Place | None) -> str:
    where = {"title": title} | ({} if place is None else {"file": place[0], "line": str(place[1])})
    properties = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in where.items())
    return f"::error {properties}::{_escaped(text)}"


def _escaped(text: str, separators: str = "") -> str:
    """Return the text as a workflow command takes it: a record may not begin a command of its own."""
    return "".join(f"%{ord(letter):02X}" if letter in f"%\r\n{separators}" else letter for letter in text)
