"""`python -m tiebreak.defects.power`: which planted defects the suite catches, with how few heads, and whom it blames.

Every defect goes through all scripted cases with ever more heads until one of them catches it. Then every sound twin
goes, at many seeds, through the cases that caught its defects. Each part of the run is a line in a file; a run that is
stopped goes on where it was.
"""

import argparse
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from tiebreak.backends.backend import CPU
from tiebreak.backends.provenance import CHECKOUT, commit
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.defects.planted import DEFECTS, USERS, Defect, on, twin
from tiebreak.kernels.formats import BF16, FP16
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.budget import ORDER_FILE
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.experiments.invariance import KnobTurned
from tiebreak.matrix.experiments.usage import Usage
from tiebreak.matrix.invariance.knobs import KNOBS
from tiebreak.matrix.memory import keep_memory
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.usage.questions import QUESTIONS
from tiebreak.matrix.workbench import Workbench
from tiebreak.programs.alarms import at_most
from tiebreak.programs.pages.tables import renew, table, write_rows
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import INTERRUPTED, Parser, count
from tiebreak.reports.records.record import CRASHED, FELL, HELD, MEASURED, SKIPPED, Record
from tiebreak.reports.tables.run import counted

PAGE = CHECKOUT / "docs" / "power.md"
SOURCE = "make studies STUDY=power"
CAUGHT, TWINS = (Path(__file__).with_name(name) for name in ("caught.csv", "twins.csv"))
CASES = {case.name: case for case in SCRIPTED}
# Normal numbers, with gradients, as `--cases random --features block_mask` has them.
_ADDED = (("random_causal", "softcap=2", "window=9"), ("random", "block_mask"))
EXPERIMENTS: Mapping[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        *map(Call, SCRIPTED),
        *(Call(CASES[name]).with_features(words) for name, *words in _ADDED),
        *map(Usage, QUESTIONS),
        *map(KnobTurned, KNOBS),
    )
}
_PLACES = {name: place for place, name in enumerate(EXPERIMENTS)}
_FORMATS = {fmt.name: fmt for fmt in (BF16, FP16)}
_HEADS = "16,32,64,128,256"
_NEEDED = 0.75  # of the defects, which the cases catch that a verdict needs
_WORKER_GIB = 2.0
_CELL_SECONDS = 0.3  # at 16 heads, about: for the first word on how long it takes
_BLAMED = (FELL, CRASHED)


@dataclass(frozen=True)
class PlantedCell:
    """One cell: a planted kernel or a twin, a case, a format."""

    kernel: str
    case: str
    fmt: str

    @property
    def id(self) -> str:
        """Of the cell, in the file."""
        return f"{self.kernel} {self.case} {self.fmt}"


@dataclass(frozen=True)
class Task:
    """The work of one process at a time."""

    seed: int
    heads: int  # that a cell draws at first
    cells: tuple[PlantedCell, ...]


@dataclass(frozen=True)
class Part:
    """The results of one task."""

    seed: int
    heads: int  # that a cell drew at first
    commit: str | None  # of the suite
    results: dict[str, list[str]]  # by cell: its outcome, the heads that it drew, the checks that were not met
    seconds: float  # of one process


@dataclass(frozen=True)
class Caught:
    """Where a defect falls, with as few heads as it takes."""

    at_first: int  # heads that every case drew at first
    cases: tuple[str, ...]  # in which it falls, those that drew the fewest heads first
    by: tuple[str, ...]  # checks that are not met in the first case


@dataclass(frozen=True)
class CaughtRow:
    """A row of caught.csv."""

    defect: str
    case: str  # the first that caught it; empty: it was missed
    checks: str  # that are not met there, with spaces between
    heads: int  # that every case drew at first


@dataclass(frozen=True)
class TwinRow:
    """A row of twins.csv."""

    twin: str
    heads: int  # drawn at first
    cases: int  # those that caught a defect of the twin's first
    seeds: int
    cells: int  # that ran
    blamed: int  # that fell or crashed
    undecided: int  # that stayed inconclusive


