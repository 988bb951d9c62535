"""`tiebreak levels`: the matrix once on each instruction-set level of this CPU, or of an emulated one, compared.

A process has one level (see `tiebreak.backends.levels`), so every run is a separate process.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tiebreak.backends.levels import EMULATED, VARIABLES, Level, supported
from tiebreak.backends.platform import cpu_features
from tiebreak.laboratory.levels import sysroot
from tiebreak.programs.processes import CELLS, finished
from tiebreak.reports.cli import Parser
from tiebreak.reports.names import pick


def run(levels: Sequence[Level], pytest_arguments: Sequence[str], python: str | Path, out: Path) -> int:
    """Run pytest by `python` once per level, each keeping its records in `out`, then compare the records.

    Returns:
        0 if every run and the comparison did well, 1 if any failed or left no records, 2 if any was interrupted or
        refused its arguments. pytest's refusal ends the round: the next level would refuse them too.
    """
    failed: dict[str, int] = {}
    kept: list[str] = []
    for number, level in enumerate(levels, start=1):
        print(f"level {number} of {len(levels)}: {_title(level)}", flush=True)
        records = out / f"{level.name}.json"
        before = _modified(records)
        command = [str(python), "-m", "pytest", f"--save={level.name}", f"--out={out}", *pytest_arguments]
        if status := finished(command, environment(level), shown=True).returncode:
            failed[level.name] = status
        if status == 4:
            break
        # A file of an earlier round must not pass for this one's.
        if _modified(records) == before:
            print(f"level {level.name} kept no records in {records}", file=sys.stderr)
            failed.setdefault(level.name, 1)
        else:
            kept.append(str(records))
    compare = [sys.executable, "-m", "tiebreak.reports.cli", "compare", *kept]
    if len(kept) > 1 and (status := finished(compare, shown=True).returncode):
        failed["comparison"] = status
    for name, status in failed.items():
        print(f"failed: {name} (exit code {status})", file=sys.stderr)
    return 2 if {2, 4} & set(failed.values()) else int(bool(failed))


def environment(level: Level) -> dict[str, str]:
    """Return the environment of a process at a level."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | dict(level.environment)


def _modified(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None


def _title(level: Level) -> str:
    settings = " ".join(f"{name}={value}" for name, value in level.environment.items())
    return f"{level.name:28}{settings or '(environment as it is, without these variables)'}"


def _parser() -> Parser:
    parser = Parser(
        prog="tiebreak levels",
        usage="%(prog)s [--arch ARCH] [--level NAMES] [--sysroot DIR] [--out DIR] [--list] [PYTEST_ARGUMENT ...]",
        description="The matrix once per instruction-set level of this CPU or an emulated one, each in its own process "
        "that keeps its records as OUT/LEVEL.json, then the comparison. All else goes to pytest: --cases, "
        "--kernels, --heads, -n. Example: tiebreak levels --arch aarch64 --cases 'tied*' --heads 64",
        epilog="--arch takes QEMU's user mode, Debian's packages and PyPI's wheels: 600 MB in the user's cache, once. "
        "Exit codes: 0 all passed, 1 a level failed, 2 bad usage or an interrupted run of pytest, 130 Ctrl-C.",
        allow_abbrev=False,  # what begins alike may be pytest's
    )
    parser.add_argument("--list", action="store_true", help="name and environment of each level, and nothing is run")
    parser.add_argument("--arch", metavar="ARCH", choices=tuple(EMULATED), help="another architecture: aarch64")
    parser.add_argument("--level", metavar="NAMES", help="these alone: a comma list, globs (default: all)")
    parser.add_argument("--sysroot", type=Path, metavar="DIR", help="an aarch64 system with Python 3.11, for Debian's")
    parser.add_argument("--out", type=Path, metavar="DIR", default=Path("out"), help="of the records (default: out)")
    return parser


def _chosen(arch: str | None, names: str | None) -> list[Level]:
    """Return the levels that a command line names, the highest first."""
    levels = EMULATED[arch] if arch else supported(cpu_features())
    if names is None:
        return list(levels)
    # For an emulated processor the name is enough.
    names_of = {name: level.name for level in levels for name in (level.name, level.name.removeprefix(f"{arch}-"))}
    chosen = {names_of[name] for name in pick("level", names, names_of, "`tiebreak levels --list` names")}
    return [level for level in levels if level.name in chosen]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the verb `levels`; see `tiebreak.reports.cli.main`."""
    parser = _parser()
    options, for_pytest = parser.parse_known_args(arguments)
    if options.sysroot and not options.arch:
        parser.error("--sysroot goes with --arch")
    if any(argument.split("=")[0] == "--save" for argument in for_pytest):
        parser.error("--save is set to each level's name and can't be given")
    levels = _chosen(options.arch, options.level)
    if options.list:
        print("\n".join(map(_title, levels)))
        return 0
    # The matrix, with a worker a core, where pytest's arguments say nothing of these.
    workers = [] if any(word.startswith(("-n", "--numprocesses")) for word in for_pytest) else ["-n", "auto"]
    paths = any(not word.startswith("-") and Path(word.partition("::")[0]).exists() for word in for_pytest)
    for_pytest = [*workers, *(() if paths else CELLS), *for_pytest]
    python = sysroot.python(options.arch, options.sysroot) if options.arch else sys.executable
    return run(levels, for_pytest, python, options.out)
