"""The one way to run a study: tasks, each run once in a process of its own, and kept as a line of a file."""

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar, get_type_hints

import torch
from msgspec import ValidationError, convert, to_builtins

from tiebreak.backends.provenance import commit
from tiebreak.laboratory.resumable import add_options, read_parts, run_parts
from tiebreak.matrix.memory import keep_memory
from tiebreak.reports.cli import INTERRUPTED, USAGE, Parser

_Task = TypeVar("_Task")
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Line:
    """A task that is done, as the file has it."""

    task: Any  # as JSON has it
    commit: str | None  # of the suite
    seconds: float  # of CPU time, of its own and of the processes that it ran
    result: Any  # as JSON has it


@dataclass(frozen=True)
class Study(Generic[_Task, _Result]):
    """What is run."""

    name: str  # of its file in out/
    #: Runs one task: a function of a module, for other processes. The types that it names are what JSON has, or
    #: dataclasses of it; a task is hashable.
    run: Callable[[_Task], _Result]
    seconds: float  # that a task takes, about, until some are done
    gib: float = 2.0  # memory of a process
    every_commit: bool = False  # whether what another commit ran counts too

    def parser(self, about: str | None) -> argparse.ArgumentParser:
        """Return the parser of the study's command line.

        Args:
            about: the docstring of its module, whose first line says what it does.
        """
        line = (about or "").partition("\n")[0].rpartition("`: ")[2]
        parser = Parser(prog=f"python -m tiebreak.studies.{self.name}", description=f"{line} Resumes.")
        add_options(parser, f"{self.name}.jsonl", "task")
        return parser

    def results(self, tasks: Iterable[_Task], options: argparse.Namespace) -> dict[_Task, _Result]:
        """Run what the file lacks.

        Args:
            tasks: all that are wanted, in the order to run them in.
            options: those of `parser`.

        Returns:
            The result of each task.

        Raises:
            SystemExit: 2 if the file is not the study's, 130 after Ctrl-C.
        """
        lines, task, result = self._lines(options), *self._types
        wanted = list(dict.fromkeys(tasks))
        left = [task for task in wanted if task not in lines]
        if left:
            kept = list(lines.values())
            spent = [line.seconds for line in kept] or [self.seconds]
            if not run_parts(partial(_run, self), left, options, _shown, kept, spent=spent, gib=self.gib):
                raise SystemExit(INTERRUPTED)
            lines |= {convert(line.task, task): line for line in kept}
        return {each: convert(lines[each].result, result) for each in wanted}

    def kept(self, options: argparse.Namespace) -> dict[_Task, _Result]:
        """Return every task that the file has, with its result; `SystemExit` as of `results`."""
        return {task: convert(line.result, self._types[1]) for task, line in self._lines(options).items()}

    @property
    def _types(self) -> tuple[Any, Any]:
        """Of a task and of a result."""
        task, result = get_type_hints(self.run).values()
        return task, result

    def _lines(self, options: argparse.Namespace) -> dict[_Task, Line]:
        try:
            lines = read_parts(options.out, Line)
            now = commit()
            return {
                convert(line.task, self._types[0]): line for line in lines if self.every_commit or line.commit == now
            }
        except (ValueError, TypeError, OSError, ValidationError) as error:
            print(f"{self.name}: {error}", file=sys.stderr)
            raise SystemExit(USAGE) from None


def _run(study: Study[Any, Any], task: Any) -> Line:
    """Run a task on one core."""
    torch.set_num_threads(1)
    keep_memory()
    started = sum(os.times()[:4])
    result = study.run(task)
    return Line(to_builtins(task), commit(), round(sum(os.times()[:4]) - started, 2), to_builtins(result))


def _shown(line: Line) -> str:
    words = line.task.values() if isinstance(line.task, dict) else [line.task]
    return f"{' '.join(str(word) for word in words if word is not None)}: {line.seconds:.0f} s"
