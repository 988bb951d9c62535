"""`tiebreak statement FILE... -o DIR`: what a lab hands in; `tiebreak statement --verify DIR`: whether it holds."""

import argparse
import itertools
import os
import re
import shlex
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
from msgspec.structs import replace

from tiebreak.backends.backend import EMULATION
from tiebreak.backends.registry import BACKENDS
from tiebreak.matrix.checks import checks
from tiebreak.matrix.memory import keep_memory
from tiebreak.matrix.run import judging
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.programs import rejudgement as rejudging
from tiebreak.programs.profiles import PROFILES, profile
from tiebreak.reports.cli import FELL, HELD, Parser, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import expected
from tiebreak.reports.names import unknown
from tiebreak.reports.records import store
from tiebreak.reports.records.record import PASSING, SKIPPED, Record, Run, record_id
from tiebreak.reports.statement import findings as statement_findings
from tiebreak.reports.statement import folder as statements
from tiebreak.reports.statement import summary as statement_summary
from tiebreak.reports.statement.folder import FILE, SUMMARIES, Profile, Statement
from tiebreak.reports.tables.run import counted

_COPY = re.compile(r"records-[0-9]+\.json")  # name of a copy of a file of records
_RAN = 0.9  # of the cells handed in, which have to have run: of the matrix on a CPU 98 % do
_SAMPLE = 20  # records that the emulation is run for again, by default


def main(arguments: Sequence[str]) -> int:
    """The verb `statement`; see `tiebreak.reports.cli.main`."""
    rest = [word for word in arguments if word != "--verify"]
    return state(rest) if len(rest) == len(arguments) else verify(rest)


def state(arguments: Sequence[str]) -> int:
    """Write a statement.

    Returns:
        0 if every cell holds or is waived, 1 if the statement says that it fell.
    """
    parser = Parser(
        prog="tiebreak statement",
        description="A folder to hand in: records, digests, waivers, a summary.",
        epilog="tiebreak statement --verify DIR: whether one holds; --verify --help says more",
    )
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of one platform's runs")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    profiles = "; ".join(f"{name}: {selector.about}" for name, selector in PROFILES.items())
    parser.add_argument("--profile", required=True, metavar="NAME", help=f"which cells must be there: {profiles}")
    parser.add_argument(
        "--waivers", type=Path, metavar="FILE", help="TOML file of expected failures, each with a last day"
    )
    options = parser.parse_args(arguments)
    asked = _profile(options.profile)
    entries = () if options.waivers is None else expected.waivers(options.waivers, checks())
    statement = write(options.files, options.output, asked, entries, date.today())
    print(f"statement: {options.output}: profile {asked.name}, {_counts(statement)}: {statement.result}")
    return HELD if statement.result == "held" else FELL


def verify(arguments: Sequence[str]) -> int:
    """Say whether a statement holds.

    Returns:
        0 if nothing is wrong with the statement, 1 otherwise.
    """
    parser = Parser(prog="tiebreak statement --verify", description="Whether a statement holds. No device is needed.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `tiebreak statement` has written")
    parser.add_argument(
        "--profile", metavar="NAME", help="the profile that it has to be of (default: that which it names)"
    )
    parser.add_argument(
        "--sample", type=count, default=_SAMPLE, metavar="N", help=f"records to recompute (default: {_SAMPLE})"
    )
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="another one draws others (default: 1)")
    parser.add_argument(
        "--as-of", type=_day, default=None, metavar="DAY", help="the day on which waivers have to hold (default: today)"
    )
    options = parser.parse_args(arguments)
    wanted = None if options.profile is None else _profile(options.profile)
    torch.set_num_threads(1)  # as the cells were run: sums are added in one order
    keep_memory()
    check = Verification(options.folder, wanted, options.as_of or date.today(), options.sample, options.seed)
    findings = check.findings()
    print("\n".join([store.one_line(f"refused: {text}") for text in findings] or [check.summary]))
    return FELL if findings else HELD


def _profile(name: str) -> Profile:
    if name not in PROFILES:
        raise UsageError(f"--profile: {unknown('profile', name, PROFILES, '')}")
    return profile(name)


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text}: expected a day such as 2027-06-30") from None


def _counts(statement: Statement) -> str:
    return ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in statement.counts.items())


