"""What a TOML file says to the gate: which failures are excused, and how much worse a measure may get."""

import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import matching, split
from tiebreak.reports.records.decode import Data, FieldError, convert
from tiebreak.reports.records.record import MeasureRecord, Record

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
        """Whether a cell, by its id, is among its cells."""
        return bool(matching(self.cells, [cell]))

    def expired(self, today: date) -> bool:
        """Whether its last day has passed."""
        return self.expires is not None and self.expires < today

    def excuses(self, record: Record) -> bool:
        """Whether the check is one that a record does not meet."""
        return self.concerns(record.id) and self.check in record.unmet


class Settings(Data, frozen=True):
    """The table [tool.tiebreak] of a pyproject.toml."""

    fail: Mapping[str, Limit] = {}  # how much worse measures may get, as --fail
    expected: tuple[Expected, ...] = ()  # excused failures, as in the file of --expected


class _Tool(msgspec.Struct, frozen=True):
    tiebreak: Settings = Settings()


class _Project(msgspec.Struct, frozen=True):
    tool: _Tool = _Tool()


def toml(path: Path, kind: type[_T], where: str) -> _T:
    """Read a TOML file; raise UsageError if there is none (begins with `where`), or with a field that is wrong."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, no UTF-8
        raise UsageError(f"{where}: {' '.join(str(error).split())}") from error
    try:
        read: _T = convert(content, kind)
    except FieldError as error:
        raise UsageError(f"{path}: {error}") from error
    return read


def settings(folder: Path) -> tuple[Path, Settings]:
    """Return the pyproject.toml in a folder or in the nearest one above, and its table, which is empty without one."""
    here = folder.resolve()
    for path in (each / "pyproject.toml" for each in (here, *here.parents)):
        if path.is_file():
            return path, toml(path, _Project, str(path)).tool.tiebreak
    return here / "pyproject.toml", Settings()


@dataclass(frozen=True)
class Limits:
    """How much worse measures may get, where the command line or a file says otherwise than the measures do."""

    given: Mapping[str, float] = field(default_factory=dict)  # by measure, in its unit, or with _SHARE, of itself
    places: Mapping[str, str] = field(default_factory=dict)  # where each was given, for a message

    def held_to(self, name: str, measure: MeasureRecord) -> MeasureRecord:
        """A measure's description with the limits in force."""
        limit, share = self.given.get(name, measure.limit), self.given.get(name + _SHARE, measure.share)
        return replace(measure, limit=limit, share=share)

    def check(self, known: Mapping[str, MeasureRecord]) -> None:
        """Raise UsageError, with those that a gate holds, if a measure that is named is none of them."""
        held = [name for name, measure in known.items() if measure.worse is not None]
        for name, where in self.places.items():
            if name not in held and name.removesuffix(_SHARE) not in held:
                raise UsageError(
                    f"{where}: unknown limit {name!r}: known are {', '.join(held)}, each also NAME{_SHARE}"
                )


def limits(flag: str | None, folder: Path) -> Limits:
    """Return the limits in force; a value that is no number of at least 0 is a UsageError.

    Args:
        flag: the words of `--fail`, such as "bias:0.02,max_ulps:1"; None without it.
        folder: where to look for a pyproject.toml, there or in the nearest folder above.
    """
    path, table = settings(folder)
    words = [word.partition(":") for word in split(flag or "")]
    try:
        asked = convert({name: float(value) for name, _, value in words}, dict[str, Limit])
    except FieldError as error:
        raise UsageError(f"--fail: {error}") from None
    except ValueError:
        raise UsageError(f"--fail: {flag!r}: expected NAME:NUMBER, ...") from None
    places = dict.fromkeys(table.fail, f"{path}: [tool.tiebreak.fail]") | dict.fromkeys(asked, "--fail")
    return Limits({**table.fail, **asked}, places)
