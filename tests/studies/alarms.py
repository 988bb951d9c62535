"""`python -m tiebreak.studies.alarms`: how often the default matrix raises a false alarm, over many seeds.

Everything that runs here is the suite's own: its kernels on its emulation and on this CPU. So each cell that does not
pass is a false alarm, or a claim that does not hold. The result of every seed is a line in a file; a run that is
stopped goes on where it was.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tiebreak.backends.provenance import commit
from tiebreak.matrix.memory import keep_memory
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.selection import Selection, SelectionError, cells
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import Workbench
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import INTERRUPTED, Parser, positive
from tiebreak.reports.records.record import SKIPPED
from tiebreak.reports.tables.run import counted

_WORKER_GIB = 2.0
_SURE = 0.95  # of the bound on the rate
_STEP_SECONDS = 0.02  # of a training step, about, which costs of cells are in: for the first word on how long it takes


@dataclass(frozen=True)
class Seed:
    """What one seed gave."""

    seed: int
    backends: str  # as asked for
    cases: str | None  # likewise
    commit: str | None  # of the suite
    outcomes: dict[str, int]  # cells by outcome
    alarms: list[str]  # cells that did not pass, with why
    seconds: float  # of one process


def run_seed(seed: int, backends: str, cases: str | None) -> Seed:
    """Run every cell of a default run at one seed."""
    torch.set_num_threads(1)
    keep_memory()
    started, bench = time.monotonic(), Workbench(Settings(seed=seed))
    asked, _ = cells(Selection(backends=backends, cases=cases))
    outcomes: Counter[str] = Counter()
    alarms = []
    for cell in asked:
        record = run_cell(cell, bench)
        outcomes[record.outcome] += 1
        if not record.passes and record.outcome != SKIPPED:
            alarms.append(f"{record.outcome} {record.id}: {'; '.join(record.reasons)}")
    return Seed(seed, backends, cases, commit(), dict(outcomes), alarms, round(time.monotonic() - started, 1))


def _run(task: tuple[int, str, str | None]) -> Seed:
    return run_seed(*task)


def kept(path: Path, backends: str, cases: str | None) -> dict[int, Seed]:
    """The seeds that a file has of the same backends and cases and of this commit, by seed.

    Raises:
        ValueError: a line is none that this program wrote.
    """
    asked = (backends, cases, commit())
    return {seed.seed: seed for seed in read_parts(path, Seed) if (seed.backends, seed.cases, seed.commit) == asked}


def at_most(alarms: int, cells: int, sure: float = _SURE) -> float:
    """An upper bound on the rate of alarms, one-sided (Clopper and Pearson): the rate at which so few are as unlikely.

    Args:
        alarms: that were seen.
        cells: in which they could have been.
        sure: confidence.
    """
    low, high = 0.0, 1.0
    for _ in range(200):
        rate = (low + high) / 2
        # Poisson's tail, which the binomial's is for rates this small.
        term = total = math.exp(-rate * cells)
        for count in range(1, alarms + 1):
            term *= rate * cells / count
            total += term
        low, high = (low, rate) if total < 1 - sure else (rate, high)
    return high


def summary(seeds: Iterable[Seed]) -> str:
    """The count, its bound, and every alarm."""
    seeds = sorted(seeds, key=lambda seed: seed.seed)
    outcomes = sum((Counter(seed.outcomes) for seed in seeds), Counter[str]())
    ran = sum(outcomes.values()) - outcomes[SKIPPED]
    alarms = [f"seed {seed.seed}: {text}" for seed in seeds for text in seed.alarms]
    parts = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
    bound = at_most(len(alarms), ran) if ran else 1.0
    asked = f"{counted(len(seeds), 'seed')}, {counted(ran, 'cell')} ({parts})"
    head = f"{asked}: {counted(len(alarms), 'alarm')}, with {_SURE:.0%} confidence fewer than"
    return "\n".join([f"{head} one in {1 / bound:,.0f} cells", *alarms])


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tiebreak.studies.alarms",
        description="Count false alarms of the default matrix over many seeds. Resumes where it was stopped.",
    )
    parser.add_argument("--seeds", type=positive, default=100, metavar="N", help="how many (default: 100)")
    parser.add_argument("--first", type=positive, default=1, metavar="N", help="the first of them (default: 1)")
    parser.add_argument("--backend", default="emulation,cpu", metavar="NAMES", help="default: emulation,cpu")
    parser.add_argument("--cases", metavar="NAMES", help="default: all")
    add_options(parser, "alarms.jsonl", "seed")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: its arguments, those of the process by default.

    Returns:
        0 without an alarm, 1 with one, 2 for bad usage, 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        asked = cells(Selection(backends=options.backend, cases=options.cases))[0]
        done = kept(options.out, options.backend, options.cases)
    except (SelectionError, ValueError, OSError) as error:
        _parser().error(str(error))
    wanted = range(options.first, options.first + options.seeds)
    finished = [done[seed] for seed in wanted if seed in done]
    left = [(seed, options.backend, options.cases) for seed in wanted if seed not in done]
    before = [seed.seconds for seed in done.values()]
    each = sum(before) / len(before) if before else _STEP_SECONDS * sum(c.experiment.cost(c.backend) for c in asked)
    outlook, seconds = f"{len(asked)} cells a seed, {len(left)} of {len(wanted)} seeds to run", each * len(left)
    if not run_parts(_run, left, options, _line, finished, outlook=outlook, seconds=seconds, gib=_WORKER_GIB):
        return INTERRUPTED
    print(summary(finished))
    return int(any(seed.alarms for seed in finished))


def _line(seed: Seed) -> str:
    return f"seed {seed.seed}: {len(seed.alarms)} alarms in {seed.seconds:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
