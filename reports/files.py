"""Kinds of file other than records: what `show`, `page` and `schema` need to know, which its plug-in registers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from tiebreak.plugins import Door, problems
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import Data, FieldError, decode
from tiebreak.reports.records.record import Run
from tiebreak.reports.records.store import UnreadableRecordsError
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.verdict import Verdicts

_D = TypeVar("_D", bound=Data)


@dataclass(frozen=True)
class FileKind(Generic[_D]):
    """A kind of file. For one that only has a `type`, there is a schema and no more."""

    type: type[_D]  # what it holds
    about: str = ""  # what it is: an audit, a pair
    told_by: str = ""  # a field that no other kind has; of a folder, a file in it
    folder: Callable[[Path], _D] | None = None  # reads it, where it is a folder
    parts: Callable[[_D], Sequence[Part]] = lambda data: ()  # what `show` prints
    grid: Callable[[_D], Grid] = lambda data: Grid((), ())  # its CSV
    kernels: Callable[[_D], Sequence[str]] = lambda data: ()  # that --kernels chooses from
    only: Callable[[_D, Collection[str]], _D] | None = None  # the same of these alone; None: it is shown whole
    page: Callable[[Mapping[Path, _D]], str] = lambda files: ""  # HTML of those of a page, by where they lie


FILES = Door[FileKind[Any]]("tiebreak.files", FileKind, {"records": FileKind(Run), "verdicts": FileKind(Verdicts)})


def read(path: Path) -> Any:
    """Read records or another kind of file or folder; UnreadableRecordsError: what is wrong with it."""
    content = None if path.is_dir() else store.content_of(path)
    try:
        parts = {each.name for each in path.iterdir()} if content is None else decode(content, dict[str, msgspec.Raw])
    except FieldError:
        parts = {}
    if content is not None and ("records" in parts or not parts):
        return store.decoded(content, path, Run)
    kinds = [kind for kind in FILES.usable().values() if kind.told_by and (kind.folder is None) == bool(content)]
    for kind in kinds:
        if kind.told_by in parts:
            return kind.folder(path) if kind.folder else store.decoded(content or b"", path, kind.type)
    broken = "".join(f"; {line}" for line in problems() if line.startswith(FILES.group))
    names = ", ".join(f"{kind.told_by} ({kind.about})" for kind in kinds)
    raise UnreadableRecordsError(f"{path}: neither records nor anything else with one of {names}{broken}")


def read_all(paths: Sequence[Path]) -> dict[Path, Any]:
    """Read the contents of several files, by file; raise as `read`, or if two are the same."""
    contents = [(path, read(path)) for path in paths]
    store.refuse_repeated(contents)
    return dict(contents)


def kind_of(data: Data) -> FileKind[Any]:
    """Return the kind of file, none of records, that data came from."""
    return next(kind for kind in FILES.usable().values() if type(data) is kind.type)
