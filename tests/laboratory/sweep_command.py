"""The verb `tiebreak lab sweep`: how often training diverges, over seeds, rates, formats and kernels; resumes."""

import argparse
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from tiebreak.backends.platform import worker_count
from tiebreak.cases.gpt2.data import DataError
from tiebreak.laboratory import ray_cluster as on_ray
from tiebreak.laboratory.ray_cluster import RAY
from tiebreak.laboratory.sweep_options import parse, settings, tasks
from tiebreak.laboratory.sweep_run import Task, run
from tiebreak.programs.resumable import expected, in_processes, show_progress
from tiebreak.reports.cli import HELD, INTERRUPTED
from tiebreak.reports.errors import UsageError
from tiebreak.reports.sweeps.store import Sweep, SweepRun, keep, open_store, read_sweep
from tiebreak.reports.sweeps.tables import sweep_tables
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.run import counted

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
        left = tasks(options, sweep.left)
    except DataError as error:
        raise UsageError(str(error)) from None
    try:
        _run_all(options, sweep, left)
    except KeyboardInterrupt:
        done = counted(len(read_sweep(options.out).runs), "run")
        print(f"\nstopped; {options.out} has the {done} done, and the same command goes on", file=sys.stderr)
        return INTERRUPTED
    grids.show(sweep_tables(read_sweep(options.out)))
    print(f"again: tiebreak show {options.out}; as a page: tiebreak page {options.out} -o DIR")
    return HELD


def _run_all(options: argparse.Namespace, sweep: Sweep, left: Sequence[Task]) -> None:
    """Run what is left, each run into the store as it ends."""
    if not left:
        return
    if options.on is None:
        workers = min(options.workers or worker_count(_WORKER_GIB), len(left))
        print(_outlook(sweep, left, workers, "here"), flush=True)
        show_progress(_kept(_here(left, workers), options.out), len(left), "run")
        return
    with on_ray.connected(None if options.on == RAY else options.on, options.workers) as cluster:
        slots = cluster.slots(options.gpus_per_run)
        print(_outlook(sweep, left, min(slots, len(left)), f"on Ray, {cluster.about}"), flush=True)
        runs = cluster.run(run, left, gpus=options.gpus_per_run)
        show_progress(_kept(runs, options.out), len(left), "run")


def _kept(runs: Iterable[SweepRun], folder: Path) -> Iterator[str]:
    """Keep runs as they come; what each came to."""
    for each in runs:
        keep(each, folder)
        end = f"diverged ({each.diverged}) at step {each.steps}" if each.diverged else f"loss {each.loss:.3f}"
        yield f"{each.place.text}: {end}"


def _here(left: Sequence[Task], workers: int) -> Iterator[SweepRun]:
    return map(run, left) if workers == 1 else in_processes(run, left, workers)


def _outlook(sweep: Sweep, left: Sequence[Task], workers: int, where: str) -> str:
    each = _seconds(sweep, left[0])
    time = "" if each is None else f": {expected(each * len(left) / workers)}"
    done = counted(len(sweep.runs), "run")
    return f"{done} kept, {len(left)} to run, {workers} at a time {where}{time}"


def _seconds(sweep: Sweep, task: Task) -> float | None:
    """What a run takes, to go by those that are done, or by a few steps; None: they can't be taken on this machine."""
    steps = sum(each.steps for each in sweep.runs)
    if steps:
        return sum(each.seconds for each in sweep.runs) / steps * task.steps
    if task.device == "cuda" and not torch.cuda.is_available():
        return None
    run(task, 1)  # the first step of a process takes longer
    return run(task, _TRIAL_STEPS).seconds / _TRIAL_STEPS * task.steps
