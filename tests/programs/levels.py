"""The instruction-set levels of this CPU: list them, or run pytest once on each and compare what it found.

A process has one level (see `tiebreak.backends.levels`), so every run is a process of its own.
"""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tiebreak.backends.levels import VARIABLES, Level, supported
from tiebreak.backends.platform import cpu_features
from tiebreak.reports.cli import Parser

RECORDS = Path("out")
GRACE_SECONDS = 20.0


def run(levels: Sequence[Level], pytest_arguments: Sequence[str]) -> int:
    """Run pytest once per level, each keeping its records under the level's name, then compare the records.

    Args:
        levels: the levels to run.
        pytest_arguments: arguments for pytest, `--save` not among them.

    Returns:
        0 if every run and the comparison did well, 1 if any failed or left no records, 2 if any was interrupted or
        refused its arguments. pytest's refusal ends the round: the next level would refuse them too.

    Raises:
        KeyboardInterrupt: on Ctrl-C, when the run in progress has ended.
    """
    failed: dict[str, int] = {}
    kept: list[str] = []
    for number, level in enumerate(levels, start=1):
        print(f"level {number} of {len(levels)}: {_title(level)}", flush=True)
        records = RECORDS / f"{level.name}.json"
        before = _modified(records)
        command = [sys.executable, "-m", "pytest", f"--save={level.name}", *pytest_arguments]
        if status := _call(command, environment(level)):
            failed[level.name] = status
        if status == 4:
            break
        # A file of an earlier round must not pass for this one's.
        if _modified(records) == before:
            print(f"level {level.name} kept no records in {records}", file=sys.stderr)
            failed.setdefault(level.name, 1)
        else:
            kept.append(str(records))
    if len(kept) > 1 and (status := _compare(kept)):
        failed["comparison"] = status
    for name, status in failed.items():
        print(f"failed: {name} (exit code {status})", file=sys.stderr)
    return 2 if {2, 4} & set(failed.values()) else int(bool(failed))


def _compare(records: Sequence[str]) -> int:
    """Show kept records side by side; the exit code of the command that does."""
    return _call([sys.executable, "-m", "tiebreak.reports.cli", "compare", *records], dict(os.environ))


def _call(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Exit code of a command. On Ctrl-C, which the terminal sends to both, the command gets time to end by itself."""
    with subprocess.Popen(command, env=environment) as process:
        try:
            return process.wait()
        except KeyboardInterrupt:
            try:
                process.wait(GRACE_SECONDS)
            except (KeyboardInterrupt, subprocess.TimeoutExpired):
                process.kill()
            raise


def environment(level: Level) -> dict[str, str]:
    """This process's environment, changed to the level's."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | dict(level.environment)


def _modified(path: Path) -> int | None:
    """Time of a file's last change in nanoseconds, None if there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None


def _title(level: Level) -> str:
    settings = " ".join(f"{name}={value}" for name, value in level.environment.items())
    return f"{level.name:28}{settings or '(environment as it is, without these variables)'}"


def _parser() -> Parser:
    parser = Parser(
        prog="python -m tiebreak.programs.levels",
        description="The instruction-set levels of this CPU: environments in which PyTorch's results differ in bits.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="list|run")
    verbs.add_parser(
        "list",
        help="name and environment of each level that this CPU has",
        description="Print name and environment of each level that this CPU has, the highest first.",
    )
    verbs.add_parser(
        "run",
        help="pytest once per level, then the comparison",
        usage="%(prog)s -- [PYTEST_ARGUMENT ...]",
        description="Run pytest with the arguments after -- once per level, each in a process of its own that keeps "
        "its records as out/<level>.json, then compare the records. Example: run -- -n auto tests/matrix",
        epilog="Exit codes: 0 all held, 1 a level failed, 2 bad usage or an interrupted run of pytest, 130 Ctrl-C.",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of this module.

    Args:
        arguments: its arguments, those of the process by default.

    Returns:
        The exit code.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    own, for_pytest = given[:split], given[split + 1 :]
    parser = _parser()
    options, unknown = parser.parse_known_args(own)
    if unknown or (options.verb == "list" and split < len(given)):
        parser.error(f"unknown argument {[*unknown, '--'][0]} (pytest's arguments go after 'run --')")
    if any(argument.split("=")[0] == "--save" for argument in for_pytest):
        parser.error("--save is set to each level's name and can't be given")
    levels = supported(cpu_features())
    if options.verb == "list":
        print("\n".join(map(_title, levels)))
        return 0
    try:
        return run(levels, for_pytest)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