def write(
    files: Sequence[Path], folder: Path, asked: Profile, entries: Sequence[expected.Expected], today: date
) -> Statement:
    """Write a statement, whole or not at all.

    Args:
        files: of records.
        folder: to write; may be an older statement's, which is replaced.
        asked: the profile.
        entries: what excuses cells.
        today: the day on which the entries have to hold.

    Returns:
        What was written.

    Raises:
        UsageError: the records are no statement of the profile, a waiver does not hold, or there is something else in
            the folder.
        tiebreak.reports.records.store.UnreadableRecordsError: a file can't be read.
        tiebreak.reports.records.store.UnwritableFolderError: the folder can't be written.
    """
    _check_free(folder)
    contents = [store.content_of(path) for path in files]
    runs: list[Run] = []
    for path, content in zip(files, contents, strict=True):
        run = store.parse(content, path)
        store.refuse_repeated(run, path, zip(files, runs, strict=False))
        runs.append(run)
    waivers = [statements.waiver(entry) for entry in entries]
    named = {str(path): run for path, run in zip(files, runs, strict=True)}
    _refuse(itertools.chain(_of_records(named, asked), statement_findings.of_waivers(runs, waivers, checks(), today)))
    names = [f"records-{number}.json" for number in range(1, len(files) + 1)]
    statement = statements.derive(runs, contents, names, asked, waivers)
    _write_whole(folder, {**dict(zip(names, contents, strict=True)), **_texts(statement, runs, asked)})
    return statement


def _of_records(named: Mapping[str, Run], asked: Profile) -> Iterator[str]:
    """What is wrong with the records, whoever hands them in."""
    yield from statement_findings.of_runs(named, asked, judging())
    for name, run in named.items():
        for record in run.records:
            yield from (f"{name}: {record.id}: {text}" for text in _of_identity(record))
    records = [record for run in named.values() for record in run.records]
    ran = sum(record.outcome != SKIPPED for record in records)
    if ran < _RAN * len(records):
        yield f"{ran} of {counted(len(records), 'cell')} ran; profile {asked.name} asks for {_RAN:.0%} of them"
    if statement_findings.nothing_of(list(named.values()), asked):
        yield f"no record of a cell that profile {asked.name} asks for"


def _of_identity(record: Record) -> Iterator[str]:
    """What a record says of itself that does not go together."""
    if record.id != record_id(record.backend, record.kernel, record.case, record.format):
        yield "id: not that of its backend, kernel, case and format"
    if record.backend not in BACKENDS:
        yield f"backend: {unknown('backend', record.backend, BACKENDS, '')}"
    if record.shown is not None and record.heads < 1:
        yield f"heads: {record.heads}, and there is a result"
    if record.excused is not None and record.outcome in PASSING:
        yield "excused: and nothing fell"
    words = shlex.split(record.command)
    if words[:1] != ["pytest"] or shlex.join(words) != record.command:
        yield "command: not one that runs the cell again"


def _refuse(findings: Iterator[str]) -> None:
    lines = list(findings)
    if lines:
        more = f" (and {len(lines) - 1} more)" if len(lines) > 1 else ""
        raise UsageError(store.one_line(f"{lines[0]}{more}"))


def _texts(statement: Statement, runs: Sequence[Run], asked: Profile) -> dict[str, bytes]:
    markdown, html = SUMMARIES
    texts = {
        FILE: statements.as_text(statement),
        markdown: statement_summary.markdown(statement, runs, asked),
        html: statement_summary.html(statement, runs, asked),
    }
    return {name: text.encode() for name, text in texts.items()}


def _check_free(folder: Path) -> None:
    """Refuse a folder that has something else in it than an older statement."""
    if folder.is_dir() and not folder.is_symlink():
        there = {path.name for path in folder.iterdir()}
        if there and not (FILE in there and all(_ours(name) for name in there)):
            raise UsageError(f"-o {folder}: there is something else in it; name a folder that is new or empty")
    elif folder.exists() or folder.is_symlink():
        raise UsageError(f"-o {folder}: not a folder; name one that is new or empty")


def _ours(name: str) -> bool:
    return name in (FILE, *SUMMARIES) or _COPY.fullmatch(name) is not None


