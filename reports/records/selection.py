"""Which records of a run are shown: by names, globs and outcome."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import matching, none_named, split, unknown
from tiebreak.reports.records.record import OUTCOMES, Record

# Flag, named as pytest's own, and the field of a record that it filters by.
_FILTERS = {"backend": "backend", "kernels": "kernel", "cases": "case"}


@dataclass(frozen=True)
class Selection:
    """Names on the command line: comma-separated, globs allowed; None selects all."""

    backend: str | None = None
    kernels: str | None = None
    cases: str | None = None
    only: str | None = None  # an outcome

    def apply(self, records: Sequence[Record]) -> list[Record]:
        """The records that are selected.

        Raises:
            UsageError: a name fits no record.
        """
        chosen = list(records)
        for flag, field in _FILTERS.items():
            names = getattr(self, flag)
            if names is not None:
                known = list(dict.fromkeys(getattr(record, field) for record in records))
                wanted = pick(flag, field, names, known)
                chosen = [record for record in chosen if getattr(record, field) in wanted]
        return [record for record in chosen if self.only in (None, record.outcome)]


def add_options(parser: argparse.ArgumentParser) -> None:
    """The filters of `show` and `compare`."""
    for flag, field in _FILTERS.items():
        parser.add_argument(f"--{flag}", metavar="NAMES", help=f"{field}s to show; a comma list, globs allowed")


def add_only(parser: argparse.ArgumentParser) -> None:
    """The filter by outcome."""
    parser.add_argument("--only", choices=OUTCOMES, help="show cells with this outcome alone")


def pick(flag: str, kind: str, names: str, known: Sequence[str], listed: str | None = None) -> set[str]:
    """The known names that a comma list of names and globs selects.

    Args:
        flag: of the command line.
        kind: what the names are of.
        names: the list.
        known: the names that there are.
        listed: what shows them where they are many; None: the command without the flag.

    Raises:
        UsageError: a name fits none; says which may be meant.
    """
    listed = listed or f"leave --{flag} out to see"
    found: set[str] = set()
    for name in split(names):
        fitting = matching(name, known)
        if not fitting:
            raise UsageError(f"--{flag}: {unknown(kind, name, known, listed)}")
        found.update(fitting)
    if not found:
        raise UsageError(f"--{flag}: {none_named(kind, known, listed)}")
    return found
