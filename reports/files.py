"""Files of either kind, records of a run or audits of compiled kernels, told apart by what is in them."""

from collections.abc import Sequence
from pathlib import Path

from tiebreak.reports import audit, store
from tiebreak.reports.audit import Audits
from tiebreak.reports.records import Run
from tiebreak.reports.store import UnreadableRecordsError


def read(path: Path) -> Run | Audits:
    """Read a file.

    Raises:
        UnreadableRecordsError: as `tiebreak.reports.store.read` and `tiebreak.reports.audit.read`.
    """
    plain = store.load(path)
    return audit.decode(plain, path) if store.is_audit(plain) else store.decode(plain, path)


def read_all(paths: Sequence[Path]) -> tuple[dict[Path, Run], dict[Path, Audits]]:
    """Read several files.

    Raises:
        UnreadableRecordsError: as `read`; or two of the files hold the same.

    Returns:
        The runs and the audits by file, in the order they come in.
    """
    runs: dict[Path, Run] = {}
    audits: dict[Path, Audits] = {}
    for path in paths:
        found = read(path)
        if isinstance(found, Run):
            store.refuse_repeated(found, path, runs.items())
            runs[path] = found
            continue
        for other, earlier in audits.items():
            if found == earlier:
                raise UnreadableRecordsError(f"{path}: audits: the same as in {other}; give each audit once")
        audits[path] = found
    return runs, audits
