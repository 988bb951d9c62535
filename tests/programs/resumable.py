"""Long runs of which a stop loses nothing: each part that is done is a line of JSON in a file."""

import argparse
import json
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from tiebreak.backends.platform import worker_count
from tiebreak.reports.cli import positive

_Task = TypeVar("_Task")
_Part = TypeVar("_Part")


def add_options(parser: argparse.ArgumentParser, file: str, line: str) -> None:
    """How many processes run, and where their parts go: the name of a file in out/, and what a line of it is."""
    workers, out = "processes (default: as many as the machine carries)", Path("out", file)
    parser.add_argument("--workers", type=positive, metavar="N", help=workers)
    parser.add_argument("--out", type=Path, default=out, metavar="FILE", help=f"a line a {line}; default: {out}")


def read_parts(path: Path, kind: type[_Part]) -> list[_Part]:
    """The parts that a file has, without a last one that a stop has cut; none where there is no file.

    Raises:
        ValueError: a line is none that such a run wrote; one line that names it.
    """
    parts = []
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for number, line in enumerate(text[: _whole(text)].splitlines(), start=1):
        try:
            parts.append(kind(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}, line {number}: none of this program's: {error}; name another --out") from error
    return parts


def _whole(text: str) -> int:
    """How many characters of a file there are without a last line that a stop has cut."""
    end = text.rfind("\n") + 1
    return end if text[end:].startswith('{"') and not text.endswith("}") else len(text)


def in_processes(run: Callable[[_Task], _Part], left: Sequence[_Task], workers: int) -> Iterator[_Part]:
    """Run what is left in so many processes of their own, and give each part as it ends; a stop ends them."""
    context = multiprocessing.get_context("spawn")
    # Ctrl-C goes to all processes of a terminal; this one says what became of it.
    with context.Pool(workers, signal.signal, (signal.SIGINT, signal.SIG_IGN)) as pool:
        yield from pool.imap_unordered(run, left)


def run_parts(
    run: Callable[[_Task], _Part],
    left: Sequence[_Task],
    options: argparse.Namespace,
    line: Callable[[_Part], str],
    parts: list[_Part],
    *,
    outlook: str,
    seconds: float,
    gib: float,
) -> bool:
    """Run what is left, a line in the file for each part as it ends, and say how long the rest will take.

    Args:
        run: runs one part, in a process of its own; gives an instance of a dataclass.
        left: what to run.
        options: those of `add_options`; the file's folder is made if need be.
        line: of a part, what is shown as it ends.
        parts: where they go, as they end.
        outlook: what there is and what is left, in words.
        seconds: that all of it takes one process, about.
        gib: memory of a process.

    Returns:
        Whether all of it was run: Ctrl-C stops it.
    """
    workers = min(options.workers or worker_count(gib), max(1, len(left)))
    print(f"{outlook}, {workers} at a time: {expected(seconds / workers)}", flush=True)
    try:
        if left:
            show_progress(_kept(in_processes(run, left, workers), options.out, line, parts), len(left), "part")
    except KeyboardInterrupt:
        print(f"stopped; {options.out} has what is done, and the same command goes on")
        return False
    return True


def _kept(ended: Iterable[_Part], path: Path, line: Callable[[_Part], str], parts: list[_Part]) -> Iterator[str]:
    """Put parts into the file as they end."""
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
    """Show what each part came to as it ends, with the time to go."""
    started = time.monotonic()
    for number, line in enumerate(lines, start=1):
        rest = (time.monotonic() - started) / number * (total - number)
        print(f"{line}; {number} of {total} {noun}s, {expected(rest)}", flush=True)
