"""Files of records: written whole or not at all."""

import json
import os
import tempfile
from pathlib import Path

from tiebreak.reports.records import SCHEMA, Run, from_dict


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
    """Write a run to `path`, through a temporary file beside it: a reader never sees half a file.

    Raises:
        UnwritableFolderError: the folder can't be written to; an older file at `path` is left as it was.
    """
    check_writable(path.parent)
    text = json.dumps(run.as_dict(), indent=1, allow_nan=False) + "\n"
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(name, path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise UnwritableFolderError(f"cannot write records to {path}: {error.strerror or error}") from error


def read(path: Path) -> Run:
    """Read a run.

    Raises:
        UnreadableRecordsError: no file, no JSON, another schema, or a field that is missing or of the wrong kind.
    """
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableRecordsError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UnreadableRecordsError(f"{path}: not JSON ({error})") from error
    if not isinstance(plain, dict) or plain.get("schema") != SCHEMA:
        raise UnreadableRecordsError(f"{path}: schema {SCHEMA} expected; written by another version of tiebreak?")
    try:
        return Run(
            platform=plain["platform"],
            options=plain["options"],
            records=tuple(from_dict(record) for record in plain["records"]),
            unavailable=plain["unavailable"],
            seconds=plain["seconds"],
            explanations=plain["explanations"],
            complete=plain["complete"],
        )
    except KeyError as error:
        raise UnreadableRecordsError(f"{path}: field {error} is missing") from error
    except (TypeError, AttributeError) as error:
        raise UnreadableRecordsError(f"{path}: {error}") from error
