"""`tiebreak findings`: which of the known findings in other people's software the packages that are installed have.

Each is tested by the small script of its report, in a separate process.
"""

import os
import platform
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib import metadata
from pathlib import Path

from tiebreak.programs.processes import finished
from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.names import pick
from tiebreak.reports.tables.run import counted

_SOURCES = "TIEBREAK_SOURCES"  # a folder of unpacked wheels, whose packages count as installed
_SECONDS = 120.0  # that a script may take; the longest, which compiles C++, takes 16
SURPRISES = Path(__file__).parents[2] / "findings"  # scripts that install what they ask
REPORTS = Path(__file__).parents[2] / "docs" / "reports"  # the list, and scripts for packages as they are installed


@dataclass(frozen=True)
class KnownFinding:
    """A row of docs/findings.md, and how to test for it."""

    id: str  # how the command names it
    section: str  # of the page
    what: str  # it is and where, as Markdown
    size: str = ""  # how large it is
    hit: str = ""  # who is hit
    shown: str = ""  # by what
    guarded: str = ""  # the case or the check that shows it
    mended: str = ""  # by what
    package: str = ""  # whose it is, as pip names it
    version: str = ""  # of the package, in which it was found
    script: str = ""  # in docs/reports, ends with 1 where it is present, else with 0; empty: there is none
    machine: str = ""  # it happens on no other, as Python names machines; empty: on all
    compiles: bool = False  # whether the script needs a C++ compiler
    changes: Mapping[str, str] = field(default_factory=dict)  # files of the package, and the ed script that mends each

    @property
    def title(self) -> str:
        """The finding without its place: the emphasised words, or those before a colon."""
        return self.what.split("**")[1] if "**" in self.what else self.what.partition(": ")[0]


class State(Enum):
    """The answers to whether the installed packages have a finding."""

    PRESENT = "present"
    UNDECIDED = "undecided"
    ABSENT = "absent"
    NOT_INSTALLED = "not installed"


@dataclass(frozen=True)
class ScriptAnswer:
    """The answer of a finding's script for the installed packages."""

    finding: KnownFinding  # that was asked for
    state: State  # what became of it
    version: str = ""  # of the package that is installed
    why: str = ""  # what the script printed last, or why there is no answer

    @property
    def package(self) -> str:
        """The package with its version; where it was found in another one, with that too."""
        tested = self.finding.version if self.version not in ("", self.finding.version) else ""
        return f"{self.finding.package} {self.version}".strip() + (f" (found in {tested})" if tested else "")


def surprises() -> dict[str, str]:
    """Return the scripts of findings/ by name, each with the sentence that it begins with."""
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted(SURPRISES.glob("*.sh"))}
    return {name: text.splitlines()[1].removeprefix("# ") for name, text in texts.items()}


def known_findings() -> list[KnownFinding]:
    """Return the rows of docs/findings.md that have a script."""
    text = (REPORTS / "findings.toml").read_text(encoding="utf-8")
    return [KnownFinding(**each) for each in tomllib.loads(text)["finding"]]


def main(arguments: Sequence[str]) -> int:
    """Run the verb `findings`; see `tiebreak.reports.cli.main`."""
    parser = Parser(
        prog="tiebreak findings",
        description="Known findings in other people's software: which of them the installed packages have. Each is"
        " tested by its report's script, in a separate process.",
        epilog="exit codes: 0, 1 a finding of --fail-if-present is present or can't be told, 2 bad usage",
    )
    parser.add_argument("ids", nargs="*", metavar="ID", help="those to ask for; globs are allowed (default: all)")
    failing = "end with exit code 1 where one of these is present; globs are allowed"
    parser.add_argument("--fail-if-present", metavar="ID,...", default="", help=failing)
    options = parser.parse_args(arguments)
    rows = known_findings()
    by_id = {row.id: row for row in rows if row.script}
    named = partial(pick, "finding", known=by_id, listed="`tiebreak findings` names")
    chosen = named(",".join(options.ids) or "*", flag="ID")
    failing_ids = named(options.fail_if_present, flag="--fail-if-present") if options.fail_if_present else []
    answers = []
    for name in dict.fromkeys((*chosen, *failing_ids)):
        terminal.say(name)
        answers.append(answer_of(by_id[name]))
    terminal.show("\n".join(_lines(answers, len(rows) - len(by_id))))
    bad = [answer.finding.id for answer in answers if answer.state in (State.PRESENT, State.UNDECIDED)]
    if failed := [name for name in failing_ids if name in bad]:
        terminal.show(f"FAILED: {', '.join(failed)} by --fail-if-present")
    return FAILED if failed else PASSED


def answer_of(finding: KnownFinding) -> ScriptAnswer:
    """Run a finding's script, and return what it tells."""
    if finding.machine not in ("", platform.machine()):
        return ScriptAnswer(finding, State.ABSENT, why=f"it happens on {finding.machine} alone")
    root, version = next(installed(finding.package), ("", ""))
    if not version:
        return ScriptAnswer(finding, State.NOT_INSTALLED, why=f"pip install --no-deps {finding.package}")
    path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, str(REPORTS / finding.script)]
    try:
        done = finished(command, {**os.environ, "PYTHONPATH": path}, seconds=_SECONDS)
    except UsageError as error:
        return ScriptAnswer(finding, State.UNDECIDED, version, str(error))
    failed = done.returncode not in (PASSED, FAILED) or done.stderr.startswith("Traceback")
    state = State.UNDECIDED if failed else State.PRESENT if done.returncode else State.ABSENT
    last = (done.stderr if failed else done.stdout).strip().splitlines()[-1:]
    return ScriptAnswer(finding, state, version, last[0] if last else f"its script ended with {done.returncode}")


def installed(package: str) -> Iterator[tuple[str, str]]:
    """Yield where a package is, in the order of importing, and its version without a local part."""
    sources = os.environ.get(_SOURCES)
    unpacked = sorted(map(str, Path(sources).iterdir())) if sources else []
    for root in (*unpacked, *sys.path):
        for distribution in metadata.distributions(name=package, path=[root]):
            yield root, distribution.version.partition("+")[0]


def _lines(answers: Sequence[ScriptAnswer], unchecked: int) -> Iterator[str]:
    """Yield a line for each, the worst first, and below it why, or what its script printed last."""
    package = max(len(answer.package) for answer in answers)
    for each in sorted(answers, key=lambda each: list(State).index(each.state)):
        yield f"{each.state.value:15}{each.finding.id:24}{each.package:{package + 2}}{each.finding.title}"
        if each.why:
            yield f"{'':15}{each.why}"
        if each.state is State.PRESENT and each.finding.mended:
            yield f"{'':15}mended by: {each.finding.mended}"
    for name, sentence in surprises().items():
        yield f"{'not asked':15}{name:24}{sentence}"
        yield f"{'':15}make findings FINDING={name}"
    yield f"docs/findings.md has {counted(unchecked, 'more finding')}, which no script asks for."
