"""Excused failures: cells that are known to fall, each with a reason, in a TOML file or in pyproject.toml.

    [[expected]]
    cells = "cpu-sdpa_flash-*"        # ids of cells; a glob
    check = "claim"                   # the one that is not met; or `plan`, of which the gate accepts another
    reason = "its exponential misses 1 at 0: https://..."
    expires = 2027-06-30              # the last day on which it excuses anything; without it, it always does

An excuse holds for the checks that it names and for no other. One that excuses nothing any more is an error, and so is
one that has expired. An entry that expires is what a statement calls a waiver (`tiebreak.reports.statement.folder`).
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.limits import settings, toml
from tiebreak.reports.names import matching
from tiebreak.reports.records.record import SKIPPED, Record, Run

_FIELDS = ("cells", "check", "reason")
PLAN = "plan"  # in the place of a check: the gate accepts another declared plan than the baseline's
_EXPIRES = "expires"  # a field that need not be there


@dataclass(frozen=True)
class Expected:
    """One entry: cells, the check that they don't meet, and why that is excused."""

    cells: str  # pattern of ids
    check: str  # name of the check
    reason: str
    where: str  # file and number of the entry, for messages
    expires: date | None = None  # the last day on which it holds; None: it always does

    def concerns(self, cell: str) -> bool:
        """Whether a cell, by its id, is among its cells."""
        return bool(matching(self.cells, [cell]))

    def expired(self, today: date) -> bool:
        """Whether its last day has passed."""
        return self.expires is not None and self.expires < today

    def excuses(self, record: Record) -> bool:
        """Whether the check is one that a record does not meet."""
        return self.concerns(record.id) and self.check in _unmet(record)


def read(
    flag: str | None, folder: Path, checks: Collection[str] | None, today: date | None = None
) -> tuple[Expected, ...]:
    """The entries of a file, or of [tool.tiebreak] in the pyproject.toml of a folder or of the nearest one above.

    Args:
        flag: what `--expected` names; None without it.
        folder: where to look for a pyproject.toml.
        checks: names of all checks that there are; None: they are not known here.
        today: the day on which the entries have to hold; the day of the call by default.

    Raises:
        UsageError: no such file, no TOML, a field that is missing, unknown, empty or of the wrong kind, an unknown
            check, an entry that has expired.
    """
    entries = _read(flag, folder, checks)
    for entry in entries:
        if entry.expired(today or date.today()):
            raise UsageError(f"{entry.where}.{_EXPIRES}: {entry.expires} has passed: remove the entry, or renew it")
    return entries


def _read(flag: str | None, folder: Path, checks: Collection[str] | None) -> tuple[Expected, ...]:
    if flag is not None:
        return _entries(toml(Path(flag), f"--expected {flag}"), flag, checks)
    file, table = settings(folder)
    value = table.get("expected", [])
    if isinstance(value, str):
        assert file is not None
        path = file.parent / value
        return _entries(toml(path, f"{file}: [tool.tiebreak]: expected = {value!r}"), str(path), checks)
    return _entries({"expected": value}, f"{file}: [tool.tiebreak]", checks)


def waivers(path: Path, checks: Collection[str]) -> tuple[Expected, ...]:
    """The entries of a file for a statement: each has to expire.

    Raises:
        UsageError: as `read`, but for entries that have expired; or one that never does.
    """
    entries = _entries(toml(path, f"--waivers {path}"), str(path), checks)
    for entry in entries:
        if entry.expires is None:
            raise UsageError(f"{entry.where}.{_EXPIRES}: missing: a waiver of a statement has a last day")
    return entries


def _entries(table: Mapping[str, Any], where: str, checks: Collection[str] | None) -> tuple[Expected, ...]:
    entries = table.get("expected", [])
    if set(table) - {"expected"} or not isinstance(entries, list):
        raise UsageError(
            f"{where}: expected tables [[expected]] with {', '.join(_FIELDS)}, perhaps {_EXPIRES}, and no more"
        )
    return tuple(_entry(entry, f"{where}: expected[{number}]", checks) for number, entry in enumerate(entries))


