"""The command `tiebreak`: a table of verbs, each imported when it is called."""

import argparse
import ast
import contextlib
import gc
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple, NoReturn, TextIO

from tiebreak import plugins
from tiebreak.reports.errors import UsageError

PASSED, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130  # exit codes


def count(text: str, least: int = 0) -> int:
    """Return the number that an option is given, which can't be negative."""
    if int(text) < least:
        raise argparse.ArgumentTypeError(f"must be at least {least}, not {text}")
    return int(text)


def positive(text: str) -> int:
    """Return the number that an option is given, which can't be negative or 0."""
    return count(text, 1)


class Parser(argparse.ArgumentParser):
    """An argument parser that complains in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(USAGE, f"{self.prog}: {message}; --help says more\n")


class Verb(NamedTuple):
    """One verb of the command."""

    target: str  # module:function, of the arguments, that returns the exit code
    help: str = ""  # what it is for; "": the first line of its docstring says it, or of its module's if it is `main`
    origin: str = "tiebreak"  # the package that brings it, with its version


#: The core's, by their words; of a plug-in, `list.cases` is `tiebreak list cases`.
VERBS: Mapping[str, Verb] = {
    "check": Verb("tiebreak.programs.check:main", "a kernel of your own: the verdict, and what it rests on"),
    "show": Verb("tiebreak.reports.tables.show:main", "the table of one run, or of another file; training over seeds"),
    "compare": Verb("tiebreak.reports.tables.compare:main", "several runs side by side: what agrees to the bit"),
    "gate": Verb("tiebreak.reports.gate.report:main", "fail if a run is worse than a baseline"),
}
_CODES = "exit codes: 0 all passed, 1 a claim or the gate failed, 2 bad usage or unreadable input"


@dataclass(frozen=True)
class _Output:
    """The standard output. After its reader (head, a pager) has closed it, the rest is dropped."""

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
    """Run the command line; the process' own by default. Return the exit code, see `_CODES`."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal's encoding lacks is no error
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments == ["--version"]:
        print(f"tiebreak {import_module('importlib.metadata').version('tiebreak')}")  # no verb needs that module
        return PASSED
    collecting = gc.isenabled()
    gc.disable()  # a command makes hundreds of thousands of objects and no garbage; looking for some takes a third
    try:
        with contextlib.redirect_stdout(_Output(sys.stdout)):
            # A verb of the core needs no search for plug-ins.
            code = _choose("tiebreak", VERBS if arguments and arguments[0] in VERBS else verbs(), arguments)
            sys.stdout.flush()
        return code
    except plugins.PluginError as error:
        print(error, file=sys.stderr)
        return USAGE
    finally:
        if collecting:
            gc.enable()


def verbs() -> dict[str, Verb]:
    """Return the core's verbs, then those of plug-ins; none is imported."""
    brought = plugins.registered("tiebreak.verbs").items()
    return {**VERBS, **{name: Verb(entry.value, "", origin) for name, (entry, origin) in brought}, **VERBS}


def _help(verb: Verb) -> str:
    """Return the help of a verb: for a plug-in's, the first line of its docstring, without importing it."""
    if verb.help:
        return verb.help
    module, _, name = verb.target.partition(":")
    try:
        loader = find_spec(module).loader  # type: ignore[union-attr]
        tree = ast.parse(loader.get_source(loader.name))  # type: ignore[union-attr]
        functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        text = ast.get_docstring(tree if name == "main" else functions.get(name, tree)) or ""
    except Exception as error:  # whatever somebody's package raises as it is looked for
        return f"of {verb.origin}, not to be read ({type(error).__name__})"
    line = text.partition("\n")[0]
    return (line.partition("`: ")[2] or line).removesuffix(".")


def _choose(command: str, verbs: Mapping[str, Verb], arguments: Sequence[str]) -> int:
    """Call the verb that the first argument names, or the first ones."""
    groups, name = dict[str, dict[str, Verb]](), arguments[0] if arguments else ""
    for words, verb in verbs.items():
        first, _, more = words.partition(".")
        groups.setdefault(first, {})[more] = verb
    if name in ("-h", "--help"):
        width = max(map(len, groups)) + 2
        helps = {word: _help(inner[""]) if "" in inner else ", ".join(inner) for word, inner in groups.items()}
        lines = [f"  {word:{width}}{text}" for word, text in helps.items()]
        print("\n".join([f"usage: {command} VERB ...; {command} VERB --help says more", "", *lines, "", _CODES]))
        return PASSED
    if name not in groups:
        problem = f"unknown verb {name!r}" if name else "a verb is missing"
        print(f"{command}: {problem}: known are {', '.join(groups)}; --help says more", file=sys.stderr)
        return USAGE
    command, inner, rest = f"{command} {name}", groups[name], arguments[1:]
    return _call(command, inner[""], rest) if "" in inner else _choose(command, inner, rest or ["--help"])


def _call(command: str, verb: Verb, arguments: Sequence[str]) -> int:
    module, _, name = verb.target.partition(":")
    try:
        function = getattr(import_module(module), name)
    except (Exception, SystemExit) as error:  # whatever somebody's plug-in raises as it is imported
        package = str(getattr(error, "name", "")).partition(".")[0]
        missing = isinstance(error, ModuleNotFoundError) and package != "tiebreak"
        if not missing and verb.origin == "tiebreak":
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        called = {"torch": "PyTorch"}.get(package, package)
        needs = f"needs {called}, which is not installed: pip install {package}"
        print(f"{command}: {needs if missing else f'{verb.origin} is broken, {reason}: update it'}", file=sys.stderr)
        return USAGE
    try:
        code: int = function(arguments)
    except (UsageError, plugins.PluginError) as error:
        print(f"{command}: {error}", file=sys.stderr)
        return USAGE
    except SystemExit as request:  # argparse ends the process; a function returns
        return request.code if isinstance(request.code, int) else PASSED
    except KeyboardInterrupt:
        print(f"{command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    return code


if __name__ == "__main__":
    sys.exit(main())