def _write_whole(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Through a folder beside it: a reader never sees half of a statement."""
    folder = folder.absolute()
    part, old = (folder.with_name(f".{folder.name}-{uuid.uuid4().hex}") for _ in range(2))
    try:
        part.mkdir(parents=True)
        for name, content in contents.items():
            (part / name).write_bytes(content)
        if folder.exists():
            os.replace(folder, old)
        os.replace(part, folder)
    except OSError as error:
        shutil.rmtree(part, ignore_errors=True)
        raise store.UnwritableFolderError(f"cannot write {folder}: {error.strerror or error}") from error
    shutil.rmtree(old, ignore_errors=True)


@dataclass
class Verification:
    """One look at a statement."""

    folder: Path
    wanted: Profile | None  # that it has to be of; None: the one that it names
    today: date  # the day on which waivers have to hold
    size: int  # of the sample that is recomputed
    seed: int  # of the sample
    summary: str = ""  # what was checked and what was not, once nothing is wrong

    def findings(self) -> list[str]:
        """What is wrong with it, a line each; what makes all else senseless stands alone.

        Raises:
            tiebreak.reports.records.store.UnreadableRecordsError: `statement.json` can't be read.
        """
        statement = statements.read(self.folder)
        asked = self.wanted or (profile(statement.profile) if statement.profile in PROFILES else None)
        if asked is None:
            return [f"{FILE}: {unknown('profile', statement.profile, PROFILES, '')}"]
        if statement.profile != asked.name:
            return [f"{FILE}: of profile {statement.profile}, not of {asked.name}"]
        if statement.profile_hash != asked.hash:
            return [
                f"{FILE}: of profile {statement.profile}, {statement.profile_hash[:16]}; profile {asked.name} of this"
                f" tiebreak is {asked.hash[:16]}: verify with the release that it was made with"
            ]
        findings = list(self._of_files(statement))
        runs, unreadable = self._runs(statement)
        findings += unreadable
        if unreadable or not runs:
            return findings or [f"{FILE}: files: none"]
        findings += self._of_statement(statement, runs, asked)
        findings += _of_records(runs, asked)
        findings += statement_findings.of_waivers(list(runs.values()), statement.waivers, checks(), self.today)
        findings += statement_findings.of_outcomes(list(runs.values()), statement.waivers)
        findings += self._rejudged(runs, asked)
        self.summary = self.summary if not findings else ""
        return findings

    def _of_files(self, statement: Statement) -> Iterator[str]:
        """Files that are not as the statement lists them."""
        listed = {file.name: file for file in statement.files}
        if len(listed) < len(statement.files):
            yield f"{FILE}: files: one is listed twice"
        for name in sorted(file.name for file in self.folder.iterdir()):
            if name not in (FILE, *SUMMARIES, *listed):
                yield f"{name}: not a file of the statement"
        for name in (*SUMMARIES, *listed):
            if not _ours(name):
                yield f"{FILE}: files: {name!r} is no name of a file of records"
            elif not (self.folder / name).is_file():
                yield f"{name}: missing"
            elif name in listed and statements.digest((self.folder / name).read_bytes()) != listed[name].sha256:
                yield f"{name}: SHA-256 is not as in {FILE}: the file was edited"

    def _runs(self, statement: Statement) -> tuple[dict[str, Run], list[str]]:
        runs: dict[str, Run] = {}
        problems: list[str] = []
        for file in statement.files:
            if not _COPY.fullmatch(file.name) or not (self.folder / file.name).is_file():
                continue
            try:
                runs[file.name] = store.read(self.folder / file.name)
            except store.UnreadableRecordsError as error:
                problems.append(str(error))
        return runs, problems

    def _of_statement(self, statement: Statement, runs: Mapping[str, Run], asked: Profile) -> Iterator[str]:
        """What `statement.json` and the summaries say otherwise than the records."""
        contents = [(self.folder / name).read_bytes() for name in runs]
        derived = statements.derive(list(runs.values()), contents, list(runs), asked, statement.waivers)
        for name in ("suite", "platform", "kernels", "users", "counts", "result"):
            if getattr(statement, name) != getattr(derived, name):
                yield f"{FILE}: {name}: not what the records come to"
        cells = {file.name: file.cells for file in derived.files}
        if any(file.cells != cells.get(file.name, file.cells) for file in statement.files):
            yield f"{FILE}: files: cells: not what the records come to"
        # Other digests have been told of; the summaries need not be told of for them too.
        listed = {file.name: file.sha256 for file in statement.files}
        files = tuple(replace(file, sha256=listed[file.name]) for file in derived.files)
        for name, content in _texts(replace(derived, files=files), list(runs.values()), asked).items():
            path = self.folder / name
            if name != FILE and path.is_file() and path.read_bytes() != content:
                yield f"{name}: not what the records come to"

    def _rejudged(self, runs: Mapping[str, Run], asked: Profile) -> Iterator[str]:
        """Records that contradict themselves, and those of a sample that the emulation contradicts."""
        records = [record for run in runs.values() for record in run.records]
        for name, run in runs.items():
            for record in run.records:
                yield from (f"{name}: {record.id}: {text}" for text in rejudging.contradictions(record))
        chosen = rejudging.sample(records, self.size, self.seed)
        bench = Workbench(Settings(asked.seed, asked.heads))
        for record in records:
            if record.seed == asked.seed and record.outcome == SKIPPED and rejudging.could_run(record, bench):
                yield f"{record.id}: skipped ({record.skipped}), and the emulation can run it"
        for record in chosen:
            if record.seed == asked.seed:
                yield from (f"{record.id}: {text}" for text in rejudging.recomputed(record, asked.heads, bench))
        self.summary = _summary(asked, records, chosen)


def _summary(asked: Profile, records: Sequence[Record], chosen: Sequence[Record]) -> str:
    able = sum(map(rejudging.recomputable, records))
    own = sum(record.backend == EMULATION.name for record in chosen)
    return (
        f"verified: profile {asked.name}, {counted(len(records), 'cell')}: digests, cells, outcomes, verdicts, waivers;"
        f" of {able} cells that the emulation can tell of {len(chosen)} recomputed ({own} its own, {len(chosen) - own}"
        f" predictions of a device's); NOT shown: that the records came from the device that they name"
    )
