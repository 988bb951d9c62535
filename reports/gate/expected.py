"""Expectations of a run: cells known to fail, each with a reason, and how much worse a measure may get.

    [[expected]]
    cells = "cpu-sdpa_flash-*"        # ids of cells; a glob
    check = "claim"                   # the one that failed; or `plan`, of which the gate accepts another
    reason = "its exponential misses 1 at 0: https://..."
    expires = 2027-06-30              # the last day on which it excuses anything; without it, it always does

An excuse holds for the checks that it names and for no other. One that excuses nothing any more is an error, and so is
one that has expired.
"""

import sys
import tomllib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, Any, TypeVar

from msgspec import Meta
from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.consistency import damaged
from tiebreak.reports.names import matching, split
from tiebreak.reports.records.decode import Data, FieldError, convert
from tiebreak.reports.records.record import SKIPPED, MeasureRecord, Record, Run

PLAN = "plan"  # instead of a check: the gate accepts another declared plan than the baseline's
Limit = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
_SHARE = "_share"  # behind a measure's name: how much worse it may get as a share of itself
_T = TypeVar("_T")


class Expected(Data, frozen=True):
    """A check that some cells don't meet, and why that is excused."""

    cells: str  # pattern of ids
    check: str  # that they do not meet
    reason: str  # why that is accepted
    expires: date | None = None  # the last day on which it holds; None: it always does
    where: str = ""  # file and number, for messages

    def concerns(self, cell: str) -> bool:
        """Return whether a cell, by its id, is among its cells."""
        return bool(matching(self.cells, [cell]))

    @property
    def is_expired(self) -> bool:
        """True if its last day has passed."""
        return self.expires is not None and self.expires < date.today()

    def excuses(self, record: Record) -> bool:
        """Return whether the check is one that a record does not meet."""
        return self.concerns(record.id) and self.check in record.not_passed


class _File(Data, frozen=True):
    expected: tuple[Expected, ...] = ()


class _Settings(Data, frozen=True):
    """The table [tool.tiebreak] of a pyproject.toml."""

    fail: Mapping[str, Limit] = {}  # how much worse measures may get, as --fail
    expected: tuple[Expected, ...] = ()  # excused failures, as in the file of --expected


def toml(path: Path, kind: type[_T], where: str, table: tuple[str, ...] = ()) -> _T:
    """Read a table of a TOML file, empty if it has none; UsageError: no file (says `where`), or a wrong field."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, no UTF-8
        raise UsageError(f"{where}: {' '.join(str(error).split())}") from error
    try:
        for name in table:
            content = convert(content.get(name, {}), dict[str, Any], name)
        read: _T = convert(content, kind, ".".join(table))
    except FieldError as error:
        raise UsageError(f"{path}: {error}") from error
    return read


def _settings(folder: Path) -> tuple[Path, _Settings]:
    """Return the pyproject.toml in a folder or in the nearest one above, and its table, which is empty without one."""
    here = folder.resolve()
    for path in (each / "pyproject.toml" for each in (here, *here.parents)):
        if path.is_file():
            return path, toml(path, _Settings, str(path), ("tool", "tiebreak"))
    return here / "pyproject.toml", _Settings()


def read(flag: str | None, folder: Path, checks: Collection[str] | None) -> tuple[Expected, ...]:
    """Return the entries of the file that `--expected` names, or of [tool.tiebreak] in the nearest pyproject.toml.

    The pyproject.toml is in the folder or above. Raises UsageError: an entry is wrong, or has expired. `checks` are the
    names of all that there are; None: they are not known here.
    """
    if flag is not None:
        entries = of_file(Path(flag), f"--expected {flag}", checks)
    else:
        project, table = _settings(folder)
        entries = _checked(table.expected, f"{project}: tool.tiebreak", checks)
    for entry in entries:
        if entry.is_expired:
            raise UsageError(f"{entry.where}.expires: {entry.expires} has passed: remove the entry, or renew it")
    return entries


def of_file(path: Path, where: str, checks: Collection[str] | None) -> tuple[Expected, ...]:
    """Return the entries of a file, those that have expired too; UsageError for a field that is wrong, or no file."""
    return _checked(toml(path, _File, where).expected, str(path), checks)


def _checked(entries: Iterable[Expected], file: str, checks: Collection[str] | None) -> tuple[Expected, ...]:
    checked = []
    for number, entry in enumerate(entries):
        where = f"{file}: expected[{number}]"
        for name in ("cells", "check", "reason"):
            if not getattr(entry, name).strip():
                raise UsageError(f"{where}.{name}: expected some text")
        if checks is not None and entry.check not in (*checks, PLAN):
            raise UsageError(f"{where}.check: unknown check {entry.check!r}: known are {', '.join(checks)}")
        checked.append(replace(entry, reason=" ".join(entry.reason.split()), where=where))
    return tuple(checked)


def check_used(entries: Iterable[Expected], cells: Collection[str], unavailable: Collection[str]) -> None:
    """Raise UsageError for an entry about no cell of a whole run, unless its backend can't run here but elsewhere."""
    for entry in entries:
        ends = (at for at, sign in enumerate(entry.cells) if sign == "-")  # of a backend's name, which may have one
        elsewhere = any(matching(entry.cells[:end], unavailable) for end in ends)
        if not elsewhere and not any(entry.concerns(cell) for cell in cells):
            raise UsageError(f"{entry.where}.cells: {entry.cells!r} is about none of the {len(cells)} cells: remove it")


