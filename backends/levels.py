"""The instruction-set levels of one CPU, each a platform of its own.

Two environment variables, both read once as a process starts, change the bits of PyTorch's CPU results:
ATEN_CPU_CAPABILITY chooses the vector code of ATen's own kernels (SDPA's flash attention among them), and
ONEDNN_MAX_CPU_ISA limits what oneDNN does with a matrix product in bf16. A process therefore has one level, and a
comparison of levels takes one process for each.

Seen on an AMD Zen 4 (AVX512 with bf16, no AMX; torch 2.13.0+cpu) with the same inputs, batched products of (64, K) and
(K, 64), heads of width 64. Letters tell bits apart within a column; all 3 x 7 settings were tried:

| ATen \\ oneDNN            | bf16 matmul, K = 128 | bf16 matmul, K = 2048 | flash, 128 keys | exp(0) - 1 in flash |
|---|---|---|---|---|
| avx512, bf16 and up       | a | a | a | -5.34e-5 |
| avx512, AVX512_CORE       | a | b | a | -5.34e-5 |
| avx512, AVX2              | b | c | a | -5.34e-5 |
| avx2, bf16 and up         | a | a | b | -5.34e-5 |
| avx2, AVX512_CORE         | a | b | b | -5.34e-5 |
| avx2, AVX2                | b | c | b | -5.34e-5 |
| default, bf16 and up      | a | a | c | 0 |
| default, AVX512_CORE      | a | b | c | 0 |
| default, AVX2             | b | c | c | 0 |

- "bf16 and up" is AVX512_CORE_BF16, _FP16, _AMX and no limit: alike on this CPU. So are AVX2 and AVX2_VNNI_2.
- The exponential is that of bf16 and fp16 inputs; with fp32 inputs exp(0) is 1 at every level.
- Long products (K >= 512) with a transposed right-hand side, and subnormal results, have bits of their own at
  (default, AVX2).
- The flash backward pass mixes both parts: 6 sets of bits at 128 keys, 9 at 1,024.
- One worker thread or two: no difference. PyTorch's own random numbers are not the same host inputs: torch.randn's bits
  at `default` differ from those at the other two.

`LEVELS` has one level for each of the six sets of the columns K = 128, flash and exp(0) together, and takes the
AVX512_CORE member of a set where that adds the third set of bits at K = 2,048. Left out are the three settings whose
bits, but for the mixture in the flash backward pass at 1,024 keys, another level shows already. The level with AMX
switched off is there for CPUs that have it; it was not measured.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

#: What decides the level. oneDNN still reads the last, its former name.
VARIABLES = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
RECORDS = Path("out")
GRACE_SECONDS = 20.0

_AVX2 = frozenset({"avx2", "fma"})
_AVX512 = _AVX2 | {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
_AMX = _AVX512 | {"avx512_bf16", "amx_tile", "amx_bf16"}


@dataclass(frozen=True)
class Level:
    """One instruction-set level."""

    name: str  #: what the command line, the records and their files call it
    environment: Mapping[str, str] = field(hash=False)  #: the variables that put a process on it; the others are unset
    needs: frozenset[str] = frozenset()  #: CPU features without which it can't run, or is the same as another level


def _level(name: str, aten: str, onednn: str, needs: frozenset[str]) -> Level:
    return Level(name, {"ATEN_CPU_CAPABILITY": aten, "ONEDNN_MAX_CPU_ISA": onednn}, needs)


#: From the highest down; the first is the untouched environment. See the top of this module for the choice.
LEVELS = (
    Level("native", {}),
    _level("aten-avx512-onednn-bf16", "avx512", "AVX512_CORE_BF16", _AMX),
    _level("aten-avx512-onednn-avx2", "avx512", "AVX2", _AVX512),
    _level("aten-avx2-onednn-avx512", "avx2", "AVX512_CORE", _AVX512),
    _level("aten-avx2-onednn-avx2", "avx2", "AVX2", _AVX512),
    _level("aten-default-onednn-avx512", "default", "AVX512_CORE", _AVX512),
    _level("aten-default-onednn-avx2", "default", "AVX2", _AVX2),
)


def supported(features: Collection[str]) -> tuple[Level, ...]:
    """The levels that a CPU with these features has, from the highest down; `native` alone if it is not an x86.

    Args:
        features: its features under Linux's names, as `tiebreak.backends.platform.cpu_features` gives them.
    """
    return tuple(level for level in LEVELS if level.needs.issubset(features))


def current(environment: Mapping[str, str]) -> str:
    """Name of the level that a process started in this environment is on; "custom" if it is none of `LEVELS`."""
    chosen = {name: environment[name] for name in VARIABLES if environment.get(name)}
    return next((level.name for level in LEVELS if level.environment == chosen), "custom")


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
        if status := _call(command, _environment(level)):
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
    if find_spec("tiebreak.reports.cli") is None:
        print(f"tiebreak.reports.cli is not installed: compare {' '.join(records)} by hand", file=sys.stderr)
        return 1
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


def _environment(level: Level) -> dict[str, str]:
    """This process's environment, changed to the level's."""
    return {name: value for name, value in os.environ.items() if name not in VARIABLES} | dict(level.environment)


def _modified(path: Path) -> int | None:
    """Time of a file's last change in nanoseconds, None if there is no such file."""
    return path.stat().st_mtime_ns if path.exists() else None


def _title(level: Level) -> str:
    settings = " ".join(f"{name}={value}" for name, value in level.environment.items())
    return f"{level.name:28}{settings or '(environment as it is, without these variables)'}"


class _Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; --help says more\n")


def _parser() -> _Parser:
    parser = _Parser(
        prog="python -m tiebreak.backends.levels",
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
    # platform needs this module's current(); and at the top of both, the two would go round in a circle.
    from tiebreak.backends.platform import cpu_features

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
