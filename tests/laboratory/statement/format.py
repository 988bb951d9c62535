"""A statement: what a vendor or a lab hands in. Its file, what keeps runs from being one, and its summary.

A folder with `statement.json` (digests, a profile, waivers), copies of the files of records, and a summary of one page
that follows from them (docs/ci.md). The model is Khronos' submission package: logs, statement, waivers. What takes
cases or kernels to tell is in `tiebreak.laboratory.statement.verification`.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.files import FileKind
from tiebreak.reports.gate.expected import Excuses, Expected, of_file
from tiebreak.reports.names import first_few
from tiebreak.reports.records.decode import SCHEMA, Data, FieldError, FileData, Schema
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import BIASED, FAILED, NONFINITE, PASSED, SKIPPED, Record, Run, record_id
from tiebreak.reports.records.store import digest, one_line
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted, counts
from tiebreak.reports.tables.texts import plain_text

FILE, SUMMARY = "statement.json", "summary.md"
WAIVED = "waived"  # instead of the outcome of a cell that a waiver excuses
# Fields that may differ between runs of one platform: momentary ones, and those of the backends that ran.
_OF_THE_MOMENT = frozenset({"fingerprint", "evidence", "memory_gib", "cores"})
# How a suite is named, in words, and what to do where its files are not those.
_SUITES = {
    "commit": ("[0-9a-f]{40}", "a commit's 40 hexadecimal digits", "commit them"),
    "wheel": (r"\S+ sha256:[0-9a-f]{64}", "a wheel's version and SHA-256", "install it anew"),
}
_LISTED = 20  # cells of a list that the summary has; the records have them all
_NAMED = 3  # inputs of a kernel that the summary names
_DIGITS = 16  # of a digest that the summary shows
_NO_DAY = "missing: a waiver of a statement has a last day"


@dataclass(frozen=True)
class Profile:
    """The cells that are required. Plain data: `tiebreak.laboratory.statement.profiles` knows cases and kernels."""

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
    recomputed: int  # cells that `--verify` must recompute, at least

    def kernels_on(self, backend: str) -> Mapping[str, tuple[str, ...]]:
        """Return the suite's kernels on a backend, with their cases: the same on each torch:DEVICE."""
        return self.suite.get(backend.partition(":")[0], {})

    @property
    def hash(self) -> str:
        """The SHA-256 of all that it requires."""
        plain = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "about"}
        return digest(json.dumps(plain, sort_keys=True).encode())


class StatedFile(Data, frozen=True, omit_defaults=False):
    """A copy of a file of records."""

    name: str  # in the folder
    sha256: str  # of its bytes


class Statement(FileData, frozen=True):
    """The contents of `statement.json`."""

    schema: Schema  # version of this layout
    profile: str  # its name
    profile_hash: str  # of the list of its cells
    files: tuple[StatedFile, ...]  # copies of the files of records
    waivers: tuple[Expected, ...]  # what excuses cells, each until a last day

    def check(self) -> None:
        """Raise FieldError for a waiver without a last day."""
        for number, waiver in enumerate(self.waivers):
            if waiver.expires is None:
                raise FieldError(_NO_DAY, f"waivers[{number}].expires")


def read_waivers(path: Path, checks: Collection[str]) -> list[Expected]:
    """Return the entries of a file of expected failures; raises as `of_file`, or where one has no last day."""
    entries = of_file(path, f"--waivers {path}", checks)
    for entry in entries:
        if entry.expires is None:
            raise UsageError(f"{entry.where}.expires: {_NO_DAY}")
    return [replace(entry, where="") for entry in entries]


def statement_of(contents: Mapping[str, bytes], profile: Profile, waivers: Sequence[Expected]) -> Statement:
    """Return the statement of files of records, by their names in the folder."""
    files = tuple(StatedFile(name, digest(content)) for name, content in contents.items())
    return Statement(SCHEMA, profile.name, profile.hash, files, tuple(waivers))


def apply_waivers(runs: Iterable[Run], waivers: Sequence[Expected]) -> list[Record]:
    """Return all records; excused by the waivers alone, whatever excused them in their runs."""
    excuses = Excuses(waivers)
    return [excuses.excuse(replace(record, excused=None)) for run in runs for record in run.records]


def is_users(record: Record) -> bool:
    """Return whether --kernel brought in the kernel of a record, by the command that runs it again."""
    return "--kernel" in record.command.split()


