"""`python -m tiebreak.programs.spread`: run the snippets at many seeds, and renew the bounds that rest on the runs.

Every run is a line in a file, and a program that is stopped goes on where it was. A seed is done with all variants of
a default run before the next begins, so that at any stop all have been run equally often; the others follow.

`--write` puts n, mean and sd into cases/gpt2/spread.csv, from which `tiebreak.cases.gpt2.bounds` derives the bounds.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

import torch

from tiebreak.backends.backend import CPU, EMULATION
from tiebreak.cases.gpt2.bounds import (
    FILE,
    Ran,
    Spread,
    bounded,
    read_spreads,
    spread,
    write_spreads,
)
from tiebreak.cases.gpt2.snippets import SNIPPETS, Snippet, run_snippet
from tiebreak.cases.gpt2.variants import VARIANTS
from tiebreak.matrix.memory import keep_memory
from tiebreak.programs.resumable import add_options, read_parts, run_parts
from tiebreak.reports.cli import INTERRUPTED, Parser, count
from tiebreak.reports.tables.run import counted

_WORKER_GIB = 1.0
_BACKENDS = {backend.name: backend for backend in (EMULATION, CPU)}
_STEP_SECONDS = 0.03  # about, until runs have told


@dataclass(frozen=True)
class Task:
    """One run."""

    backend: str  # its name
    snippet: str  # its name
    version: int  # of its recipe
    variant: str  # by full name
    seed: int  # of weights and noise


@dataclass(frozen=True)
class Line(Task):
    """What a run came to."""

    seconds: float  # of one core
    measures: dict[str, float]

    @property
    def task(self) -> Task:
        """The run."""
        return Task(*(getattr(self, each.name) for each in fields(Task)))


def variants_of(snippet: Snippet) -> Sequence[str]:
    """Those of a default run first; then all others that a statement is about or must catch."""
    named = (name for each in snippet.rules for name in (*each.variants, each.against))
    own = (name for claim in snippet.own_claims for name in sorted(claim.variants))
    return list(dict.fromkeys([*snippet.roster, *named, *own]))


def tasks(seeds: int) -> Iterator[Task]:
    """All runs in their order, in two rounds over the seeds from 1.

    First what bounds of a default run rest on: its variants on the emulation, and those that a claim about them must
    catch. Then other variants, and the default run on the CPU's own arithmetic.
    """
    for first in (True, False):
        for seed in range(1, seeds + 1):
            for snippet in SNIPPETS.values():
                default = _of_default(snippet)
                named = [name for name in variants_of(snippet) if (name in default) == first]
                for backend, names in (("emulation", named), ("cpu", () if first else snippet.on_devices)):
                    yield from (Task(backend, snippet.name, snippet.version, name, seed) for name in names)


def _of_default(snippet: Snippet) -> frozenset[str]:
    caught = (each.against for each in snippet.rules if set(each.variants) & set(snippet.roster))
    return frozenset((*snippet.roster, *caught))


def run(task: Task) -> Line:
    """One run, on one core."""
    torch.set_num_threads(1)
    keep_memory()
    backend, started = _BACKENDS[task.backend], time.process_time()
    snippet, variant = SNIPPETS[task.snippet], VARIANTS[task.variant]
    measures = run_snippet(snippet, variant, backend.arithmetic, task.seed, backend.device).measures
    return Line(**vars(task), seconds=round(time.process_time() - started, 3), measures=dict(measures))


def spreads(lines: Iterable[Line]) -> dict[Ran, Spread]:
    """The distributions that statements ask for, of the recipes as they are now."""
    values: dict[Ran, dict[int, float]] = {}
    for line in lines:
        task, snippet = line.task, SNIPPETS.get(line.task.snippet)
        if snippet is not None and task.version == snippet.version:
            for measure in _asked(snippet, task.variant):
                ran = Ran(task.snippet, task.version, task.backend, task.variant, measure)
                values.setdefault(ran, {})[task.seed] = line.measures[measure]
    return {ran: spread(ran.measure, list(by_seed.values())) for ran, by_seed in values.items() if len(by_seed) > 1}


def _asked(snippet: Snippet, variant: str) -> set[str]:
    own = {claim.measure for claim in snippet.own_claims if variant in claim.variants}
    return own | {each.measure for each in snippet.rules if variant in (*each.variants, each.against)}


def alarms(lines: Iterable[Line], spreads: Mapping[Ran, Spread]) -> tuple[int, list[str]]:
    """How many runs claims speak of, and those that would have fallen at the bounds that follow from `spreads`."""
    claims = {
        snippet.name: (*snippet.own_claims, *bounded(snippet.name, snippet.version, snippet.rules, spreads))
        for snippet in SNIPPETS.values()
    }
    count, fallen = 0, []
    for line in lines:
        task = line.task
        if task.snippet not in claims or task.version != SNIPPETS[task.snippet].version:
            continue
        concerned = [claim for claim in claims[task.snippet] if task.variant in claim.variants]
        count += bool(concerned)
        fallen += [
            f"{task.backend} {task.snippet} {task.variant} seed {task.seed}: {claim.text},"
            f" {claim.measure} = {line.measures[claim.measure]:.3g}"
            for claim in concerned
            if not claim.held(line.measures)
        ]
    return count, fallen


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="python -m tiebreak.programs.spread",
        description="Run the training snippets at many seeds. Resumes where it was stopped.",
    )
    parser.add_argument("--seeds", type=count, default=200, metavar="N", help="from 1; 0: run none (default: 200)")
    add_options(parser, "snippets.jsonl", "run")
    parser.add_argument("--write", action="store_true", help="renew the bounds")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line.

    Args:
        arguments: its arguments, those of the process by default.

    Returns:
        0, 1 where a run would have fallen at the bounds, 2 for bad usage, 130 after Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    try:
        lines = read_parts(options.out, Line)
    except (ValueError, OSError) as error:
        _parser().error(str(error))
    have = {line.task for line in lines}
    left = [task for task in tasks(options.seeds) if task not in have]
    outlook, seconds = f"{counted(len(have), 'run')} kept, {len(left)} to run", _seconds(lines, left)
    if not run_parts(run, left, options, _line, lines, outlook=outlook, seconds=seconds, gib=_WORKER_GIB):
        return INTERRUPTED
    if options.write:
        write_spreads(spreads(lines))
        print(f"{FILE} is renewed")
    count, fallen = alarms(lines, read_spreads())
    print("\n".join([f"{count} runs that claims speak of, {len(fallen)} beyond a bound", *fallen]))
    return int(bool(fallen))


def _line(line: Line) -> str:
    return f"{line.backend} {line.snippet} {line.variant} seed {line.seed}"


def _seconds(kept: Sequence[Line], left: Sequence[Task]) -> float:
    """How long the rest takes on one core, by what a run of its snippet took."""
    took: dict[str, list[float]] = {}
    for line in kept:
        took.setdefault(line.task.snippet, []).append(line.seconds)
    each = {name: sum(seconds) / len(seconds) for name, seconds in took.items()}
    return sum(each.get(task.snippet, SNIPPETS[task.snippet].steps * _STEP_SECONDS) for task in left)


if __name__ == "__main__":
    sys.exit(main())
