"""`tiebreak statement FILE... -o DIR`: what a lab hands in; `tiebreak statement --verify DIR`: whether it holds."""

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch

from tiebreak.laboratory.statement import format as statements
from tiebreak.laboratory.statement.format import FILE, SUMMARY, WAIVED, Profile, Statement
from tiebreak.laboratory.statement.profiles import PROFILES, profile
from tiebreak.laboratory.statement.verification import Judged, cells_and_faults, recomputed, sample
from tiebreak.matrix.checks import checks
from tiebreak.matrix.memory import keep_memory
from tiebreak.matrix.options import NO_BUDGET
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.programs.files.backend import FILES
from tiebreak.reports.cli import FAILED, PASSED, Parser, count
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.expected import Expected
from tiebreak.reports.names import first_few, unknown
from tiebreak.reports.records import store
from tiebreak.reports.records.record import SKIPPED, Run
from tiebreak.reports.tables.run import counted, counts

_RECORDS = re.compile(r"records-[0-9]+\.json")  # names of a statement's copies
_STATED = "platform, fingerprints, options, why a backend can't run, seconds, evidence of what was not recomputed"
_NAMED = 4  # kernels that a line names


def main(arguments: Sequence[str]) -> int:
    """Run the verb `statement`; see `tiebreak.reports.cli.main`."""
    rest = [word for word in arguments if word != "--verify"]
    return state(rest) if len(rest) == len(arguments) else verify(rest)


def state(arguments: Sequence[str]) -> int:
    """Write a statement; the exit code is 1 if its result is a failure."""
    about = "A folder to hand in: records, digests, waivers, a summary."
    more = "tiebreak statement --verify DIR: whether one holds; --verify --help says more"
    parser = Parser(prog="tiebreak statement", description=about, epilog=more)
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of one platform's runs")
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="folder to write")
    profiles = "; ".join(f"{name}: {selector.about}" for name, selector in PROFILES.items())
    parser.add_argument("--profile", required=True, metavar="NAME", help=f"which cells must be there: {profiles}")
    waivers_help = "TOML file of expected failures, each with a last day"
    parser.add_argument("--waivers", type=Path, metavar="FILE", help=waivers_help)
    options = parser.parse_args(arguments)
    profile = _profile(options.profile)
    waivers = [] if options.waivers is None else statements.read_waivers(options.waivers, checks())
    runs = _write(options.files, options.output, profile, waivers)
    records = statements.apply_waivers(runs, waivers)
    result = statements.result(records)
    print(f"statement: {options.output}: profile {profile.name}, {counts(records, WAIVED)}: {result}")
    return PASSED if result == "passed" else FAILED