def _entry(plain: Any, where: str, checks: Collection[str] | None) -> Expected:
    if not isinstance(plain, dict) or set(plain) - {_EXPIRES} != set(_FIELDS):
        raise UsageError(f"{where}: expected the fields {', '.join(_FIELDS)}, perhaps {_EXPIRES}, and no other")
    for name in _FIELDS:
        if not isinstance(plain[name], str) or not plain[name].strip():
            raise UsageError(f"{where}.{name}: expected some text")
    if checks is not None and plain["check"] not in (*checks, PLAN):
        raise UsageError(f"{where}.check: unknown check {plain['check']!r}: known are {', '.join(checks)}")
    expires = plain.get(_EXPIRES)
    if expires is not None and (not isinstance(expires, date) or isinstance(expires, datetime)):
        raise UsageError(f"{where}.{_EXPIRES}: expected a day such as 2027-06-30, without quotes")
    return Expected(plain["cells"], plain["check"], " ".join(plain["reason"].split()), where, expires)


def check_used(entries: Iterable[Expected], cells: Collection[str], unavailable: Collection[str]) -> None:
    """Make sure that every entry is about some cell of a whole run, or of a backend that can't run here.

    One file may serve several machines.

    Raises:
        UsageError: one is about none.
    """
    for entry in entries:
        elsewhere = matching(entry.cells.partition("-")[0], unavailable)
        if not elsewhere and not any(entry.concerns(cell) for cell in cells):
            raise UsageError(f"{entry.where}.cells: {entry.cells!r} is about none of the {len(cells)} cells: remove it")


@dataclass(frozen=True)
class Excuses:
    """What is excused in a run."""

    entries: Sequence[Expected] = ()
    before: Mapping[tuple[str, str], str] | None = None  # (cell, check) that the baseline has too -> why

    def excuse(self, record: Record) -> Record:
        """The record, excused if all that it does not meet is."""
        fell = _unmet(record)
        reasons = [self._reason(record.id, check) for check in fell]
        if not fell or None in reasons:
            return record
        return replace(record, excused="; ".join(dict.fromkeys(reason for reason in reasons if reason)))

    def _reason(self, cell: str, check: str) -> str | None:
        reason = next((entry.reason for entry in self.entries if entry.check == check and entry.concerns(cell)), None)
        return reason if reason is not None else (self.before or {}).get((cell, check))

    def stale(self, records: Iterable[Record], *, whole: bool) -> list[str]:
        """The entries that excuse nothing in a run although some of their cells ran, a line each.

        Args:
            records: of the run.
            whole: whether all cells ran that an entry may be about. In a part of them a pattern may well excuse
                nothing: only entries that name one cell are judged.
        """
        ran = [record for record in records if record.outcome != SKIPPED]
        lines = []
        for entry in (entry for entry in self.entries if entry.check != PLAN):  # which the gate knows of
            mine = [record for record in ran if (entry.concerns(record.id) if whole else entry.cells == record.id)]
            # What crashed was asked nothing else.
            mine = [record for record in mine if record.shown is not None or entry.check in record.answers]
            if mine and not any(entry.check in _unmet(record) for record in mine):
                who = f"{mine[0].id} meets" if len(mine) == 1 else f"all {len(mine)} cells meet"
                lines.append(f"{entry.where}: no longer fails: {who} the check {entry.check}: remove the entry")
        return lines


def _unmet(record: Record) -> list[str]:
    return [name for name, answer in record.answers.items() if answer.met is not True]


def of_baseline(run: Run, path: Path) -> dict[tuple[str, str], str]:
    """What a baseline does not meet either, and so excuses in a run that is compared with it."""
    return {(record.id, check): f"so it is in {path}" for record in run.records for check in _unmet(record)}
