"""What a command line names: files to read, and which of their records are shown."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tiebreak.reports import names as names_of
from tiebreak.reports.audit import Audits
from tiebreak.reports.pairs.verdict import PairVerdict
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import FieldError, decode
from tiebreak.reports.records.record import Run
from tiebreak.reports.sweeps.store import Sweep, read_sweep

# Flag, named as pytest's own, and the field of a record that it filters by.
FILTERS = {"backend": "backend", "kernels": "kernel", "cases": "case"}


File = Run | Audits | PairVerdict | Sweep  # what `show` and `page` take


def read(path: Path) -> File:
    """Read a file, or a sweep's folder; UnreadableRecordsError says what is wrong with it."""
    if path.is_dir():
        return read_sweep(path)
    content = store.content_of(path)
    try:
        parts = decode(content, dict[str, Any])
    except FieldError:
        parts = {}
    if "audits" in parts:
        return store.decoded(content, path, Audits)
    return store.decoded(content, path, PairVerdict) if "calls" in parts else store.decoded(content, path, Run)


def read_all(paths: Sequence[Path]) -> dict[Path, File]:
    """Read what is in several files, by file; raises as `read`, or if two are the same."""
    found = [(path, read(path)) for path in paths]
    store.refuse_repeated(found)
    return dict(found)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the filters of `show` and `compare`."""
    for flag, field in FILTERS.items():
        parser.add_argument(f"--{flag}", metavar="NAMES", help=f"{field}s to show; a comma list, globs allowed")


def add_match(parser: argparse.ArgumentParser) -> None:
    """Add how `compare` and `page` match cells of two files; see `tiebreak.reports.tables.compare`."""
    parser.add_argument(
        "--match", choices=("kernel",), help="one kernel of each file stands beside the others', as old and new"
    )


def narrowed(runs: Sequence[Run], options: argparse.Namespace, only: str | None = None) -> list[Run]:
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

    `listed` is what shows the known names where they are many; None: the command without the flag.
    """
    return set(names_of.pick(kind, names, known, listed or f"leave --{flag} out to see", f"--{flag}"))
