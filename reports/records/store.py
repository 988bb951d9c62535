"""Files of records and of other data: written whole or not at all; read whole or refused in one line."""

import gzip
import hashlib
import io
import os
import stat
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.decode import SCHEMA, Data, FieldError, FileData, decode, encode
from tiebreak.reports.records.record import Run

_GZIP = b"\x1f\x8b"  # what a file begins with that gzip has compressed
MAX_BYTES = 128 * 2**20  # 5,000 cells take about 8 MiB: what is larger is no file of records
# The fields of files that other commands read, and the commands.
_OTHERS = {
    "records": "records of a run: tiebreak show, page, compare and gate take them",
    "calls": "what tiebreak pair says: tiebreak show and page take it",
    "audits": "an audit of compiled kernels: tiebreak show, page and audit --expect take it",
}
# In the order in which a file of records has its parts; the long ones last.
_PARTS = ("schema", "run", "complete", "platform", "options", "narrowing", "unavailable", "not_run", "running",
          "explanations", "plans", "measures", "checks", "cases", "experiments", "records", "seconds")  # fmt: skip

_D = TypeVar("_D", bound=Data)


class UnreadableRecordsError(UsageError):
    """A file of records that cannot be read; the message names the file and what is wrong with it."""


class UnwritableFolderError(UsageError):
    """A folder that records cannot be written to; the message names it."""


def check_writable(folder: Path) -> None:
    """Raise UnwritableFolderError, before hours of work, unless a file can be written to `folder`; creates it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UnwritableFolderError(f"cannot write records to {folder}: {error.strerror or error}") from error


def write(data: Data, path: Path) -> None:
    """Write a file of data; see `as_text` and `write_text`."""
    write_text(as_text(data), path)


def as_text(data: Data) -> str:
    """Return the content of a file; of a run one record a line, by their ids: a diff tells which cells changed."""
    if not isinstance(data, Run):
        return encode(data, indent=1) + "\n"
    plain = msgspec.to_builtins(data)
    plain["records"] = sorted(plain["records"], key=lambda record: record["id"])
    plain["seconds"] = dict(sorted(plain["seconds"].items()))
    return "{\n" + ",\n".join(f"{encode(name)}: {_lines(plain[name])}" for name in _PARTS) + "\n}\n"


def _lines(part: Any) -> str:
    """Return JSON of a list or an object of objects with an entry a line, of all else in one."""
    if isinstance(part, list | tuple) and part and isinstance(part[0], dict):
        return "[\n" + ",\n".join(map(encode, part)) + "\n]"
    if isinstance(part, dict) and part and all(isinstance(value, dict) for value in part.values()):
        return "{\n" + ",\n".join(f"{encode(name)}: {encode(value)}" for name, value in part.items()) + "\n}"
    return encode(part)


def write_text(text: str, path: Path) -> None:
    """Write a file through a temporary one next to it: if that fails (UnwritableFolderError) an older one stays."""
    check_writable(path.parent)
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UnwritableFolderError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> Run:
    """Read a run; raises as `load`."""
    return load(path, Run)


def load(path: Path, kind: type[_D]) -> _D:
    """Read a file of a kind of data; UnreadableRecordsError says what is wrong with it."""
    return decoded(content_of(path), path, kind)


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Read several runs; raises as `load`, or if two of the files hold the same one."""
    runs = [(path, read(path)) for path in paths]
    refuse_repeated(runs)
    return [run for _, run in runs]


def refuse_repeated(files: Iterable[tuple[Path, Data]]) -> None:
    """Raise UnreadableRecordsError if two files hold the same run, by its name where it has one, or the same data."""
    earlier: list[tuple[Path, Any]] = []
    for path, data in files:
        name = data.run if isinstance(data, Run) and data.run is not None else data
        for other, first in earlier:
            if name == first:
                raise UnreadableRecordsError(f"{path}: the same as in {other}; give each once")
        earlier.append((path, name))


def content_of(path: Path) -> bytes:
    """Return the bytes of a file, unpacked if gzip has compressed it; UnreadableRecordsError if it is too large."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:  # of a pipe too
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableRecordsError(f"{path}: not a regular file")
            content = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:  # a name with a null byte is no value
        raise UnreadableRecordsError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if content.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UnreadableRecordsError(f"{path}: compressed, but broken: {error}") from error
    if len(content) > MAX_BYTES:
        raise UnreadableRecordsError(f"{path}: larger than {MAX_BYTES >> 20} MiB: not a file of records")
    return content


def decoded(content: bytes, path: Path, kind: type[_D]) -> _D:
    """Return the data in the content of a file at a path; UnreadableRecordsError names the path and what is wrong."""
    try:
        parts = decode(content, dict[str, msgspec.Raw])
        if "schema" in kind.__struct_fields__:
            _check_schema(parts, kind)
        data = decode(content, kind)
        if isinstance(data, FileData):
            data.check()
    except FieldError as error:
        raise UnreadableRecordsError(one_line(f"{path}: {error}")) from None
    return data


def _check_schema(parts: dict[str, msgspec.Raw], kind: type[Data]) -> None:
    """Refuse a file that another command reads, or of another schema, by its top level alone."""
    for name, other in _OTHERS.items():
        if name in parts and name not in kind.__struct_fields__:
            raise FieldError(other)
    schema = bytes(parts.get("schema", b"missing")).decode(errors="replace")
    if schema != str(SCHEMA):
        newer = schema.isdecimal() and int(schema[:20]) > SCHEMA
        cure = "update tiebreak" if newer else "make the file anew, or read it with the tiebreak that made it"
        raise FieldError(f"{schema:.20} is not {SCHEMA}, the one that this tiebreak reads: {cure}", "schema")


def one_line(text: str) -> str:
    """Return a text with its control characters, which a file may have in names, spelled out."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


def digest(content: bytes) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()