def verify(arguments: Sequence[str]) -> int:
    """Check a statement; the exit code is 1 if something is wrong with it."""
    parser = Parser(prog="tiebreak statement --verify", description="Whether a statement holds. No device is needed.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="what `tiebreak statement` has written")
    parser.add_argument("--profile", metavar="NAME", help="that it has to be of (default: that which it names)")
    parser.add_argument("--sample", type=count, metavar="N", help="records to recompute (default: the profile's)")
    parser.add_argument("--seed", type=count, default=1, metavar="N", help="another one draws others (default: 1)")
    options = parser.parse_args(arguments)
    wanted = None if options.profile is None else _profile(options.profile)
    torch.set_num_threads(1)  # as the cells were run: sums are added in one order
    keep_memory()
    if (options.folder / FILE).is_symlink():
        raise UsageError(f"{options.folder / FILE}: a link; a statement has its files in its folder")
    statement = store.load(options.folder / FILE, Statement)
    profile = wanted or _profile(statement.profile, FILE)
    faults, told = _problems(options.folder, statement, profile, options.sample, options.seed)
    print("\n".join(map(store.one_line, [f"refused: {text}" for text in faults] or told)))
    return FAILED if faults else PASSED


def _profile(name: str, where: str = "--profile") -> Profile:
    if name not in PROFILES:
        raise UsageError(f"{where}: {unknown('profile', name, PROFILES, '')}")
    return profile(name)


def _write(files: Sequence[Path], folder: Path, profile: Profile, waivers: Sequence[Expected]) -> list[Run]:
    """Write a statement, its own file last, and return its runs; UsageError where they are no statement."""
    older = list(folder.iterdir()) if folder.is_dir() else []
    if (folder.exists() and not folder.is_dir()) or not all(
        path.name in (FILE, SUMMARY) or _RECORDS.fullmatch(path.name) for path in older
    ):
        raise UsageError(f"-o {folder}: there is something else in it; name a folder that is new or empty")
    contents = [store.content_of(path) for path in files]
    read = [(path, store.decoded(content, path, Run)) for path, content in zip(files, contents, strict=True)]
    store.refuse_repeated(read)
    runs = {str(path): run for path, run in read}
    records, faults = _judged(runs, profile, waivers)
    if faults:
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        raise UsageError(store.one_line(f"{faults[0]}{more}; {_complete(records, list(runs.values()), profile)}"))
    copies = {f"records-{number}.json": content for number, content in enumerate(contents, 1)}
    statement = statements.statement_of(copies, profile, waivers)
    summary = statements.summary(statement, list(runs.values()), profile)
    for path in older:
        path.unlink()
    for name, content in {**copies, SUMMARY: summary.encode(), FILE: store.as_text(statement).encode()}.items():
        store.write_text(content.decode(), folder / name)
    return list(runs.values())


def _judged(runs: Mapping[str, Run], profile: Profile, waivers: Sequence[Expected]) -> tuple[list[Judged], list[str]]:
    """Return records, by their files' names, with their cells, and what is wrong that no kernel has to be run for."""
    by_file = {name: cells_and_faults(run, profile) for name, run in runs.items()}
    faults = list(statements.faults_of_runs(runs, profile))
    faults += [f"{name}: {text}" for name, (_, texts) in by_file.items() for text in texts]
    faults += statements.faults_of_waivers(runs.values(), waivers, checks())
    return [each for own, _ in by_file.values() for each in own], faults


def _complete(records: Sequence[Judged], runs: Sequence[Run], profile: Profile) -> str:
    """Return the command that makes a complete record of what some runs were given."""
    where = records[0].settings.matrix if records else ("tests/matrix",)
    if records and all(each.cell.backend.name == FILES.name for each in records):
        words = ["--cases", ",".join(profile.users), "--seed", str(profile.seed), "--heads", str(profile.heads)]
        return f"a complete record: {shlex.join(['tiebreak', 'export', 'NEW', *words])}, then tiebreak judge"
    backends = ",".join(sorted({record.backend for run in runs for record in run.records}))
    words = ["--backend", backends] if backends else []
    for name in ("kernel", "declare", "plan"):
        given = dict.fromkeys(value for run in runs for value in str(run.options.get(name) or "").split())
        words += [word for value in given for word in (f"--{name}", value)]
    words += ["--seed", str(profile.seed), "--heads", str(profile.heads), "--budget", NO_BUDGET]
    words += ["--save", "run"]
    return f"a complete record: {shlex.join(['pytest', '-n', 'auto', *where, *words])}"


def _problems(
    folder: Path, statement: Statement, profile: Profile, size: int | None, seed: int
) -> tuple[list[str], list[str]]:
    """Return the faults of a statement; if there is none, what was checked and what can't be."""
    if statement.profile != profile.name:
        return [f"{FILE}: of profile {statement.profile}, not of {profile.name}"], []
    if statement.profile_hash != profile.hash:
        told = f"of this tiebreak is {profile.hash[:16]}: verify with the release that it was made with"
        return [f"{FILE}: of profile {profile.name}, {statement.profile_hash[:16]}; profile {profile.name} {told}"], []
    here = {path.name: path for path in folder.iterdir()}
    there = {name: path.read_bytes() for name, path in here.items() if path.is_file() and not path.is_symlink()}
    faults = [f"{name}: a link, or no regular file" for name in sorted(here.keys() - there.keys())]
    faults += _file_faults(statement, there)
    runs: dict[str, Run] = {}
    for name in [file.name for file in statement.files if _RECORDS.fullmatch(file.name) and file.name in there]:
        try:
            runs[name] = store.decoded(there[name], folder / name, Run)
        except store.UnreadableRecordsError as error:
            faults.append(str(error))
    if len(runs) < len(statement.files) or not runs:
        return faults or [f"{FILE}: files: none"], []
    summary = statements.summary(statement, list(runs.values()), profile).encode()
    faults += [f"{SUMMARY}: not what the records come to"] if there.get(SUMMARY, summary) != summary else []
    in_records, checked = problems_of_records(runs, statement.waivers, profile, size, seed)
    return faults + in_records, checked


def _file_faults(statement: Statement, there: Mapping[str, bytes]) -> Iterator[str]:
    """Yield files that are not as the statement lists them."""
    listed = {file.name: file.sha256 for file in statement.files}
    if len(listed) < len(statement.files):
        yield f"{FILE}: files: one is listed twice"
    yield from (f"{name}: not a file of the statement" for name in sorted(there.keys() - {FILE, SUMMARY, *listed}))
    if SUMMARY not in there:
        yield f"{SUMMARY}: missing"
    for name, sha256 in listed.items():
        if not _RECORDS.fullmatch(name):
            yield f"{FILE}: files: {name!r} is no name of a file of records"
        elif name not in there:
            yield f"{name}: missing"
        elif store.digest(there[name]) != sha256:
            yield f"{name}: SHA-256 is not as in {FILE}: the file was edited"


def problems_of_records(
    runs: Mapping[str, Run], waivers: Sequence[Expected], profile: Profile, size: int | None, seed: int
) -> tuple[list[str], list[str]]:
    """Return the faults of a statement's records; if there is none, what was checked and what can't be.

    The emulation recomputes the numbers of `size` records, or of as many as the profile asks for, chosen by `seed`.
    """
    records, faults = _judged(runs, profile, waivers)
    failed = [record for record in statements.apply_waivers(runs.values(), waivers) if record.fails]
    faults += [f"{each.outcome}, and no waiver: {each.id}: {'; '.join(each.reasons)}" for each in failed]
    needed = profile.recomputed if statements.asked_of_suite(runs.values(), profile) else 0
    chosen = sample(records, profile.recomputed if size is None else size, seed)
    if len(chosen) < needed:
        faults.append(f"{counted(len(chosen), 'cell')} recomputed; profile {profile.name} asks for {needed}")
    if not faults:  # what contradicts itself is not worth the time
        bench = Workbench(Settings(profile.seed, profile.heads))
        faults = [f"{each.record.id}: {text}" for each in chosen for text in recomputed(each, bench)]
    return faults, [] if faults else list(_checked_lines(records, chosen, profile))


def _checked_lines(records: Sequence[Judged], chosen: Sequence[Judged], profile: Profile) -> Iterator[str]:
    """Yield the checks of a correct statement, and those that need its device."""
    able, own = sum(each.is_recomputable for each in records), sum(each.cell.backend.predicts for each in chosen)
    yield (
        f"verified: profile {profile.name}, {counted(len(records), 'cell')}: digests, cells, commands, verdicts,"
        f" answers, outcomes, waivers; of {able} cells that the emulation can tell of {len(chosen)} recomputed"
        f" ({own} its own, {len(chosen) - own} predictions of a device's)"
    )
    yield "NOT checked: that the records came from the device that they name; that its bits repeat"
    yield f"NOT checked, as it is stated: {_STATED}"
    if any(each.cell.backend.name == FILES.name for each in records):
        yield "NOT measured: the device of outputs from files, which device.json states; cpu and more are the judge's"
    skipped = [judged for judged in records if judged.record.outcome == SKIPPED]
    unknown = [each for each in records if not each.is_recomputable and each.record.outcome != SKIPPED]
    for cells, what in (
        (unknown, "the numbers of {}, which no emulation computes: training runs, and the kernels {}"),
        (skipped, "why {} skipped: of the kernels {}"),
    ):
        if cells:
            names = list(dict.fromkeys(judged.record.kernel for judged in cells))
            yield f"NOT checked: {what.format(counted(len(cells), 'cell'), first_few(names, _NAMED))}"
