"""What there is to read: records of a run, audits of compiled kernels, and folders of sweeps."""

from collections.abc import Sequence
from pathlib import Path

from tiebreak.reports.audit import record as audit
from tiebreak.reports.audit.record import Audits
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import UnreadableRecordsError
from tiebreak.reports.sweeps.store import Sweep, read_sweep


def read(path: Path) -> Run | Audits | Sweep:
    """Read a file, or a sweep's folder.

    Raises:
        UnreadableRecordsError: as `tiebreak.reports.records.store.read`, `tiebreak.reports.audit.record.read` and
            `tiebreak.reports.sweeps.store.read_sweep`.
    """
    if path.is_dir():
        return read_sweep(path)
    plain = store.load(path)
    return audit.decode(plain, path) if store.is_audit(plain) else store.decode(plain, path)


def read_all(paths: Sequence[Path]) -> tuple[dict[Path, Run], dict[Path, Audits], dict[Path, Sweep]]:
    """The runs, the audits and the sweeps in several files, by file, in the order they come in.

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
