"""The verb `tiebreak sweep`: how often training diverges, over seeds, learning rates, formats and kernels; resumes."""

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence

import torch

from tiebreak.backends.platform import worker_count
from tiebreak.cases.gpt2.data import DataError
from tiebreak.programs import on_ray, slurm
from tiebreak.programs.on_ray import RAY
from tiebreak.programs.resuming import Bar, expected, in_processes
from tiebreak.programs.sweep_options import SLURM, parse, settings, tasks
from tiebreak.programs.sweeping import Task, run
from tiebreak.reports import terminal
from tiebreak.reports.cli import HELD, INTERRUPTED
from tiebreak.reports.errors import UsageError
from tiebreak.reports.sweep_tables import sweep_tables
from tiebreak.reports.sweeps import Place, Sweep, SweepRun, keep, open_store, read_sweep
from tiebreak.reports.tables import counted

_WORKER_GIB = 1.0
_TRIAL_STEPS = 3


def main(argv: Sequence[str]) -> int:
    """The verb `sweep`; see `tiebreak.reports.cli.main`.

    Returns:
        0 when all runs are done, 130 after Ctrl-C.

    Raises:
        UsageError, UnreadableRecordsError, UnwritableFolderError: as the command tells in one line.
    """
    gc.enable()  # the command turns it off, for verbs that end in a second
    options = parse(argv)
    try:
        sweep = open_store(options.out, settings(options))
        left = tasks(options, _mine(options, sweep))
    except DataError as error:
        raise UsageError(str(error)) from None
    if options.on == SLURM:
        print(slurm.write(options, argv, len(left)))
        return HELD
    try:
        _run_all(options, sweep, left)
    except KeyboardInterrupt:
        done = counted(len(read_sweep(options.out).runs), "run")
        print(f"\nstopped; {options.out} has the {done} done, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    terminal.show(sweep_tables(read_sweep(options.out), terminal.limit("simple"), "simple"))
    print(f"again: tiebreak show {options.out}; as a page: tiebreak page {options.out} -o DIR")
    return HELD


def _mine(options: argparse.Namespace, sweep: Sweep) -> list[Place]:
    """What is left for this process to see to."""
    if options.part is None:
        return sweep.left
    part, parts = options.part
    mine = set(list(sweep.settings.places())[part::parts])
    return [place for place in sweep.left if place in mine]


def _run_all(options: argparse.Namespace, sweep: Sweep, left: Sequence[Task]) -> None:
    """Run what is left, each run into the store as it ends."""
    if not left:
        return
    if options.on is None:
        workers = min(options.workers or worker_count(_WORKER_GIB), len(left))
        _with_bar(_told(sweep, left, workers, "here"), _here(left, workers), len(left), options)
        return
    with on_ray.connected(None if options.on == RAY else options.on, options.workers) as cluster:
        slots = cluster.slots(options.gpus_per_run)
        runs = cluster.run(run, left, gpus=options.gpus_per_run)
        _with_bar(_told(sweep, left, min(slots, len(left)), f"on Ray, {cluster.about}"), runs, len(left), options)


def _with_bar(told: str, runs: Iterable[SweepRun], count: int, options: argparse.Namespace) -> None:
    """Keep runs as they come."""
    print(told, flush=True)
    bar = Bar(count, "run")
    for one in runs:
        keep(one, options.out)
        end = f"diverged ({one.diverged}) at step {one.steps}" if one.diverged else f"loss {one.loss:.3f}"
        bar.tell(f"{one.place.text}: {end}")


def _here(left: Sequence[Task], workers: int) -> Iterator[SweepRun]:
    return map(run, left) if workers == 1 else in_processes(run, left, workers)


def _told(sweep: Sweep, left: Sequence[Task], workers: int, where: str) -> str:
    each = _seconds(sweep, left[0])
    time = "" if each is None else f": {expected(each * len(left) / workers)}"
    done = counted(len(sweep.runs), "run")
    return f"{done} kept, {len(left)} to run, {workers} at a time {where}{time}"


def _seconds(sweep: Sweep, task: Task) -> float | None:
    """What a run takes, to go by those that are done, or by a few steps; None: they can't be taken on this machine."""
    steps = sum(one.steps for one in sweep.runs)
    if steps:
        return sum(one.seconds for one in sweep.runs) / steps * task.steps
    if task.device == "cuda" and not torch.cuda.is_available():
        return None
    run(task, 1)  # the first step of a process takes longer
    return run(task, _TRIAL_STEPS).seconds / _TRIAL_STEPS * task.steps
