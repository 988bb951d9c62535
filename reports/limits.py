"""How much worse a cell may get before the gate falls: by default, by pyproject.toml, by the flag, which wins."""

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split


@dataclass(frozen=True)
class Limits:
    """The thresholds of the gate."""

    bias: float = 0.02  # ulp that |bias| may grow beyond both intervals
    max: float = 1.0  # ulp that the largest error may grow; both this and `share` have to be passed to fall
    share: float = 0.10  # share of itself that the largest error may grow


def limits(flag: str | None, folder: Path) -> Limits:
    """The limits in force.

    Args:
        flag: the words of `--fail`, such as "bias:0.02,max:1"; None without it.
        folder: where to look for a pyproject.toml, there or in the nearest folder above.

    Raises:
        UsageError: an unknown name or a value that is no number of at least 0, in the flag or in the file.
    """
    return _with(_from_file(folder), _pairs(flag or ""), "--fail")


def _pairs(text: str) -> dict[str, Any]:
    pairs = {}
    for word in split(text):
        name, _, value = word.partition(":")
        try:
            pairs[name] = float(value)
        except ValueError:
            raise UsageError(f"--fail: {word!r}: expected NAME:NUMBER, such as bias:0.02,max:1") from None
    return pairs


def _from_file(folder: Path) -> Limits:
    here = folder.resolve()
    path = next((at / "pyproject.toml" for at in (here, *here.parents) if (at / "pyproject.toml").is_file()), None)
    if path is None:
        return Limits()
    try:
        tool = tomllib.loads(path.read_text(encoding="utf-8")).get("tool", {})
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from error
    table = tool.get("tiebreak", {}) if isinstance(tool, Mapping) else None
    if not isinstance(table, Mapping) or set(table) - {"fail"} or not isinstance(table.get("fail", {}), Mapping):
        raise UsageError(f"{path}: [tool.tiebreak]: expected a table fail = {{ bias = 0.02, max = 1 }} and no more")
    return _with(Limits(), table.get("fail", {}), f"{path}: [tool.tiebreak.fail]")


def _with(base: Limits, pairs: Mapping[str, Any], where: str) -> Limits:
    known = [field.name for field in fields(Limits)]
    for name, value in pairs.items():
        if name not in known:
            raise UsageError(f"{where}: unknown limit {name!r}: known are {', '.join(known)}")
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise UsageError(f"{where}: {name}: expected a number of at least 0, found {value!r}")
    return replace(base, **{name: float(value) for name, value in pairs.items()})
