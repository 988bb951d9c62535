"""A statement: what a vendor or a lab hands in. Its file, and what follows from the records that it lists.

A folder with `statement.json`, copies of the files of records, and a summary of one page (docs/ci.md). All in
`statement.json` but the waivers follows from records and profile: `tiebreak statement --verify` derives it anew.
The model is Khronos' submission package: logs, state of the checkout, statement, waivers.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from msgspec.structs import replace

from tiebreak.reports.gate.expected import Excuses, Expected
from tiebreak.reports.records import store
from tiebreak.reports.records.decode import SCHEMA, Count, Data, FieldError, FileData, Schema, encode, one_of
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import OUTCOMES, Record, Run

FILE = "statement.json"
SUMMARIES = ("summary.md", "summary.html")
SUITE = ("commit", "wheel")  # what a platform says of the suite's code: one of them
WAIVED = "waived"  # in the place of an outcome


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
    own: Mapping[str, tuple[str, ...]]  # kinds of input: the cases of any other kernel

    @property
    def hash(self) -> str:
        """SHA-256 of all that it asks for."""
        plain = {name: value for name, value in asdict(self).items() if name != "about"}
        return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


class StatedFile(Data, frozen=True, omit_defaults=False):
    """A copy of a file of records."""

    name: str  # in the folder
    sha256: str  # of its bytes
    cells: Count  # records in it


class Waiver(Data, frozen=True, omit_defaults=False):
    """An expected failure with a last day, as in `tiebreak.reports.gate.expected`."""

    cells: str  # pattern of ids
    check: str  # that they do not meet
    reason: str  # why that is accepted
    expires: str  # the last day, as 2027-06-30

    @property
    def entry(self) -> Expected:
        """As what excuses records.

        Raises:
            ValueError: the last day is none.
        """
        return Expected(
            self.cells, self.check, self.reason, f"{FILE}: waiver {self.cells}", date.fromisoformat(self.expires)
        )


class Statement(FileData, frozen=True):
    """What `statement.json` has."""

    schema: Schema  # version of this layout
    profile: str  # its name
    profile_hash: str  # of the list of its cells
    suite: str  # its code: a commit, or an installed wheel
    platform: Mapping[str, Any]  # machine, devices, versions, fingerprint
    kernels: Mapping[str, tuple[str, ...]]  # by backend: what the statement is given for
    users: tuple[str, ...]  # those of them that --kernel brought in
    files: tuple[StatedFile, ...]  # copies of the files of records
    waivers: tuple[Waiver, ...]  # what excuses cells
    counts: Mapping[str, Count]  # cells by outcome; those that are waived count as waived alone
    result: Annotated[str, one_of(("held", "fell"))]  # held: nothing fell, or is inconclusive, but waived cells

    def check(self) -> None:
        """Hold the waivers' days to be such.

        Raises:
            FieldError: one is none.
        """
        for number, each in enumerate(self.waivers):
            try:
                date.fromisoformat(each.expires)
            except ValueError:
                problem = f"expected a day such as 2027-06-30, found {each.expires!r}"
                raise FieldError(problem, f"waivers[{number}].expires") from None


def waiver(entry: Expected) -> Waiver:
    """An entry that expires, as a statement has it."""
    assert entry.expires is not None
    return Waiver(entry.cells, entry.check, entry.reason, entry.expires.isoformat())


def digest(content: bytes) -> str:
    """SHA-256 of a file."""
    return hashlib.sha256(content).hexdigest()


def waived(runs: Iterable[Run], waivers: Sequence[Waiver]) -> list[Record]:
    """All records; excused by the waivers alone, whatever excused them in their runs.

    Raises:
        ValueError: a waiver's last day is none.
    """
    excuses = Excuses([waiver.entry for waiver in waivers])
    return [excuses.excuse(replace(record, excused=None)) for run in runs for record in run.records]


def users_kernels(runs: Iterable[Run], profile: Profile) -> list[str]:
    """Names of the kernels that --kernel has brought in: in its runs, those that the suite does not have."""
    given = (record for run in runs if run.options.get("kernel") for record in run.records)
    return sorted({record.kernel for record in given if record.kernel not in profile.suite.get(record.backend, {})})


def derive(
    runs: Sequence[Run], contents: Sequence[bytes], names: Sequence[str], profile: Profile, waivers: Sequence[Waiver]
) -> Statement:
    """The statement that some runs make.

    Args:
        runs: one or more, of one platform and commit; see `tiebreak.reports.statement.findings`.
        contents: of their files.
        names: of their copies in the folder.
        profile: what it is held to.
        waivers: what excuses cells.
    """
    records = waived(runs, waivers)
    counted = Counter(WAIVED if record.excused is not None else record.outcome for record in records)
    backends = grouped(records, lambda record: record.backend)
    return Statement(
        SCHEMA,
        profile.name,
        profile.hash,
        suite_of(runs[0]),
        platform_of(runs),
        {name: tuple(sorted({record.kernel for record in own})) for name, own in sorted(backends.items())},
        tuple(users_kernels(runs, profile)),
        tuple(
            StatedFile(name, digest(content), len(run.records))
            for name, content, run in zip(names, contents, runs, strict=True)
        ),
        tuple(waivers),
        {name: counted[name] for name in (*OUTCOMES, WAIVED) if counted[name]},
        "fell" if any(record.fails for record in records) else "held",
    )


def suite_of(run: Run) -> str:
    """Which code a run had: `commit ...` of a checkout, or `wheel ...`."""
    return next((f"{name} {run.platform[name]}" for name in SUITE if run.platform.get(name)), "unknown")


def platform_of(runs: Sequence[Run]) -> dict[str, Any]:
    """The platform of the first run, with the fingerprints of all; the suite stands elsewhere."""
    probed = {name: values for run in runs for name, values in run.platform.get("fingerprint", {}).items()}
    devices = {name: value for run in runs for name, value in run.platform.items() if name not in SUITE}
    return devices | {"fingerprint": probed}


def as_text(statement: Statement) -> str:
    """The content of `statement.json`."""
    return encode(statement, indent=1) + "\n"


def read(folder: Path) -> Statement:
    """Read a statement's file.

    Raises:
        UnreadableRecordsError: as `tiebreak.reports.records.store.load`.
    """
    return store.load(folder / FILE, Statement)
