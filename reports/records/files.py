"""What there is to read: records of a run, audits of compiled kernels, and folders of sweeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tiebreak.reports.audit.record import Audits
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import FieldError, decode
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import UnreadableRecordsError
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
    sweeps: dict[Path, Sweep] = {}
    runs: dict[Path, Run] = {}
    audits: dict[Path, Audits] = {}
    for path in paths:
        content = read(path)
        if isinstance(content, Run):
            store.refuse_repeated(content, path, runs.items())
            runs[path] = content
        elif isinstance(content, Sweep):
            sweeps[path] = content
        else:
            for other, earlier in audits.items():
                if content == earlier:
                    raise UnreadableRecordsError(f"{path}: audits: the same as in {other}; give each audit once")
            audits[path] = content
    return runs, audits, sweeps
