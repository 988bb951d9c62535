"""A statement: what a vendor or a lab hands in. Its file, and what follows from the records that it lists.

A folder with `statement.json` (digests, a profile, waivers), copies of the files of records, and a summary of one page
that follows from them (docs/ci.md). The model is Khronos' submission package: logs, statement, waivers.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

from msgspec.structs import replace

from tiebreak.reports.gate.expected import Excuses, Expected
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA, Data, FileData, Schema, encode
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
        plain = {name: value for name, value in asdict(self).items() if name != "about"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class StatedFile(Data, frozen=True, omit_defaults=False):
    """A copy of a file of records."""

    name: str  # in the folder
    sha256: str  # of its bytes


class Waiver(Data, frozen=True, omit_defaults=False):
    """An expected failure with a last day, as in `tiebreak.reports.gate.expected`."""

    cells: str  # pattern of ids
    check: str  # that they do not meet
    reason: str  # why that is accepted
    expires: date  # the last day

    @property
    def entry(self) -> Expected:
        """As what excuses records."""
        return Expected(self.cells, self.check, self.reason, f"{FILE}: waiver {self.cells}", self.expires)


class Statement(FileData, frozen=True):
    """What `statement.json` has."""

    schema: Schema  # version of this layout
    profile: str  # its name
    profile_hash: str  # of the list of its cells
    files: tuple[StatedFile, ...]  # copies of the files of records
    waivers: tuple[Waiver, ...]  # what excuses cells


def waiver(entry: Expected) -> Waiver:
    """An entry that expires, as a statement has it."""
    assert entry.expires is not None
    return Waiver(entry.cells, entry.check, entry.reason, entry.expires)


def digest(content: bytes) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()


def of_files(contents: Mapping[str, bytes], profile: Profile, waivers: Sequence[Waiver]) -> Statement:
    """Return the statement of files of records, by their names in the folder."""
    files = tuple(StatedFile(name, digest(content)) for name, content in contents.items())
    return Statement(SCHEMA, profile.name, profile.hash, files, tuple(waivers))


def waived(runs: Iterable[Run], waivers: Sequence[Waiver]) -> list[Record]:
    """All records; excused by the waivers alone, whatever excused them in their runs."""
    excuses = Excuses([waiver.entry for waiver in waivers])
    return [excuses.excuse(replace(record, excused=None)) for run in runs for record in run.records]


def is_users(record: Record) -> bool:
    """Return whether --kernel has brought in the kernel of a record, as the command that runs it again tells."""
    return "--kernel" in record.command.split()


def as_text(statement: Statement) -> str:
    """The content of `statement.json`."""
    return encode(statement, indent=1) + "\n"


def read(folder: Path) -> Statement:
    """Read a statement's file.

    Raises:
        UnreadableRecordsError: as `tiebreak.reports.records.store.load`.
    """
    return store.load(folder / FILE, Statement)
