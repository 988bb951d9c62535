"""The choice of records in files that a command line makes."""

import argparse
from collections.abc import Sequence

from msgspec.structs import replace

from tiebreak.reports import names as names_of
from tiebreak.reports.records.record import Run

# Flag, named as pytest's own, and the field of a record that it filters by.
FILTERS = {"backend": "backend", "kernels": "kernel", "cases": "case"}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the filters of `show` and `compare`."""
    for flag, field in FILTERS.items():
        parser.add_argument(f"--{flag}", metavar="NAMES", help=f"{field}s to show; a comma list, globs allowed")


def add_match(parser: argparse.ArgumentParser) -> None:
    """Add how `compare` and `page` match cells of two files; see `tiebreak.reports.tables.compare`."""
    parser.add_argument(
        "--match", choices=("kernel",), help="compare one kernel of each file with the others', as old and new"
    )


def filtered(runs: Sequence[Run], options: argparse.Namespace, only: str | None = None) -> list[Run]:
    """Return the runs with the records that the filters, and an outcome, select; UsageError for an unknown name."""
    records = chosen = [record for run in runs for record in run.records]
    for flag, field in FILTERS.items():
        if (names := getattr(options, flag)) is not None:
            wanted = pick(flag, field, names, list(dict.fromkeys(getattr(record, field) for record in records)))
            chosen = [record for record in chosen if getattr(record, field) in wanted]
    kept = {record.id for record in chosen if only in (None, record.outcome)}
    return [replace(run, records=tuple(record for record in run.records if record.id in kept)) for run in runs]


def pick(flag: str, kind: str, names: str, known: Sequence[str], listed: str | None = None) -> set[str]:
    """Return the names that a flag's comma list of names and globs selects; UsageError says which may be meant.

    `listed` says what lists the known names if they are many; None: the command without the flag.
    """
    return set(names_of.pick(kind, names, known, listed or f"leave --{flag} out to see", f"--{flag}"))
