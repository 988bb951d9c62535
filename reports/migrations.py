"""Older schemas, brought up to date one version at a time.

1 -> 2: `run` tells runs apart; measures say whether the cell is `repeatable`; a traced case has a `histogram`, and its
`trace` is null where there is none.

2 -> 3: a record of a short training run has `training`.
"""

from collections.abc import Callable, Iterator
from typing import Any

from tiebreak.reports.records import SCHEMA


def upgrade(plain: dict[str, Any], schema: int) -> None:
    """Bring a file of an older schema up to date, in place; what is wrong with it is left for the reader to find.

    Args:
        plain: the whole file as JSON has it.
        schema: the version it was written in, 1 to the present one.
    """
    for version in range(schema, SCHEMA):
        _STEPS[version](plain)
    plain["schema"] = SCHEMA


def _to_2(plain: dict[str, Any]) -> None:
    plain.setdefault("run", None)
    for record in _records(plain):
        record["trace"] = record.get("trace") or None
        record.setdefault("histogram", None)
        if isinstance(measures := record.get("measures"), dict):
            measures.setdefault("repeatable", None)


def _to_3(plain: dict[str, Any]) -> None:
    for record in _records(plain):
        record.setdefault("training", None)


def _records(plain: dict[str, Any]) -> Iterator[dict[str, Any]]:
    found = plain.get("records")
    return (record for record in (found if isinstance(found, list) else ()) if isinstance(record, dict))


_STEPS: dict[int, Callable[[dict[str, Any]], None]] = {1: _to_2, 2: _to_3}
