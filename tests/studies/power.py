"""`python -m tiebreak.studies.power`: Say which planted defects the suite catches, and whether it blames sound kernels.

Every defect goes through all scripted cases with ever more heads until one of them catches it. Then every sound twin
goes, at many seeds, through the cases that catch its defects.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tiebreak.cases.feature_cases import EVERY, with_features
from tiebreak.defects.kernel import SOUND
from tiebreak.defects.planted import DEFECTS, Defect, on, twin
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments import contract
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.questions import INVARIANCE, USAGE
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.cli import count
from tiebreak.reports.records.record import CRASHED, FAILED, MEASURED, PASSED, SKIPPED, Record
from tiebreak.studies.alarms import at_most
from tiebreak.studies.cells import CASES
from tiebreak.studies.pages import PageTable, measured_at, read_rows, table, write_rows
from tiebreak.studies.study import Study

TWINS = Path(__file__).with_name("twins.csv")
# Normal numbers, with gradients, as `--cases random --features block_mask` has them.
_ADDED = (("random_causal", "softcap=2", "window=9"), ("random", "block_mask"))
EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *map(OneCall, EVERY),
        *contract.KIND.experiments,
        *(OneCall(CASES[name]).on_another(partial(with_features, words=words)) for name, *words in _ADDED),
        *USAGE.experiments,
        *INVARIANCE.experiments,
    )
}
_PLACES = {name: place for place, name in enumerate(EXPERIMENTS)}
_FORMATS = {fmt.name: fmt for fmt in (BF16, FP16)}
_HEADS = "16,32,64,128,256"
_BLAMED = (FAILED, CRASHED)


@dataclass(frozen=True)
class Cells:
    """Some kernels in one case, whose inputs they share."""

    case: str
    fmt: str
    kernels: str  # planted ones or twins, with spaces between
    heads: int  # that a cell draws at first
    seed: int = 1


#: Of each kernel its outcome, the heads that it drew, and the checks that failed.
Outcomes = dict[str, list[str]]


@dataclass(frozen=True)
class Caught:
    """What catches a defect first."""

    case: str  # the one that catches it with the fewest heads
    checks: str  # that failed there, with spaces between
    heads: int  # that every case drew at first


@dataclass(frozen=True)
class TwinRow:
    """A row of twins.csv."""

    twin: str
    heads: int  # drawn at first
    cases: int  # those that caught a defect of the twin's first
    seeds: int
    cells: int  # that ran
    blamed: int  # that failed or crashed
    undecided: int  # that stayed undecided


def run_cells(task: Cells) -> Outcomes:
    """Run kernels in one case."""
    bench, outcomes = Workbench(Settings(seed=task.seed, heads=task.heads)), Outcomes()
    for kernel in task.kernels.split():
        record = run_one(kernel, task.case, task.fmt, bench)
        not_passed = [name for name, answer in record.answers.items() if answer.passed is False]
        outcomes[kernel] = [record.outcome, str(record.heads or task.heads), *not_passed]
    return outcomes


STUDY = Study("power", run_cells, seconds=10.0)


def run_one(name: str, case: str, fmt: str, bench: Workbench) -> Record:
    """Run one planted kernel, or one twin, in one case."""
    defect = DEFECTS.get(name)
    kernel: Kernel = defect.kernel if defect else twin(name)
    backend = on(defect.arithmetic) if defect else on()
    return run_cell(Cell(backend, kernel, EXPERIMENTS[case], _FORMATS[fmt]), bench)


def defect_tasks(names: Iterable[str], heads: int) -> Iterator[Cells]:
    """Yield some defects in every case at the first seed, case by case."""
    by_format: dict[str, list[str]] = {}
    for name in names:
        by_format.setdefault(DEFECTS[name].fmt.name, []).append(name)
    for case in EXPERIMENTS:
        yield from (Cells(case, fmt, " ".join(kernels), heads) for fmt, kernels in by_format.items())


def caught(results: Mapping[Cells, Outcomes]) -> dict[str, Caught]:
    """Return, of each defect that fails: in which case with the fewest heads, and by which checks."""
    found: dict[str, tuple[tuple[int, int], Caught]] = {}
    for task, outcomes in results.items():
        for defect, (outcome, drawn, *not_passed) in outcomes.items():
            place = (int(drawn), _PLACES[task.case])
            if outcome in _BLAMED and (defect not in found or place < found[defect][0]):
                found[defect] = place, Caught(task.case, " ".join(not_passed), task.heads)
    return {defect: caught for defect, (_, caught) in found.items()}


def twin_tasks(defects: Iterable[Defect], levels: Sequence[int], seeds: int) -> Iterator[Cells]:
    """Yield every sound twin in the cases that catch its defects, at every seed.

    Users' kernels, whose checks need few heads, draw the fewest.
    """
    together: dict[tuple[str, str, int], set[str]] = {}
    for defect in defects:
        heads = levels[0] if defect.twin in SOUND else levels[-1]
        together.setdefault((defect.case, defect.fmt.name, heads), set()).add(defect.twin)
    for seed in range(1, seeds + 1):
        for (case, fmt, heads), twins in sorted(together.items()):
            yield Cells(case, fmt, " ".join(sorted(twins)), heads, seed)


def twin_rows(results: Mapping[Cells, Outcomes]) -> list[TwinRow]:
    """Return a row for every sound twin: its cells over all seeds, and how they came out."""
    outcomes: dict[tuple[str, int], list[tuple[Cells, str]]] = {}
    for task, each in results.items():
        for name, (outcome, *_) in each.items():
            outcomes.setdefault((name, task.heads), []).append((task, outcome))
    rows = []
    for (name, heads), cells in sorted(outcomes.items()):
        counts = Counter(outcome for _, outcome in cells)
        cases, seeds = len({(task.case, task.fmt) for task, _ in cells}), len({task.seed for task, _ in cells})
        ran, blamed = counts.total() - counts[SKIPPED], sum(counts[outcome] for outcome in _BLAMED)
        undecided = ran - blamed - counts[PASSED] - counts[MEASURED]
        rows.append(TwinRow(name, heads, cases, seeds, ran, blamed, undecided))
    return rows


def report(twins: Sequence[TwinRow]) -> Iterator[str]:
    """Yield what the page says: what each check catches, and how often sound twins are blamed."""
    alone = Counter(defect.checks for defect in DEFECTS.values())
    of_check = Counter(name for defect in DEFECTS.values() for name in defect.checks.split())
    rows = ((f"`{name}`", str(number), str(alone[name])) for name, number in of_check.most_common())
    yield from table(("check", "defects that it catches", "that it alone catches"), rows)
    if not twins:
        return
    most, fewest = (choose(twins, key=lambda row: row.cells) for choose in (max, min))
    blamed, undecided, ran = (sum(getattr(row, name) for row in twins) for name in ("blamed", "undecided", "cells"))
    yield ""
    yield (
        f"{blamed} of {ran:,} cells of {len(twins)} sound twins are blamed, {undecided} are undecided"
        " ([`twins.csv`](../tests/studies/twins.csv)). At 95 % confidence, at most one cell in"
        f" {1 / at_most(most.blamed, most.cells):,.0f} of `{most.twin}` is blamed, and one in"
        f" {1 / at_most(fewest.blamed, fewest.cells):,.0f} of `{fewest.twin}`, the twin with the fewest cells."
    )


def first_catches(found: Mapping[str, Caught]) -> Iterator[str]:
    """Yield a line for each defect that nothing catches, or another case sooner than that of its row."""
    for name, defect in DEFECTS.items():
        if name not in found:
            yield f"{name} is missed"
        elif found[name].case != defect.case:
            yield f"{name} fails first in {found[name].case} by {found[name].checks}, with {found[name].heads} heads"


def _frozen() -> Iterator[str]:
    yield from report(read_rows(TWINS, TwinRow))
    yield from ("", f"The sound twins were measured at {measured_at(TWINS)}.")


TABLES = [PageTable("power.md", "make studies STUDY=power", _frozen)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 0, 1 where one is missed or a twin blamed, 2 for bad usage, 130 after Ctrl-C."""
    parser = STUDY.parser(__doc__)
    parser.add_argument("--seeds", type=count, default=200, metavar="N", help="of the sound twins (default: 200)")
    parser.add_argument("--heads", default=_HEADS, metavar="N,N", help=f"heads drawn at first (default: {_HEADS})")
    parser.add_argument("--write", action="store_true", help="freeze the twins' results, and renew the page")
    options = parser.parse_args(arguments)
    levels = sorted({int(heads) for heads in options.heads.split(",") if heads.strip().isdecimal()})
    if not levels or levels[0] < 2:
        parser.error("--heads is a list of integers from 2 on")
    found: dict[str, Caught] = {}
    for heads in levels:
        found |= caught(STUDY.results(defect_tasks((name for name in DEFECTS if name not in found), heads), options))
    twins = twin_rows(STUDY.results(twin_tasks(DEFECTS.values(), levels, options.seeds), options))
    if options.write:
        write_rows(TWINS, twins)
        TABLES[0].renew()
    print(*first_catches(found), *report(twins), sep="\n")
    return int(len(found) < len(DEFECTS) or any(row.blamed for row in twins))


if __name__ == "__main__":
    sys.exit(main())
