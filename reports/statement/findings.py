"""What keeps runs from being a statement of a profile, a line each.

What takes cases or kernels to tell, such as an answer that does not follow from its numbers:
`tiebreak.programs.verification`.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date

from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import SKIPPED, Run, record_id
from tiebreak.reports.statement.folder import Profile, Waiver, is_users, waived
from tiebreak.reports.tables.run import counted

_OF_THE_MOMENT = frozenset({"fingerprint", "memory_gib", "cores"})  # what may differ between runs of one platform
# How a suite is named, in words, and what to do where its files are not those.
_SHAPES = {
    "commit": ("[0-9a-f]{40}", "a commit's 40 hexadecimal digits", "commit them"),
    "wheel": (r"\S+ sha256:[0-9a-f]{64}", "a wheel's version and SHA-256", "install it anew"),
}


def faults_of_runs(runs: Mapping[str, Run], profile: Profile) -> Iterator[str]:
    """Why some runs, by the names of their files, are no statement of a profile.

    Returns:
        A line each: an interrupted run, a dirty checkout, another platform, other inputs, a cell that is missing or
        there twice, too few that ran.
    """
    yield from _of_one_platform(runs)
    for name, run in runs.items():
        if not run.ended:
            yield f"{name}: complete: the run was interrupted"
        if not run.records:
            yield f"{name}: records: none"
        yield from (f"{name}: {text}" for text in _of_inputs(run, profile))
    yield from _twice(runs)
    asked = dict.fromkeys(record_id(*cell, profile.format) for cell in _asked(list(runs.values()), profile))
    there = {record.id: record.outcome for run in runs.values() for record in run.records}
    yield from (f"missing: {name}, which profile {profile.name} asks for" for name in asked if name not in there)
    ran = sum(there.get(name, SKIPPED) != SKIPPED for name in asked)
    if not asked:
        yield f"no record of a cell that profile {profile.name} asks for"
    elif ran < profile.ran * len(asked):
        yield f"{ran} of {counted(len(asked), 'cell')} ran; profile {profile.name} asks for {profile.ran:.0%} of them"


def _of_one_platform(runs: Mapping[str, Run]) -> Iterator[str]:
    first_name, first = next(iter(runs.items()))
    for name, run in runs.items():
        yield from (f"{name}: {text}" for text in _of_suite(run))
        for field in sorted((run.platform.keys() & first.platform.keys()) - _OF_THE_MOMENT):
            ours, theirs = run.platform[field], first.platform[field]
            if ours != theirs:
                yield f"{name}: platform.{field}: {ours!r}, {theirs!r} in {first_name}: give one platform's files"


def _of_suite(run: Run) -> Iterator[str]:
    kind = next((kind for kind in _SHAPES if run.platform.get(kind)), None)
    if kind is None:
        yield "platform.commit: unknown: run the suite from a git checkout or an installed wheel"
        return
    shape, words, cure = _SHAPES[kind]
    value = str(run.platform[kind])
    if not re.fullmatch(f"{shape}(-dirty)?", value):
        yield f"platform.{kind}: {value!r}: not {words}: was the file edited?"
    elif value.endswith("-dirty"):
        yield f"platform.{kind}: {value}: files differ from the {kind}; {cure} and run again"


def _of_inputs(run: Run, profile: Profile) -> Iterator[str]:
    for option, asked in (("seed", profile.seed), ("heads", profile.heads)):
        if str(run.options.get(option)) != str(asked):
            yield f"options.{option}: {run.options.get(option)}, profile {profile.name} asks for {asked}"


def _twice(runs: Mapping[str, Run]) -> Iterator[str]:
    seen: dict[str, str] = {}
    for name, run in runs.items():
        for record in run.records:
            if record.id in seen:
                yield f"{name}: {record.id}: a second record of this cell, the first is in {seen[record.id]}"
            seen.setdefault(record.id, name)


def _asked(runs: Sequence[Run], profile: Profile) -> Iterator[tuple[str, str, str]]:
    """Backend, kernel and case of each cell that must be there.

    The suite's kernels have to be there on every backend that a run without --kernel has used. A user's kernel has
    every case of a default run; one of the backend's own, which may be for one format alone, every input of each kind
    that it has; a composed one, whose name is its plan, what the profile says of it alone.
    """
    yield from _asked_of_suite(runs, profile)
    tried = grouped((record for run in runs for record in run.records), lambda record: (record.backend, record.kernel))
    for (backend, kernel), records in tried.items():
        if is_users(records[0]):
            yield from ((backend, kernel, case) for case in profile.users)
        elif kernel not in profile.suite.get(backend, {}) and records[0].plan != kernel:
            kinds = [cases for cases in profile.own.values() if any(record.case in cases for record in records)]
            yield from ((backend, kernel, case) for cases in kinds for case in cases)


def _asked_of_suite(runs: Sequence[Run], profile: Profile) -> Iterator[tuple[str, str, str]]:
    whole = {record.backend for run in runs if not run.options.get("kernel") for record in run.records}
    for backend in sorted(whole):
        for kernel, cases in profile.suite.get(backend, {}).items():
            yield from ((backend, kernel, case) for case in cases)


def has_suite(runs: Sequence[Run], profile: Profile) -> bool:
    """Return whether cells of the suite's own kernels must be there: those can be run again on the emulation."""
    return any(True for _ in _asked_of_suite(runs, profile))


def faults_of_waivers(
    runs: Sequence[Run], waivers: Sequence[Waiver], checks: Collection[str], today: date
) -> Iterator[str]:
    """Why waivers do not hold on a day, a line each: expired, about an unknown check, or covering nothing."""
    records = [record for run in runs for record in run.records]
    for waiver in waivers:
        name = f"waiver {waiver.cells}, {waiver.check}"
        if waiver.expired(today):
            yield f"{name}: expired on {waiver.expires}"
        if waiver.check not in checks:
            yield f"{name}: unknown check"
        elif not any(map(waiver.excuses, records)):
            yield f"{name}: covers nothing: every cell that it names meets the check, or it names none"


def unwaived(runs: Sequence[Run], waivers: Sequence[Waiver]) -> Iterator[str]:
    """The cells that fell, or are not settled, without a waiver, a line each."""
    for record in waived(runs, waivers):
        if record.fails:
            yield f"{record.outcome}, and no waiver: {record.id}: {'; '.join(record.reasons)}"