@dataclass(frozen=True)
class Excuses:
    """The excused failures of a run."""

    entries: Sequence[Expected] = ()
    before: Mapping[tuple[str, str], str] | None = None  # (cell, check) that the baseline has too -> why

    def excuse(self, record: Record) -> Record:
        """Return the record, excused if all that it does not meet is."""
        reasons = [self._reason(record.id, check) for check in record.not_passed]
        if not reasons or None in reasons:
            return record
        return replace(record, excused="; ".join(dict.fromkeys(filter(None, reasons))))

    def _reason(self, cell: str, check: str) -> str | None:
        reasons = (entry.reason for entry in self.entries if entry.check == check and entry.concerns(cell))
        return next(reasons, (self.before or {}).get((cell, check)))

    def stale(self, records: Iterable[Record], *, whole: bool) -> list[str]:
        """Return the entries that excuse nothing in a run although some of their cells ran, a line each.

        In a part of a run a pattern may excuse nothing: only entries that name one cell are judged then.
        """
        ran = [record for record in records if record.outcome != SKIPPED]
        lines = []
        for entry in (entry for entry in self.entries if entry.check != PLAN):  # which the gate knows of
            mine = [record for record in ran if (entry.concerns(record.id) if whole else entry.cells == record.id)]
            # A crashed cell was asked nothing else.
            mine = [record for record in mine if record.shown is not None or entry.check in record.answers]
            if mine and not any(entry.check in record.not_passed for record in mine):
                who = f"{mine[0].id} meets" if len(mine) == 1 else f"all {len(mine)} cells meet"
                lines.append(f"{entry.where}: no longer fails: {who} the check {entry.check}: remove the entry")
        return lines


def of_baseline(run: Run, path: Path) -> dict[tuple[str, str], str]:
    """Return what a baseline's consistent records do not meet either, which is excused in a compared run."""
    edited = {name for name, _ in damaged(run)}
    sound = (record for record in run.records if record.id not in edited)
    return {(record.id, check): f"so it is in {path}" for record in sound for check in record.not_passed}


@dataclass(frozen=True)
class Limits:
    """The limits of how much worse measures may get that the command line or a file sets."""

    given: Mapping[str, float] = field(default_factory=dict)  # by measure, in its unit, or with _SHARE, of itself
    places: Mapping[str, str] = field(default_factory=dict)  # where each was given, for a message

    def held_to(self, name: str, measure: MeasureRecord) -> MeasureRecord:
        """Return a measure's description with the limits in force."""
        limit, share = self.given.get(name, measure.limit), self.given.get(name + _SHARE, measure.share)
        return replace(measure, limit=limit, share=share)

    def check(self, measures: Mapping[str, MeasureRecord]) -> None:
        """Raise UsageError, with the measures that a gate limits, if a named measure is none of them."""
        held = [name for name, measure in measures.items() if measure.worse is not None]
        for name, where in self.places.items():
            if name not in held and name.removesuffix(_SHARE) not in held:
                known_ones = f"{', '.join(held)}, each also NAME{_SHARE}"
                raise UsageError(f"{where}: unknown limit {name!r}: known are {known_ones}")


def limits(flag: str | None, folder: Path) -> Limits:
    """Return the limits in force; a value that is no number of at least 0 is a UsageError.

    `flag` has the words of `--fail`, such as "bias:0.02,max_ulps:1"; a pyproject.toml is in the folder or above.
    """
    path, table = _settings(folder)
    words = [word.partition(":") for word in split(flag or "")]
    try:
        values = convert({name: float(value) for name, _, value in words}, dict[str, Limit])
    except FieldError as error:
        raise UsageError(f"--fail: {error}") from None
    except ValueError:
        raise UsageError(f"--fail: {flag!r}: expected NAME:NUMBER, ...") from None
    places = dict.fromkeys(table.fail, f"{path}: [tool.tiebreak.fail]") | dict.fromkeys(values, "--fail")
    return Limits({**table.fail, **values}, places)