def run_task(task: Task) -> Part:
    """Run the cells of a task, case by case."""
    torch.set_num_threads(1)
    keep_memory()
    started, settings = time.monotonic(), Settings(seed=task.seed, heads=task.heads)
    results = {}
    for _, cells in groupby(task.cells, lambda planted: (planted.case, planted.fmt)):
        bench = Workbench(settings)
        for cell in cells:
            record = run_one(cell, bench)
            unmet = [name for name, answer in record.answers.items() if answer.met is False]
            results[cell.id] = [record.outcome, str(record.heads or task.heads), *unmet]
    return Part(task.seed, task.heads, commit(), results, round(time.monotonic() - started, 1))


def run_one(cell: PlantedCell, bench: Workbench) -> Record:
    """Run one planted kernel, or one twin, in one case."""
    defect = DEFECTS.get(cell.kernel)
    kernel: Kernel = defect.kernel if defect else twin(cell.kernel)
    backend = on(defect.arithmetic) if defect else on()
    return run_cell(Cell(backend, kernel, EXPERIMENTS[cell.case], _FORMATS[cell.fmt]), bench)


def everywhere(defects: Iterable[Defect], heads: int) -> list[Task]:
    """Some defects in every case at the first seed, a task for each case."""
    chosen = list(defects)
    return [
        Task(1, heads, tuple(PlantedCell(defect.name, case, defect.fmt.name) for defect in chosen))
        for case in EXPERIMENTS
    ]


def catches(parts: Iterable[Part]) -> dict[str, Caught]:
    """By defect, where it falls with the fewest heads at first; none where it never does."""
    caught: dict[str, Caught] = {}
    for heads, level in groupby(sorted(parts, key=lambda part: part.heads), lambda part: part.heads):
        fell: dict[str, dict[str, list[str]]] = {}
        for part in level:
            for cell, (outcome, *rest) in part.results.items():
                kernel, case, _ = cell.split(" ")
                if outcome in _BLAMED and kernel in DEFECTS:
                    fell.setdefault(kernel, {})[case] = rest
        for kernel, cases in fell.items():
            caught.setdefault(kernel, _caught(heads, cases))
    return caught


def _caught(at_first: int, cases: Mapping[str, list[str]]) -> Caught:
    first = sorted(cases, key=lambda case: (int(cases[case][0]), _PLACES[case]))
    return Caught(at_first, tuple(first), tuple(cases[first[0]][1:]))


def sound_cells(caught: Mapping[str, Caught]) -> tuple[PlantedCell, ...]:
    """Every twin in the cases that catch its defects first, ordered by case."""
    cells = {
        PlantedCell(defect.twin, caught[name].cases[0], defect.fmt.name)
        for name, defect in DEFECTS.items()
        if name in caught
    }
    return tuple(sorted(cells, key=lambda cell: (cell.case, cell.fmt, cell.kernel)))


def caught_rows(caught: Mapping[str, Caught]) -> list[CaughtRow]:
    """A row for every defect."""
    missed = Caught(0, ("",), ())
    catch_of = {name: caught.get(name, missed) for name in DEFECTS}
    return [CaughtRow(name, each.cases[0], " ".join(each.by), each.at_first) for name, each in catch_of.items()]


def order(rows: Sequence[CaughtRow]) -> list[str]:
    """The cases that catch defects, first those that catch most for their cost.

    Each defect counts in its first case alone. So what a case catches does not depend on those before it, and the
    greedy cover of all defects is this order.
    """
    catches_of = Counter(row.case for row in rows if row.case)
    return sorted(catches_of, key=lambda case: (-catches_of[case] / EXPERIMENTS[case].cost(CPU), _PLACES[case]))


