"""What there is to read: records of a run, audits of compiled kernels, and folders of sweeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiebreak.reports.audit.record import Audits
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import FieldError, decode
from tiebreak.reports.records.record import Run
from tiebreak.reports.sweeps.store import Sweep, read_sweep


def read(path: Path) -> Run | Audits | Sweep:
    """Read a file, or a sweep's folder; UnreadableRecordsError says what is wrong with it."""
    if path.is_dir():
        return read_sweep(path)
    content = store.content_of(path)
    try:
        parts = decode(content, dict[str, Any])
    except FieldError:
        parts = {}
    return store.decoded(content, path, Audits) if "audits" in parts else store.parse(content, path)


def read_all(paths: Sequence[Path]) -> tuple[dict[Path, Run], dict[Path, Audits], dict[Path, Sweep]]:
    """Read the runs, the audits and the sweeps in several files, by file; raises as `read`, or if two are the same."""
    found = [(path, read(path)) for path in paths]
    store.refuse_repeated(found)
    return (
        {path: data for path, data in found if isinstance(data, Run)},
        {path: data for path, data in found if isinstance(data, Audits)},
        {path: data for path, data in found if isinstance(data, Sweep)},
    )