def faults_of_runs(runs: Mapping[str, Run], profile: Profile) -> Iterator[str]:
    """Yield why some runs, by the names of their files, are no statement of a profile, a line each."""
    first_name, first = next(iter(runs.items()))
    seen: dict[str, str] = {}
    for name, run in runs.items():
        for field in sorted((run.platform.keys() & first.platform.keys()) - _OF_THE_MOMENT):
            if (ours := run.platform[field]) != (theirs := first.platform[field]):
                yield f"{name}: platform.{field}: {ours!r}, {theirs!r} in {first_name}: give one platform's files"
        yield from (f"{name}: {text}" for text in _faults_of_run(run, profile))
        for record in run.records:
            if record.id in seen:
                yield f"{name}: {record.id}: a second record of this cell, the first is in {seen[record.id]}"
            seen.setdefault(record.id, name)
    needed = dict.fromkeys(record_id(*cell, profile.format) for cell in _required_cells(list(runs.values()), profile))
    there = {record.id: record.outcome for run in runs.values() for record in run.records}
    yield from (f"missing: {name}, which profile {profile.name} asks for" for name in needed if name not in there)
    ran = sum(there.get(name, SKIPPED) != SKIPPED for name in needed)
    if not needed:
        yield f"no record of a cell that profile {profile.name} asks for"
    elif ran < profile.ran * len(needed):
        yield f"{ran} of {counted(len(needed), 'cell')} ran; profile {profile.name} asks for {profile.ran:.0%} of them"


def _faults_of_run(run: Run, profile: Profile) -> Iterator[str]:
    kind = next((kind for kind in _SUITES if run.platform.get(kind)), None)
    if kind is None:
        yield "platform.commit: unknown: run the suite from a git checkout or an installed wheel"
    else:
        shape, words, cure = _SUITES[kind]
        value = str(run.platform[kind])
        if not re.fullmatch(f"{shape}(-dirty)?", value):
            yield f"platform.{kind}: {value!r}: not {words}: was the file edited?"
        elif value.endswith("-dirty"):
            yield f"platform.{kind}: {value}: files differ from the {kind}; {cure} and run again"
    if not run.ended:
        yield "complete: the run was interrupted"
    if not run.records:
        yield "records: none"
    for option, required in (("seed", profile.seed), ("heads", profile.heads)):
        if str(run.options.get(option)) != str(required):
            yield f"options.{option}: {run.options.get(option)}, profile {profile.name} asks for {required}"