def ordered(rows: Sequence[CaughtRow]) -> str:
    """The order's file: an empty line below the first cases that catch three quarters of the defects."""
    cases, catches_of = order(rows), Counter(row.case for row in rows if row.case)
    caught = list(itertools.accumulate(catches_of[case] for case in cases))
    enough = 1 + next(place for place, number in enumerate(caught) if number >= _NEEDED * caught[-1])
    return "\n".join([*cases[:enough], "", *cases[enough:], ""])


def twin_rows(parts: Iterable[Part], cells: Sequence[PlantedCell]) -> list[TwinRow]:
    """A row for every sound twin: cells over all seeds, and how they came out."""
    chosen = {cell.id: cell for cell in cells}
    outcomes: dict[tuple[str, int], Counter[str]] = {}
    ran: dict[tuple[str, int], tuple[set[str], set[int]]] = {}
    for part in parts:
        for name in part.results.keys() & chosen.keys():
            key = (chosen[name].kernel, part.heads)
            outcomes.setdefault(key, Counter())[part.results[name][0]] += 1
            cases, seeds = ran.setdefault(key, (set(), set()))
            cases.add(name)
            seeds.add(part.seed)
    rows: list[TwinRow] = []
    for key, counts in sorted(outcomes.items()):
        total = counts.total() - counts[SKIPPED]
        blamed = sum(counts[outcome] for outcome in _BLAMED)
        undecided = total - blamed - counts[HELD] - counts[MEASURED]
        rows.append(TwinRow(key[0], key[1], len(ran[key][0]), len(ran[key][1]), total, blamed, undecided))
    return rows


def report(defects: Sequence[CaughtRow], twins: Sequence[TwinRow]) -> Iterator[str]:
    """What the page says: what each check catches, why others are missed, how often sound twins are blamed."""
    caught, missed = ([row for row in defects if bool(row.case) is there] for there in (True, False))
    yield from [f"{len(caught)} of {len(defects)} defects are caught.", ""]
    alone = Counter(row.checks for row in caught)
    of_check = Counter(name for row in caught for name in row.checks.split())
    rows = ((f"`{name}`", str(number), str(alone[name])) for name, number in of_check.most_common())
    yield from table(("check", "defects that it catches", "that it alone catches"), rows)
    if missed:
        reasons: dict[str, list[str]] = {}
        for row in missed:
            reasons.setdefault(DEFECTS[row.defect].missed or "not known", []).append(linked(row.defect))
        yield ""
        yield from table(("missed", "why"), ((", ".join(names), why) for why, names in reasons.items()), right=False)
    if twins:
        yield from ("", *_of_twins(twins))


def _of_twins(twins: Sequence[TwinRow]) -> Iterator[str]:
    """How often sound twins are blamed: on the whole, and the bounds of those with most and fewest cells."""
    most, fewest = (choose(twins, key=lambda row: row.cells) for choose in (max, min))
    blamed, undecided, cells = (sum(getattr(row, name) for row in twins) for name in ("blamed", "undecided", "cells"))
    yield (
        f"{blamed} of {cells:,} cells of {len(twins)} sound twins are blamed, {undecided} are inconclusive"
        " ([`twins.csv`](../tests/defects/twins.csv)). At 95 % confidence, at most one cell in"
        f" {1 / at_most(most.blamed, most.cells):,.0f} of `{most.twin}` is blamed, and one in"
        f" {1 / at_most(fewest.blamed, fewest.cells):,.0f} of `{fewest.twin}`, the twin with the fewest cells."
    )


def linked(defect: str) -> str:
    """The name of a defect, as a link to what it stands for."""
    return f"[`{defect}`]({DEFECTS[defect].stands_for})"


def _is_of_twins(part: Part) -> bool:
    return not any(cell.split(" ")[0] in DEFECTS for cell in part.results)


def kept(path: Path) -> list[Part]:
    """The parts of this commit that a file has.

    Raises:
        ValueError: a line is none that this program wrote.
    """
    return [part for part in read_parts(path, Part) if part.commit == commit()]


