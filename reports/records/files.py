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
    """Read a file, or a sweep's folder.

    Raises:
        UnreadableRecordsError: as `tiebreak.reports.records.store.load` and `tiebreak.reports.sweeps.store.read_sweep`.
    """
    if path.is_dir():
        return read_sweep(path)
    content = store.content_of(path)
    return store.decoded(content, path, Audits) if _has_audits(content) else store.parse(content, path)


def _has_audits(content: bytes) -> bool:
    try:
        return "audits" in decode(content, dict[str, Any])
    except FieldError:
        return False


def read_all(paths: Sequence[Path]) -> tuple[dict[Path, Run], dict[Path, Audits], dict[Path, Sweep]]:
    """Read the runs, the audits and the sweeps in several files, by file, in the order they come in.

    Raises:
        UnreadableRecordsError: as `read`; or two of the files hold the same.
    """
    found = [(path, read(path)) for path in paths]
    store.refuse_repeated(found)
    return (
        {path: data for path, data in found if isinstance(data, Run)},
        {path: data for path, data in found if isinstance(data, Audits)},
        {path: data for path, data in found if isinstance(data, Sweep)},
    )
