"""Excused failures: cells that are known to fall, each with a reason, in a TOML file or in pyproject.toml.

    [[expected]]
    cells = "cpu-sdpa_flash-*"        # ids of cells; a glob
    check = "claim"                   # the one that is not met; or `plan`, of which the gate accepts another
    reason = "its exponential misses 1 at 0: https://..."
    expires = 2027-06-30              # the last day on which it excuses anything; without it, it always does

An excuse holds for the checks that it names and for no other. One that excuses nothing any more is an error, and so is
one that has expired.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import settings
from tiebreak.reports.gate.settings import Expected
from tiebreak.reports.names import matching
from tiebreak.reports.records.decode import Data
from tiebreak.reports.records.record import SKIPPED, Record, Run

PLAN = "plan"  # in the place of a check: the gate accepts another declared plan than the baseline's


class _File(Data, frozen=True):
    expected: tuple[Expected, ...] = ()


def read(
    flag: str | None, folder: Path, checks: Collection[str] | None, today: date | None = None
) -> tuple[Expected, ...]:
    """Return the entries of the file that `--expected` names, or of [tool.tiebreak] in the nearest pyproject.toml.

    Args:
        flag: what `--expected` names; None without it.
        folder: where to look for a pyproject.toml, there or above.
        checks: names of all checks that there are; None: they are not known here.
        today: the day on which they have to hold, by default that of the call; else they are a UsageError.
    """
    if flag is not None:
        entries = of_file(Path(flag), f"--expected {flag}", checks)
    else:
        project, table = settings.settings(folder)
        entries = _checked(table.expected, f"{project}: tool.tiebreak", checks)
    for entry in entries:
        if entry.expired(today or date.today()):
            raise UsageError(f"{entry.where}.expires: {entry.expires} has passed: remove the entry, or renew it")
    return entries


def of_file(path: Path, where: str, checks: Collection[str] | None) -> tuple[Expected, ...]:
    """Return the entries of a file, those that have expired too; UsageError for a field that is wrong, or no file."""
    return _checked(settings.toml(path, _File, where).expected, str(path), checks)


def _checked(entries: Iterable[Expected], file: str, checks: Collection[str] | None) -> tuple[Expected, ...]:
    checked = []
    for number, entry in enumerate(entries):
        where = f"{file}: expected[{number}]"
        for field in ("cells", "check", "reason"):
            if not getattr(entry, field).strip():
                raise UsageError(f"{where}.{field}: expected some text")
        if checks is not None and entry.check not in (*checks, PLAN):
            raise UsageError(f"{where}.check: unknown check {entry.check!r}: known are {', '.join(checks)}")
        checked.append(replace(entry, reason=" ".join(entry.reason.split()), where=where))
    return tuple(checked)


def check_used(entries: Iterable[Expected], cells: Collection[str], unavailable: Collection[str]) -> None:
    """Raise UsageError for an entry about no cell of a whole run, unless its backend can't run here but elsewhere."""
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
        reasons = [self._reason(record.id, check) for check in record.unmet]
        if not reasons or None in reasons:
            return record
        return replace(record, excused="; ".join(dict.fromkeys(filter(None, reasons))))

    def _reason(self, cell: str, check: str) -> str | None:
        reason = next((entry.reason for entry in self.entries if entry.check == check and entry.concerns(cell)), None)
        return reason if reason is not None else (self.before or {}).get((cell, check))

    def stale(self, records: Iterable[Record], *, whole: bool) -> list[str]:
        """Return the entries that excuse nothing in a run although some of their cells ran, a line each.

        In a part of a whole run a pattern may well excuse nothing: only entries that name one cell are judged.
        """
        ran = [record for record in records if record.outcome != SKIPPED]
        lines = []
        for entry in (entry for entry in self.entries if entry.check != PLAN):  # which the gate knows of
            mine = [record for record in ran if (entry.concerns(record.id) if whole else entry.cells == record.id)]
            # What crashed was asked nothing else.
            mine = [record for record in mine if record.shown is not None or entry.check in record.answers]
            if mine and not any(entry.check in record.unmet for record in mine):
                who = f"{mine[0].id} meets" if len(mine) == 1 else f"all {len(mine)} cells meet"
                lines.append(f"{entry.where}: no longer fails: {who} the check {entry.check}: remove the entry")
        return lines


def of_baseline(run: Run, path: Path) -> dict[tuple[str, str], str]:
    """Return what a baseline does not meet either, and so excuses in a run that is compared with it."""
    return {(record.id, check): f"so it is in {path}" for record in run.records for check in record.unmet}
