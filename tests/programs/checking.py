"""`tiebreak.check(function) -> Verdict`: a kernel through the matrix from a notebook, or from another program."""

import inspect
import io
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, TypedDict, Unpack

from msgspec.structs import replace

from tiebreak.backends.registry import BACKENDS
from tiebreak.backends.torch_device import PREFIX
from tiebreak.matrix.options import FORWARDED
from tiebreak.programs import check as command
from tiebreak.programs.processes import finished
from tiebreak.reports.cli import USAGE
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import store
from tiebreak.reports.verdict import Verdict, Verdicts

_CHECKING = "TIEBREAK_CHECKING"  # set in the process that imports the function's file
_MODULE = "tiebreak_given"  # what a function that has no file is imported from


#: The options of `tiebreak check`, with `_` for `-`; its --help says what each does.
CheckOptions = TypedDict("CheckOptions", {
    "as": str, "backend": str, "allow_missing": str, "kernels": str, "declare": list[str], "plan": str,
    "backward": Literal["own", "emulated"], "fair": bool, "no_worse_than": Literal["rounded"], "rules": bool,
    "captured": str, "cases": str, "features": str, "experiments": str, "dtype": str, "seed": int, "heads": int,
    "cell_timeout": float, "budget": str, "expected": str, "save": str, "out": str, "baseline": str, "fail": str,
    "across": bool, "update_baseline": bool,
}, total=False)  # fmt: skip


def check(
    function: Callable[..., Any] | str,
    *,
    in_process: bool = False,
    workers: str | int = "auto",
    device: object = None,
    **options: Unpack[CheckOptions],
) -> Verdict:
    """Put one attention kernel through the matrix, as `tiebreak check` does.

    Args:
        function: of (q, k, v, ...), as docs/your-kernel.md has it, in a file; or a target such as `mine.py:attention`.
        in_process: run it in this process, one cell after the other, for a function that has no file (of a notebook);
            what the kernel breaks, such as the device, stays broken. Else it runs in separate processes.
        workers: how many; as `-n`.
        device: where a harness has its tensors, as torch names it; the backend is the one that computes there.
        options: those of `tiebreak check`, with `_` for `-`: cases, plan, seed, heads, dtype, backend, fair, declare...
            Without `out` no records are kept.

    Returns:
        What there is to say of it: ok, headline, findings, failed, plan, share, cells... Printed, it is what the
        command prints first.

    Raises:
        tiebreak.reports.errors.UsageError: an option that there is not, a function that can't be found or called, a
            device that no backend computes on, several backends, an interrupted run that did nothing.
    """
    if os.environ.get(_CHECKING):
        raise UsageError("tiebreak.check is called as its function's file is imported: put it under __name__ == ...")
    if device is not None:
        options = {"backend": _backend_on(str(device)), **options}
    with tempfile.TemporaryDirectory(prefix="tiebreak-") as folder:
        if unknown := options.keys() - FORWARDED.keys():
            raise UsageError(f"tiebreak.check has no {', '.join(sorted(unknown))}; it has {', '.join(FORWARDED)}")
        words = [word for name, value in options.items() for word in FORWARDED[name].words(value)]
        kept = [] if "out" in options else ["--out", folder]
        if in_process:
            verdicts = _here(function, [*words, *kept, "-n", "0"])
        else:
            words = [_target(function), *words, "-n", str(workers)]
            verdicts = _apart([*words, *kept], Path(folder) / "verdict.json")
    if len(verdicts) != 1:
        raise UsageError(f"{len(verdicts)} verdicts, and a call gives one: name one backend, and no other kernels")
    return verdicts[0] if in_process else replace(verdicts[0], command=shlex.join(["tiebreak", "check", *words]))


def _backend_on(device: str) -> str:
    """Return the backend that computes on a device itself."""
    candidates = reversed([*BACKENDS.values()])  # of several on one device the core's own wins, which comes first
    backends = {each.device: each.name for each in candidates if each.composed and not each.predicts}
    return backends.get(kind := device.partition(":")[0], PREFIX + kind)


def _target(function: Callable[..., Any] | str) -> str:
    """Return the command line's name of a function."""
    if isinstance(function, str):
        return function
    name = getattr(function, "__qualname__", "")
    try:
        file = Path(inspect.getsourcefile(inspect.unwrap(function)) or "")
    except TypeError:
        file = Path()
    if not name or "<" in name or file.suffix != ".py" or not file.is_file():
        raise UsageError(
            f"{name or function!r} is in no file that another process could import: put it in one, or say"
            " in_process=True"
        )
    return f"{file}:{name}"


def _apart(words: list[str], path: Path) -> list[Verdict]:
    program = [sys.executable, "-m", "tiebreak.reports.cli", "check", *words, "--json", str(path)]
    done = finished(program, os.environ | {_CHECKING: "1"})
    if done.returncode == USAGE or not path.exists():
        raise UsageError(done.stderr.strip().removeprefix("tiebreak check: ") or "it was interrupted")
    return list(store.load(path, Verdicts).verdicts)


def _here(function: Callable[..., Any] | str, words: list[str]) -> list[Verdict]:
    if isinstance(function, str):
        return _run([function, *words])
    name = getattr(function, "__name__", type(function).__name__).strip("<>")
    module = ModuleType(_MODULE)
    setattr(module, name, function)
    sys.modules[_MODULE] = module
    try:
        return _run([f"{_MODULE}:{name}", *words])
    finally:
        del sys.modules[_MODULE]


def _run(arguments: Sequence[str]) -> list[Verdict]:
    """Return the verdicts of the command with these words, run in this process, silently; UsageError: exit code 2."""
    follower = command.Follower(io.StringIO())
    _, printed = command.run(command.parsed(arguments), follower)
    if follower.run is None:
        raise UsageError("it was interrupted" if follower.interrupted else command.refusal(printed))
    return follower.verdicts(follower.run)
