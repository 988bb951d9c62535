"""Which records of a run are shown: by names, globs and outcome."""

import argparse
import fnmatch
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import OUTCOMES, Record


@dataclass(frozen=True)
class Selection:
    """Names on the command line: comma-separated, globs allowed; None selects all."""

    backend: str | None = None
    kernel: str | None = None
    case: str | None = None
    only: str | None = None  # an outcome

    def apply(self, records: Sequence[Record]) -> list[Record]:
        """The records that are selected.

        Raises:
            UsageError: a name fits no record.
        """
        chosen = list(records)
        for field in ("backend", "kernel", "case"):
            names = getattr(self, field)
            if names is not None:
                known = list(dict.fromkeys(getattr(record, field) for record in records))
                wanted = pick(field, names, known)
                chosen = [record for record in chosen if getattr(record, field) in wanted]
        return [record for record in chosen if self.only in (None, record.outcome)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The filters of `show` and `compare`."""
    for field in ("backend", "kernel", "case"):
        parser.add_argument(f"--{field}", metavar="NAMES", help=f"{field}s to show; a comma list, globs allowed")


def add_only(parser: argparse.ArgumentParser) -> None:
    """The filter by outcome."""
    parser.add_argument("--only", choices=OUTCOMES, help="show cells with this outcome alone")


def pick(kind: str, names: str, known: Sequence[str]) -> set[str]:
    """The known names that a comma list of names and globs selects.

    Raises:
        UsageError: a name fits none; lists the known ones.
    """
    found: set[str] = set()
    for name in split(names):
        fitting = matching(name, known)
        if not fitting:
            raise UsageError(f"--{kind}: unknown {kind} {name!r}: known are {', '.join(known)}")
        found.update(fitting)
    if not found:
        raise UsageError(f"--{kind}: no {kind} named: known are {', '.join(known)}")
    return found


def split(names: str) -> list[str]:
    """The names of a comma list."""
    return [name.strip() for name in names.split(",") if name.strip()]


def matching(name: str, known: Iterable[str]) -> list[str]:
    """Names that equal `name` or match it as a glob; brackets are part of a name, as in tied_maxima[k=2]."""
    pattern = name.replace("[", "[[]")
    return [candidate for candidate in known if candidate == name or fnmatch.fnmatchcase(candidate, pattern)]
