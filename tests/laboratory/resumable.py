"""Long runs of which a stop loses nothing: each part that is done is a line of JSON in a file."""

import argparse
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from msgspec import ValidationError, convert

from tiebreak.backends.platform import worker_count
from tiebreak.reports.cli import positive

_Task = TypeVar("_Task")
_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


def add_options(parser: argparse.ArgumentParser, file: str, line: str) -> None:
    """How many processes run, and where their parts go: the name of a file in out/, and what a line of it is."""
    workers, out = "processes (default: as many as the machine carries)", Path("out", file)
    parser.add_argument("--workers", type=positive, metavar="N", help=workers)
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"a line a {line}; default: {out}")


def read_parts(path: Path, kind: type[_Part]) -> list[_Part]:
    """The parts that a file has, but for one that a stop has cut; ValueError names a line that is no such part's."""
    parts = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text[: _whole(text)].splitlines(), start=1):
        try:
            parts.append(convert(json.loads(line), kind))
        except (ValueError, ValidationError) as error:
            raise ValueError(f"{path}, line {number}: none of this program's: {error}; name another --out") from error
    return parts


def _whole(text: str) -> int:
    """How many characters of a file there are without a last line that a stop has cut."""
    end = text.rfind("\n") + 1
    return end if text[end:].startswith('{"') and not text.endswith("}") else len(text)


def run_parts(
    run: Callable[[_Task], _Part],
    left: Sequence[_Task],
    options: argparse.Namespace,
    line: Callable[[_Part], str],
    parts: list[_Part],
    *,
    spent: Sequence[float],
    gib: float,
) -> bool:
    """Run what is left, each part in a process of its own of so much memory: whether all of it, or Ctrl-C came.

    A part is a dataclass: as it ends it joins the `parts` that are kept, and the file of `add_options`, and its `line`
    is shown. `spent` are the seconds of those that are kept, or of one, about: they say how long the rest will take.
    """
    workers = min(options.workers or worker_count(gib), max(1, len(left)))
    seconds = fmean(spent) * len(left) / workers
    print(f"{len(parts)} kept, {len(left)} to run, {workers} at a time: {expected(seconds)}", flush=True)
    try:
        if left:
            show_progress(_kept(in_processes(run, left, workers), options.out, line, parts), len(left), "part")
    except KeyboardInterrupt:
        print(f"stopped; {options.out} has what is done, and the same command goes on")
        return False
    return True


def _kept(ended: Iterable[_Part], path: Path, line: Callable[[_Part], str], parts: list[_Part]) -> Iterator[str]:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    path.write_text(text[: _whole(text)], encoding="utf-8")
    with path.open("a", encoding="utf-8") as file:
        for part in ended:
            parts.append(part)
            fields: dict[str, Any] = asdict(part)  # type: ignore[call-overload]
            file.write(json.dumps(fields) + "\n")
            file.flush()
            yield line(part)


def expected(seconds: float) -> str:
    """How long a run will still take, in words."""
    minutes = round(seconds / 60)
    return f"about {minutes // 60} h {minutes % 60} min to go"


def show_progress(lines: Iterable[str], total: int, noun: str) -> None:
    started = time.monotonic()
    for number, line in enumerate(lines, start=1):
        rest = (time.monotonic() - started) / number * (total - number)
        print(f"{line}; {number} of {total} {noun}s, {expected(rest)}", flush=True)


def in_processes(run: Callable[[_Task], _Part], left: Sequence[_Task], workers: int) -> Iterator[_Part]:
    """Run what is left in so many processes of their own, and give each result as it ends; a stop ends them."""
    context = multiprocessing.get_context("spawn")
    # Ctrl-C goes to all processes of a terminal; this one says what became of it.
    with context.Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap_unordered(run, left)
