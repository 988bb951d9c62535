"""Sides of `tiebreak pair` that are folders of calls with answers: of two engines, or of one and a kernel that is here.

The plan of such a side is told by the calls that are compared: it was asked no others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from tiebreak.cases.captured import captured_cases
from tiebreak.cases.case import Case
from tiebreak.cases.feature_cases import EVERY
from tiebreak.kernels.external.kernels import external_kernel
from tiebreak.kernels.external.options import LoadError
from tiebreak.kernels.formats import Formats
from tiebreak.matrix.identification.asking import ProbedKernel
from tiebreak.matrix.identification.candidates import accepted, on_device
from tiebreak.matrix.pairs import Side
from tiebreak.matrix.workbench import CaseBench, Settings
from tiebreak.programs.files import backend, judge
from tiebreak.programs.files.backend import FILES, TARGET, CallFolder
from tiebreak.programs.identify import FORMATS
from tiebreak.reports.calls import MANIFEST
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import split
from tiebreak.reports.records.record import FOLLOWED
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

_FITTED = 3  # cases by which a plan is told


def folder_of(target: object) -> CallFolder | None:
    """Return a folder of calls that all have an answer; None: the target is none. UsageError: an answer is wrong."""
    if not isinstance(target, str) or not (Path(target) / MANIFEST).is_file():
        return None
    backend.opened.cache_clear()
    folder = backend.opened(target)
    if fault := next(folder.faults(), None):
        raise UsageError(fault)
    return folder


def probed(folder: CallFolder, name: str, declare: Sequence[str]) -> ProbedKernel:
    """Return the kernel whose answers a folder has."""
    options = folder.manifest.options
    if options["dtype"] not in FORMATS:
        raise UsageError(f"{folder.path}: its calls are in {options['dtype']}: export them in one of them")
    flags = [f"{word}={value}" for word, value in judge.declared_of(folder, name).items()]
    try:
        kernel = external_kernel(TARGET, flags=[*flags, *declare])
    except LoadError as error:
        raise UsageError(f"{folder.path}: {error}") from error
    return ProbedKernel(FILES.assuming(str(folder.path)), kernel, FORMATS[options["dtype"]])


def cases_of(folders: Sequence[CallFolder | None]) -> dict[str, tuple[Case, Case]]:
    """Return the cases that the folders have in common, of A and of B; a side that is here takes the other's."""
    each = [_cases(folder) for folder in folders if folder is not None]
    asked = {folder.manifest.options["seed"] for folder in folders if folder is not None}
    if not (common := [name for name in each[0] if name in each[-1]]) or len(asked) > 1:
        raise UsageError(f"{' and '.join(str(folder.path) for folder in folders if folder)}: no case is in both")
    return {name: (each[0][name], each[-1][name]) for name in common}


def _cases(folder: CallFolder) -> Mapping[str, Case]:
    options = folder.manifest.options
    if options.get("captured") == ".":
        return {case.name: case for case in captured_cases(folder.path)}
    named = split(options["cases"])
    return {case.name: case for case in EVERY if case.name in named}


def settings_of(folders: Sequence[CallFolder | None]) -> Settings:
    """Return the seed and the heads of folders' calls."""
    options = [folder.manifest.options for folder in folders if folder is not None]
    return Settings(int(options[0]["seed"]), max(int(each["heads"]) for each in options))


def side_of(name: str, asked: ProbedKernel, cases: Sequence[Case], settings: Settings) -> Side:
    """Return a side with the plan that it declares, or that has most of its bits."""
    side = Side(name, asked.backend, asked.kernel, asked.kernel.declaration, known=True)
    if side.plan is not None:
        return side
    plans, shares = accepted(on_device(asked.backend), Formats.of(asked.fmt)), dict[str, list[float]]()
    for case in cases[:_FITTED]:
        batch = CaseBench(case, asked.fmt, settings).batch(0)
        if (answer := asked.answer(case.name, batch)) is not None:
            for plan, fit in batch.fits(answer.o, plans).items():
                shares.setdefault(plan, []).append(fit.bits)
    if not shares:
        return replace(side, known=False, rests_on="; ".join(asked.refused.values()))
    best = max(shares, key=lambda plan: sum(shares[plan]))
    share = sum(shares[best]) / len(shares[best])
    known = share >= FOLLOWED
    rests_on = f"{percent(share)} of {asked.backend.evidence} on {counted(len(shares[best]), 'input')}"
    return replace(
        side, plan=plans[best], known=known, rests_on=f"{'' if known else 'nearest, none is known: '}{rests_on}"
    )
