"""Files of records: written whole or not at all; read whole or refused in one line."""

import gzip
import io
import json
import os
import re
import stat
import tempfile
import uuid
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tiebreak.reports.records.decode import FieldError, decoder
from tiebreak.reports.records.migrations import upgrade
from tiebreak.reports.records.record import SCHEMA, Record, Run

_GZIP = b"\x1f\x8b"  # what a file begins with that gzip has compressed
MAX_BYTES = 128 * 2**20  # 5,000 cells take about 8 MiB: what is larger is no file of records


class UnreadableRecordsError(Exception):
    """A file of records that cannot be read; the message names the file and what is wrong with it."""


class UnwritableFolderError(Exception):
    """A folder that records cannot be written to; the message names it."""


def check_writable(folder: Path) -> None:
    """Make sure, before hours of work, that a file can be written to `folder`; creates it.

    Raises:
        UnwritableFolderError: it can't.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".writable-"):
            pass
    except OSError as error:
        raise UnwritableFolderError(f"cannot write records to {folder}: {error.strerror or error}") from error


def write(run: Run, path: Path) -> None:
    """Write a run to `path`, one record a line, so that a diff tells which cells changed; see `write_text`."""
    write_text(as_text(run), path)


def as_text(run: Run) -> str:
    """The content of a file of records."""
    plain = run.as_dict()
    return "{\n" + ",\n".join(f"{_compact(name)}: {_lines(part)}" for name, part in plain.items()) + "\n}\n"


def _lines(part: Any) -> str:
    """A list or an object of objects with an entry a line, all else in one."""
    if isinstance(part, list) and part and isinstance(part[0], dict):
        return "[\n" + ",\n".join(map(_compact, part)) + "\n]"
    if isinstance(part, dict) and part and all(isinstance(value, dict) for value in part.values()):
        return "{\n" + ",\n".join(f"{_compact(name)}: {_compact(value)}" for name, value in part.items()) + "\n}"
    return _compact(part)


def _compact(part: Any) -> str:
    return json.dumps(part, allow_nan=False)


def write_text(text: str, path: Path) -> None:
    """Write a file through a temporary one beside it: a reader never sees half of it.

    Raises:
        UnwritableFolderError: the folder can't be written to; an older file at `path` is left as it was.
    """
    check_writable(path.parent)
    part = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise UnwritableFolderError(f"cannot write {path}: {error.strerror or error}") from error


def read(path: Path) -> Run:
    """Read a run, of this schema or an older one.

    Raises:
        UnreadableRecordsError: no regular file, too large, no JSON, a newer schema, a field that is missing, unknown or
            of the wrong kind, two records of one cell, something in a record that the file does not describe.
    """
    return parse(content_of(path), path)


def load(path: Path) -> dict[str, Any]:
    """The JSON object in a file of records or of audits.

    Raises:
        UnreadableRecordsError: no regular file, too large, no JSON, no object.
    """
    return _object(content_of(path), path)


def read_all(paths: Sequence[Path]) -> list[Run]:
    """Read several runs, each once.

    Raises:
        UnreadableRecordsError: as `read`; or two of the files hold the same run.
    """
    runs: list[Run] = []
    for path in paths:
        run = read(path)
        refuse_repeated(run, path, zip(paths, runs, strict=False))
        runs.append(run)
    return runs


def refuse_repeated(run: Run, path: Path, earlier: Iterable[tuple[Path, Run]]) -> None:
    """Make sure that a run is none of the earlier ones.

    Raises:
        UnreadableRecordsError: it is one of them.
    """
    for other_path, other in earlier:
        if _same(run, other):
            raise UnreadableRecordsError(f"{path}: run: the same run as in {other_path}; give each run once")


def _same(run: Run, other: Run) -> bool:
    """Whether two files hold one run. Without the names that tell runs apart, the times of the cells do."""
    if run.run is not None or other.run is not None:
        return run.run == other.run
    return run == other


def content_of(path: Path) -> bytes:
    """The bytes of a file.

    Raises:
        UnreadableRecordsError: no regular file, too large.
    """
    try:
        with path.open("rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise UnreadableRecordsError(f"{path}: not a regular file")
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UnreadableRecordsError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:  # a name with a null byte
        raise UnreadableRecordsError(f"{path}: {error}") from error
    if content.startswith(_GZIP):
        try:
            with gzip.open(io.BytesIO(content)) as unpacked:
                content = unpacked.read(MAX_BYTES + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UnreadableRecordsError(f"{path}: compressed, but broken: {error}") from error
    if len(content) > MAX_BYTES:
        raise UnreadableRecordsError(f"{path}: larger than {MAX_BYTES >> 20} MiB: not a file of records")
    return content


def parse(content: bytes, path: Path) -> Run:
    """The run in the content of a file; see `read`. The path is for messages."""
    return decode(_object(content, path), path)


def is_audit(plain: dict[str, Any]) -> bool:
    """Whether an object is a file of audits (`tiebreak.reports.audit.record`), to go by what it has."""
    return "audits" in plain and "records" not in plain


def decode(plain: dict[str, Any], path: Path) -> Run:
    """The run in the object of a file, which is brought up to date in place; see `read`. The path is for messages."""
    if is_audit(plain):
        raise UnreadableRecordsError(
            f"{path}: an audit of compiled kernels, no records: tiebreak show, page and audit --expect take it"
        )
    schema = plain.get("schema")
    if type(schema) is not int or schema < 1:
        raise UnreadableRecordsError(f"{path}: schema: expected a version from 1 to {SCHEMA}: not a file of records?")
    if schema > SCHEMA:
        raise UnreadableRecordsError(
            f"{path}: schema: {schema} is newer than {SCHEMA}, the newest that this tiebreak reads; update tiebreak"
        )
    try:
        upgrade(plain, schema)
        run: Run = decoder(Run)(plain)
    except FieldError as error:
        raise UnreadableRecordsError(one_line(f"{path}: {error}")) from None
    except RecursionError:
        raise UnreadableRecordsError(f"{path}: nested too deeply") from None
    _check(run, path)
    return run


def _object(content: bytes, path: Path) -> dict[str, Any]:
    plain = _json(content, path)
    if not isinstance(plain, dict):
        raise UnreadableRecordsError(f"{path}: the whole: expected an object")
    return plain


def _json(content: bytes, path: Path) -> Any:
    if not content.strip():
        raise UnreadableRecordsError(f"{path}: empty")
    try:
        text = content.decode("utf-8")
        plain = json.loads(text, parse_constant=_refuse_constant)
        if re.search(r"\\ud[89a-f]", text, re.IGNORECASE):
            json.dumps(plain, ensure_ascii=False).encode("utf-8")
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise UnreadableRecordsError(one_line(f"{path}: not UTF-8 ({error.reason})")) from None
    except ValueError as error:
        raise UnreadableRecordsError(one_line(f"{path}: not JSON ({error})")) from None
    except RecursionError:
        raise UnreadableRecordsError(f"{path}: nested too deeply") from None
    return plain


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number in JSON; a number that is missing is null")


def _check(run: Run, path: Path) -> None:
    """What holds between fields."""
    for name in ("cpu", "level"):
        if not isinstance(run.platform.get(name), str):
            raise UnreadableRecordsError(f"{path}: platform.{name}: expected a string")
    _check_fingerprint(run.platform.get("fingerprint", {}), f"{path}: platform.fingerprint")
    seen: set[str] = set()
    for number, record in enumerate(run.records):
        if record.id in seen:
            raise UnreadableRecordsError(one_line(f"{path}: records[{number}].id: a second record of {record.id}"))
        seen.add(record.id)
        _check_described(run, record, f"{path}: records[{number}]")


def _check_fingerprint(fingerprint: Any, where: str) -> None:
    try:
        probed: Mapping[str, Mapping[str, Any]] = decoder(Mapping[str, Mapping[str, Any]])(fingerprint)
    except FieldError as error:
        raise UnreadableRecordsError(one_line(f"{where}{error.path}: {error.problem}")) from None
    for backend, values in probed.items():
        for name, value in values.items():
            if type(value) not in (str, int, float):
                raise UnreadableRecordsError(one_line(f"{where}.{backend}.{name}: expected a string or a number"))


def _check_described(run: Run, record: Record, where: str) -> None:
    """What a record has is described: tables, CSV, gate and page go by the descriptions."""
    used = {
        "measures": record.measures,
        "checks": record.answers,
        "cases": (record.case,),
        "experiments": (record.experiment,),
    }
    for table, names in used.items():
        described = getattr(run, table)
        for name in names:
            if name not in described:
                raise UnreadableRecordsError(one_line(f"{where}: {name}: not described in {table}"))


def one_line(text: str) -> str:
    """Control characters, which a file may carry in its names, spelled out."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)