def left(tasks: Iterable[Task], parts: Iterable[Part]) -> list[Task]:
    """The tasks, without the cells that have been run."""
    have = {(part.seed, part.heads, cell) for part in parts for cell in part.results}
    cut = (
        Task(task.seed, task.heads, tuple(c for c in task.cells if (task.seed, task.heads, c.id) not in have))
        for task in tasks
    )
    return [task for task in cut if task.cells]


def stages(levels: Sequence[int], seeds: int, parts: Sequence[Part]) -> Iterator[list[Task]]:
    """Tasks to run, stage after stage: each depends on the results of those before it, as `parts` grows."""
    for heads in levels:
        missed = [defect for name, defect in DEFECTS.items() if name not in catches(_below(parts, heads))]
        yield left(everywhere(missed, heads), parts)
    cells = sound_cells(catches(parts))
    yield left(twin_tasks(cells, levels, seeds), parts)


def twin_tasks(cells: Sequence[PlantedCell], levels: Sequence[int], seeds: int) -> list[Task]:
    """Sound twins at every seed: users' kernels, whose checks need few heads, with the fewest."""
    split = [[cell for cell in cells if (cell.kernel in USERS) == few] for few in (True, False)]
    return [
        Task(seed, heads, tuple(some))
        for seed in range(1, seeds + 1)
        for heads, some in zip((levels[0], levels[-1]), split, strict=True)
        if some
    ]


def _below(parts: Iterable[Part], heads: int) -> list[Part]:
    return [part for part in parts if part.heads < heads]


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tiebreak.defects.power",
        description="Say which planted defects the suite catches, and whether it blames sound kernels. Resumes.",
    )
    parser.add_argument("--seeds", type=count, default=200, metavar="N", help="of the sound twins (default: 200)")
    parser.add_argument("--heads", default=_HEADS, metavar="N,N", help=f"heads drawn at first (default: {_HEADS})")
    add_options(parser, "power.jsonl", "part")
    parser.add_argument("--write", action="store_true", help="renew the tables of the page")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: its arguments, those of the process by default.

    Returns:
        0, 1 where a sound twin was blamed, 2 for bad usage, 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    levels = sorted({int(heads) for heads in options.heads.split(",") if heads.strip().isdecimal()})
    if not levels or levels[0] < 2:
        _parser().error("--heads is a list of integers from 2 on")
    try:
        parts = kept(options.out)
    except (ValueError, OSError) as error:
        _parser().error(str(error))
    if not all(_run(tasks, options, parts) for tasks in stages(levels, options.seeds, parts) if tasks):
        return INTERRUPTED
    caught = catches(parts)
    defects, twins = caught_rows(caught), twin_rows(filter(_is_of_twins, parts), sound_cells(caught))
    if options.write:
        write_rows(CAUGHT, CaughtRow, defects)
        write_rows(TWINS, TwinRow, twins)
        ORDER_FILE.write_text(ordered(defects), encoding="utf-8")
        renew(PAGE, SOURCE, report(defects, twins))
    print(*report(defects, twins), sep="\n")
    return int(any(result[0] in _BLAMED for part in parts if _is_of_twins(part) for result in part.results.values()))


def _run(tasks: Sequence[Task], options: argparse.Namespace, parts: list[Part]) -> bool:
    cells = sum(len(task.cells) for task in tasks)
    outlook, seconds = f"{counted(cells, 'cell')} at {tasks[0].heads} heads", cells * _CELL_SECONDS
    return run_parts(run_task, tasks, options, _progress, parts, outlook=outlook, seconds=seconds, gib=_WORKER_GIB)


def _progress(part: Part) -> str:
    fell = sum(result[0] in _BLAMED for result in part.results.values())
    return f"seed {part.seed}, {part.heads} heads: {fell} of {counted(len(part.results), 'cell')} fell"


if __name__ == "__main__":
    sys.exit(main())
