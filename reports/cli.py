"""The command `tiebreak`: a table of verbs, each imported when it is called."""

import argparse
import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, NoReturn, TextIO

from tiebreak.reports.errors import UsageError

HELD, FELL, USAGE, INTERRUPTED = 0, 1, 2, 130  # exit codes


def count(text: str, least: int = 0) -> int:
    """The number that an option is given, which can't be negative."""
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
    return int(text)


def positive(text: str) -> int:
    """The same of an option that can't be 0 either."""
    return count(text, 1)


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(USAGE, f"{self.prog}: {message}; --help says more\n")


class Verb(NamedTuple):
    """One verb of the command."""

    module: str  # of tiebreak, has function(arguments) -> exit code
    help: str
    function: str = "main"  # of the module


class Group(NamedTuple):
    """A verb that has verbs of its own."""

    help: str
    verbs: Mapping[str, Verb]


VERBS: Mapping[str, Verb | Group] = {
    "check": Verb("programs.check", "a kernel of your own: the verdict, and what it rests on"),
    "identify": Verb("programs.identify", "the rounding plan of a kernel of your own, from its outputs alone"),
    "pair": Verb("programs.pair", "two kernels: the same bits, two roundings of one thing, or apart"),
    "show": Verb("reports.tables.show", "the table of one run, audit or sweep, or of training over seeds"),
    "compare": Verb("reports.tables.compare", "several runs side by side: what agrees to the bit, what does not"),
    "gate": Verb("reports.gate.report", "fail if a run is worse than a baseline"),
    "page": Verb("reports.page.command", "one HTML file of runs, audits and sweeps: heat maps, figures, tables"),
    "audit": Verb("programs.audit.command", "what rounds in the Triton kernels, compiled for GPUs not here"),
    "statement": Verb("programs.statement",
                      "a folder of records to hand in, held to a profile; --verify: whether one holds"),
    "schema": Verb("reports.schemas", "the JSON Schema of a kind of file that the others write"),
    "rules": Verb("programs.listing", "acceptance rules of other projects, and what they say of kept records", "rules"),
    "findings": Verb("programs.findings", "which known findings in other people's software are in what is installed"),
    "levels": Verb("programs.levels", "the matrix on each instruction-set level of this CPU, or of an emulated one"),
    "shrink": Verb("programs.shrink", "the smallest input on which a kernel goes wrong, as a script to report"),
    "list": Group("what there is: cases, kernels, plans, vendors' plans", {
        "cases": Verb("programs.listing", "inputs and training runs, a line each; all of one", "cases"),
        "kernels": Verb("programs.listing", "of every backend, and adapters of packages", "kernels"),
        "plans": Verb("programs.listing", "rounding plans and shift rules: what --plan takes", "plans"),
        "vendors": Verb("programs.listing", "plans of kernels that vendors ship, with their sources", "vendors"),
    }),
    "lab": Group("the training laboratory: train, sweep, sharpness, fleet", {
        "train": Verb("laboratory.train", "a GPT-2 with any attention kernel, watched by monitors"),
        "sweep": Verb("laboratory.sweep", "how often training diverges: seeds, learning rates, formats, kernels"),
        "sharpness": Verb("laboratory.sharpness", "how sharp a GPT-2's loss is, against the bits of its products"),
        "fleet": Verb("laboratory.fleet", "the matrix on each kind of machine of a Ray cluster, compared"),
    }),
}  # fmt: skip
_CODES = "exit codes: 0 all held, 1 a claim or the gate fell, 2 bad usage or unreadable input"


@dataclass(frozen=True)
class _Output:
    """The standard output. Where its reader (head, a pager) has had enough, the rest goes nowhere."""

    stream: TextIO

    def write(self, text: str) -> int:
        self._unless_closed(lambda: self.stream.write(text))
        return len(text)

    def flush(self) -> None:
        self._unless_closed(self.stream.flush)

    def _unless_closed(self, step: Callable[[], object]) -> None:
        try:
            step()
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; those of the process by default. Returns the exit code, see `_CODES`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no error
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"tiebreak {import_module('importlib.metadata').version('tiebreak')}")  # no verb needs that module
        return HELD
    collecting = gc.isenabled()
    gc.disable()  # a command makes hundreds of thousands of objects and no garbage; looking for some takes a third
    try:
        with contextlib.redirect_stdout(_Output(sys.stdout)):
            code = _choose("tiebreak", VERBS, arguments)
            sys.stdout.flush()
        return code
    finally:
        if collecting:
            gc.enable()


def _choose(command: str, verbs: Mapping[str, Verb | Group], arguments: Sequence[str]) -> int:
    """Call the verb that the first argument names."""
    name = arguments[0] if arguments else ""
    if name in ("-h", "--help"):
        width = max(map(len, verbs)) + 2
        lines = [f"  {name:{width}}{verb.help}" for name, verb in verbs.items()]
        print("\n".join([f"usage: {command} VERB ...; {command} VERB --help says more", "", *lines, "", _CODES]))
        return HELD
    if name not in verbs:
        problem = f"unknown verb {name!r}" if name else "a verb is missing"
        print(f"{command}: {problem}: known are {', '.join(verbs)}; --help says more", file=sys.stderr)
        return USAGE
    verb, rest = verbs[name], arguments[1:]
    if isinstance(verb, Group):
        return _choose(f"{command} {name}", verb.verbs, rest or ["--help"])
    return _call(f"{command} {name}", verb, rest)


def _call(command: str, verb: Verb, arguments: Sequence[str]) -> int:
    try:
        function = getattr(import_module(f"tiebreak.{verb.module}"), verb.function)
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        if package == "tiebreak":
            raise
        called = {"torch": "PyTorch"}.get(package, package)
        print(f"{command}: needs {called}, which is not installed: pip install {package}", file=sys.stderr)
        return USAGE
    try:
        code: int = function(arguments)
    except UsageError as error:
        print(f"{command}: {error}", file=sys.stderr)
        return USAGE
    except SystemExit as request:  # argparse ends the process; a function returns
        return request.code if isinstance(request.code, int) else HELD
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
