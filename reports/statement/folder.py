"""A statement: what a vendor or a lab hands in. Its file, and what follows from the records that it lists.

A folder with `statement.json` (digests, a profile, waivers), copies of the files of records, and a summary of one page
that follows from them (docs/ci.md). The model is Khronos' submission package: logs, statement, waivers.
"""

import hashlib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import date
from pathlib import Path

from msgspec.structs import asdict, replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.expected import Excuses, Expected, of_file
from tiebreak.reports.gate.settings import Excuse
from tiebreak.reports.records.decode import SCHEMA, Data, FileData, Schema
from tiebreak.reports.records.record import Record, Run

FILE = "statement.json"
SUMMARIES = ("summary.md", "summary.html")


@dataclass(frozen=True)
class Profile:
    """Cells that must be there. Plain data: `tiebreak.programs.profiles` knows cases and kernels."""

    name: str
    about: str  # one line
    format: str  # of q, k, v and O
    seed: int  # of all inputs
    heads: int  # that a cell draws at first
    versions: Mapping[str, int]  # of its cases
    suite: Mapping[str, Mapping[str, tuple[str, ...]]]  # by backend: the suite's own kernels, each with its cases
    own: Mapping[str, tuple[str, ...]]  # kinds of input: the cases of a backend's own kernel
    users: tuple[str, ...]  # the cases of a user's kernel
    ran: float  # share of the cells that must have run
    recomputed: int  # cells of the suite's kernels that whoever verifies must run again on the emulation

    @property
    def hash(self) -> str:
        """SHA-256 of all that it asks for."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "about"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class StatedFile(Data, frozen=True, omit_defaults=False):
    """A copy of a file of records."""

    name: str  # in the folder
    sha256: str  # of its bytes


class Waiver(Excuse, frozen=True, omit_defaults=False):
    """An expected failure with a last day."""

    expires: date  # the last day


class Statement(FileData, frozen=True):
    """What `statement.json` has."""

    schema: Schema  # version of this layout
    profile: str  # its name
    profile_hash: str  # of the list of its cells
    files: tuple[StatedFile, ...]  # copies of the files of records
    waivers: tuple[Waiver, ...]  # what excuses cells


def read_waivers(path: Path, checks: Collection[str]) -> list[Waiver]:
    """Return the entries of a file of expected failures.

    Raises:
        UsageError: as `tiebreak.reports.gate.expected.of_file`; or one has no last day.
    """
    waivers = []
    for entry in of_file(path, f"--waivers {path}", checks):
        if entry.expires is None:
            raise UsageError(f"{entry.where}.expires: missing: a waiver of a statement has a last day")
        waivers.append(Waiver(entry.cells, entry.check, entry.reason, entry.expires))
    return waivers


def digest(content: bytes) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()


def statement_of(contents: Mapping[str, bytes], profile: Profile, waivers: Sequence[Waiver]) -> Statement:
    """Return the statement of files of records, by their names in the folder."""
    files = tuple(StatedFile(name, digest(content)) for name, content in contents.items())
    return Statement(SCHEMA, profile.name, profile.hash, files, tuple(waivers))


def waived(runs: Iterable[Run], waivers: Sequence[Waiver]) -> list[Record]:
    """All records; excused by the waivers alone, whatever excused them in their runs."""
    excuses = Excuses([Expected(**asdict(waiver)) for waiver in waivers])
    return [excuses.excuse(replace(record, excused=None)) for run in runs for record in run.records]


def is_users(record: Record) -> bool:
    """Return whether --kernel has brought in the kernel of a record, as the command that runs it again tells."""
    return "--kernel" in record.command.split()