def _required_cells(runs: Sequence[Run], profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Yield backend, kernel and case of each required cell.

    A user's kernel needs every case of a default run; one of the backend's own, which may be for one format only, every
    input of each kind that it has; a composed one, whose name is its plan, only what the profile lists for it.
    """
    yield from asked_of_suite(runs, profile)
    tried = grouped((record for run in runs for record in run.records), lambda record: (record.backend, record.kernel))
    for (backend, kernel), records in tried.items():
        if is_users(records[0]):
            yield from ((backend, kernel, case) for case in profile.users)
        elif kernel not in profile.kernels_on(backend) and records[0].plan != kernel:
            kinds = [cases for cases in profile.own.values() if any(record.case in cases for record in records)]
            yield from ((backend, kernel, case) for cases in kinds for case in cases)


def asked_of_suite(runs: Iterable[Run], profile: Profile) -> list[tuple[str, str, str]]:
    """Return the cells of the suite's kernels that must be there: on each backend that a run without --kernel used."""
    whole = {record.backend for run in runs if not run.options.get("kernel") for record in run.records}
    suites = [(backend, *entry) for backend in sorted(whole) for entry in profile.kernels_on(backend).items()]
    return [(backend, kernel, case) for backend, kernel, cases in suites for case in cases]


def faults_of_waivers(runs: Iterable[Run], waivers: Sequence[Expected], checks: Collection[str]) -> Iterator[str]:
    """Yield why waivers do not hold, a line each: expired, about an unknown check, or covering nothing."""
    records = [record for run in runs for record in run.records]
    for waiver in waivers:
        name = f"waiver {waiver.cells}, {waiver.check}"
        if waiver.is_expired:
            yield f"{name}: expired on {waiver.expires}"
        if waiver.check not in checks:
            yield f"{name}: unknown check"
        elif not any(map(waiver.excuses, records)):
            yield f"{name}: covers nothing: every cell that it names meets the check, or it names none"


def result(records: Iterable[Record]) -> str:
    """Return `passed` where nothing failed or is undecided except what is waived, else `failed`."""
    return FAILED if any(record.fails for record in records) else PASSED


def summary(statement: Statement, runs: Sequence[Run], profile: Profile) -> str:
    """Return the summary, as Markdown, of what is handed in: its runs and the profile that they must satisfy."""
    records = apply_waivers(runs, statement.waivers)
    where = ", ".join(sorted({record.backend for record in records}))
    failed = [(record.id, "; ".join(record.reasons)) for record in records if record.fails]
    covered = [(record.id, record.excused or "") for record in records if record.excused is not None]
    waivers = [(waiver.cells, waiver.check, waiver.reason, str(waiver.expires)) for waiver in statement.waivers]
    parts: list[Part] = [
        one_line(f"# tiebreak statement, profile {statement.profile}, on {where}: {result(records)}"),
        f"{counts(records, WAIVED)}.",
        "## Platform",
        _grid(("what", "is"), _platform(statement, runs, profile)),
        "## Fell, without a waiver",
        *_failing(("cell", "why"), failed),
        "## Waived",
        *_failing(("cell", "reason"), covered),
        "## Waivers",
        _grid(("cells", "check", "reason", "last day"), waivers) if waivers else "None.",
        "## Biased or NaN",
        "Of the inputs on which rounding is known to fail: O biased beyond 0.05 ulp (99.9 % confidence), NaN or Inf.",
        _grid(("backend", "kernel", "inputs", "such as"), _biased(records, runs)),
    ]
    return grids.text(parts, "github") + "\n"


def _grid(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> Grid:
    """Return a table without control characters, which a file may carry in its names."""
    return Grid(headers, [list(map(one_line, row)) for row in rows])


def _failing(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> Sequence[Part]:
    more = f", of which {_LISTED} are shown" if len(rows) > _LISTED else ""
    return [f"{counted(len(rows), 'cell')}{more}.", _grid(headers, rows[:_LISTED])] if rows else ["None."]


def _platform(statement: Statement, runs: Sequence[Run], profile: Profile) -> Iterator[tuple[str, str]]:
    yield "profile", f"{profile.name} ({profile.about}), {statement.profile_hash[:_DIGITS]}"
    records = [record for run in runs for record in run.records]
    for backend, of_backend in sorted(grouped(records, lambda record: record.backend).items()):
        brought = {record.kernel: is_users(record) for record in of_backend}
        suite = brought.keys() & profile.kernels_on(backend).keys()
        names = [f"{name} (given by --kernel)" if brought[name] else name for name in sorted(brought.keys() - suite)]
        suites = [f"{counted(len(suite), 'kernel')} of the suite"] if suite else []
        yield f"on {backend}", ", ".join([*suites, *names])
    for name, value in runs[0].platform.items():
        if name == "stated" and isinstance(value, Mapping):
            yield from ((f"stated, not measured: {word}", str(text)) for word, text in value.items())
        elif value is not None and value != [] and name != "fingerprint":
            yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    fingerprints = {name: probes for run in runs for name, probes in run.platform.get("fingerprint", {}).items()}
    for backend, probes in fingerprints.items():
        yield f"fingerprint of {backend}", ", ".join(f"{name} {value}" for name, value in probes.items())
    for file, run in zip(statement.files, runs, strict=True):
        yield file.name, f"{counted(len(run.records), 'cell')}, SHA-256 {file.sha256}"


def _biased(records: Sequence[Record], runs: Sequence[Run]) -> Iterator[tuple[str, ...]]:
    """Yield a row for each kernel run on failure inputs: on how many, and which, it is biased or has NaN."""
    failure = {name for run in runs for name, about in run.cases.items() if about.failure}
    ran = (record for record in records if record.case in failure and record.outcome != SKIPPED)
    for (backend, kernel), of_kernel in grouped(ran, lambda record: (record.backend, record.kernel)).items():
        failing = [record for record in of_kernel if record.verdict in (BIASED, NONFINITE)]
        texts = [f"{record.case} {plain_text(record)}" for record in failing]
        yield backend, kernel, f"{len(failing)} of {len(of_kernel)}", first_few(texts, _NAMED)


KIND = FileKind(Statement)
