"""How much worse a cell may get before the gate falls: as measures say, by pyproject.toml, by the flag, which wins."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.records.record import MeasureRecord

_SHARE = "_share"  # behind a measure's name: how much worse it may get as a share of itself


@dataclass(frozen=True)
class Limits:
    """How much worse measures may get, where the command line or a file says otherwise than the measures do."""

    given: Mapping[str, float] = field(default_factory=dict)  # by measure, in its unit, or with _SHARE, of itself
    places: Mapping[str, str] = field(default_factory=dict)  # where each was given, for a message

    def of(self, name: str, measure: MeasureRecord) -> MeasureRecord:
        """A measure's description with the limits in force."""
        limit, share = self.given.get(name, measure.limit), self.given.get(name + _SHARE, measure.share)
        return replace(measure, limit=limit, share=share)

    def check(self, known: Mapping[str, MeasureRecord]) -> None:
        """Make sure that every measure named is one that a gate holds.

        Raises:
            UsageError: one is not; lists those that are.
        """
        held = [name for name, measure in known.items() if measure.worse is not None]
        for name, where in self.places.items():
            if name not in held and name.removesuffix(_SHARE) not in held:
                raise UsageError(
                    f"{where}: unknown limit {name!r}: known are {', '.join(held)}, each also NAME{_SHARE}"
                )


def limits(flag: str | None, folder: Path) -> Limits:
    """The limits in force.

    Args:
        flag: the words of `--fail`, such as "bias:0.02,max_ulps:1"; None without it.
        folder: where to look for a pyproject.toml, there or in the nearest folder above.

    Raises:
        UsageError: a value that is no number of at least 0, in the flag or in the file.
    """
    path, table = settings(folder)
    given = table.get("fail", {})
    if not isinstance(given, Mapping):
        raise UsageError(f"{path}: [tool.tiebreak]: expected a table fail = {{ NAME = NUMBER, ... }}")
    return _with(_with(Limits(), given, f"{path}: [tool.tiebreak.fail]"), _pairs(flag or ""), "--fail")


def _pairs(text: str) -> dict[str, Any]:
    pairs = {}
    for word in split(text):
        name, _, value = word.partition(":")
        try:
            pairs[name] = float(value)
        except ValueError:
            raise UsageError(f"--fail: {word!r}: expected NAME:NUMBER") from None
    return pairs


def toml(path: Path, where: str) -> Mapping[str, Any]:
    """The content of a TOML file.

    Raises:
        UsageError: no such file, no TOML; begins with `where`.
    """
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}") from error
    except ValueError as error:  # no TOML, no UTF-8
        raise UsageError(f"{where}: {' '.join(str(error).split())}") from error


_TABLE = ("fail", "expected")  # what [tool.tiebreak] may have


def settings(folder: Path) -> tuple[Path | None, Mapping[str, Any]]:
    """The table [tool.tiebreak] of the pyproject.toml in a folder or in the nearest one above, and the file's path.

    Raises:
        UsageError: the file can't be read, or the table has what nothing here knows.
    """
    here = folder.resolve()
    path = next((at / "pyproject.toml" for at in (here, *here.parents) if (at / "pyproject.toml").is_file()), None)
    if path is None:
        return None, {}
    tool = toml(path, str(path)).get("tool", {})
    table = tool.get("tiebreak", {}) if isinstance(tool, Mapping) else None
    if not isinstance(table, Mapping) or set(table) - set(_TABLE):
        raise UsageError(f"{path}: [tool.tiebreak]: expected {' and '.join(_TABLE)} and no more")
    return path, table


def _with(base: Limits, pairs: Mapping[str, Any], where: str) -> Limits:
    for name, value in pairs.items():
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UsageError(f"{where}: {name}: expected a number of at least 0, found {value!r}")
    given = {name: float(value) for name, value in pairs.items()}
    return Limits({**base.given, **given}, {**base.places, **dict.fromkeys(given, where)})
