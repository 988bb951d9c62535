"""A sweep as a Slurm array: a script to submit; its tasks share the sweep's folder."""

import argparse
import math
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from tiebreak.reports import store
from tiebreak.reports.errors import UsageError
from tiebreak.reports.tables import counted

MOST_TASKS = 1000  # Slurm's MaxArraySize is 1,001 unless a cluster says otherwise
_NOT_PASSED = ("--on", "--workers")


def write(options: argparse.Namespace, argv: Sequence[str], left: int) -> str:
    """Write the script into the sweep's folder.

    Args:
        options: of the sweep.
        argv: from which they were read: the tasks get the same.
        left: runs to do.

    Returns:
        What to say: how to submit it, and how to read the results together.

    Raises:
        UsageError: nothing is left to run.
        tiebreak.reports.store.UnwritableFolderError: it can't be written.
    """
    if not left:
        raise UsageError(f"{options.out}: all runs are done; tiebreak show {options.out}")
    folder = options.out.resolve()
    parts = min(left, MOST_TASKS)
    path, logs = folder / "sweep.sbatch", folder / "logs"
    store.check_writable(logs)
    store.write_text(_script(options, _passed(argv), folder, parts), path)
    return "\n".join(
        [
            f"{path}: {counted(left, 'run')} in an array of {counted(parts, 'task')}; the folder must be one that all"
            " nodes see",
            f"submit:  sbatch {shlex.quote(str(path))}",
            f"results: tiebreak show {shlex.quote(str(folder))}, while they come and when all are there",
            "what is missing then: the same command again, and submit what it writes",
        ]
    )


def _passed(argv: Sequence[str]) -> list[str]:
    """The sweep's own options, for the tasks."""
    passed: list[str] = []
    skip = False
    for word in argv:
        name, equals, _ = word.partition("=")
        if skip or name in (*_NOT_PASSED, "--out"):
            skip = not skip and not equals
        else:
            passed.append(word)
    return passed


def _script(options: argparse.Namespace, passed: Sequence[str], folder: Path, parts: int) -> str:
    command = [sys.executable, "-m", "tiebreak.reports.cli", "sweep", *passed, "--out", str(folder), "--workers", "1"]
    gpus = [f"#SBATCH --gpus-per-task={math.ceil(options.gpus_per_run)}"] if options.gpus_per_run else []
    return "\n".join(
        [
            "#!/bin/bash",
            "#SBATCH --job-name=tiebreak-sweep",
            f"#SBATCH --array=0-{parts - 1}",
            "#SBATCH --ntasks=1",
            "#SBATCH --cpus-per-task=1",
            *gpus,
            f"#SBATCH --output={folder}/logs/%a.log",
            f"cd {shlex.quote(str(Path.cwd()))} &&",
            f'  exec {shlex.join(command)} --part "$SLURM_ARRAY_TASK_ID/{parts}"',
            "",
        ]
    )
