"""`tiebreak gate BASELINE NEW`, and a gate's result: for the terminal, for GitHub, next to a kernel's lines."""

import argparse
import os
import re
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path

from tiebreak.reports import terminal
from tiebreak.reports.cli import FAILED, PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import expected, gate
from tiebreak.reports.gate.expected import Limits, limits
from tiebreak.reports.gate.gate import Outcome
from tiebreak.reports.records import store
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables import grids
from tiebreak.reports.tables.grids import Grid
from tiebreak.reports.tables.run import counted, counts
from tiebreak.reports.terminal import runnable

_LISTED = 20  # lines of a summary's list: the page is for a glance, the log has them all
_ANNOTATED = 10  # that GitHub takes of one step
_AT = re.compile(r"\((\S+), line (\d+)\)")  # of a reason that says where the kernel raised

Place = tuple[str, int]  # a file and a line


def main(arguments: Sequence[str]) -> int:
    """Run the verb `gate`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak gate", description="Fail if a run has a regression from a baseline.")
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="records that were kept")
    parser.add_argument("new", type=Path, metavar="NEW", help="records of the run to judge")
    fail = "how much worse which measures may get: NAME:NUMBER, ...; NAME_share: of itself"
    parser.add_argument("--fail", metavar="LIMITS", help=fail)
    across = "BASELINE is another platform's: compare all but bits and what has no interval"
    parser.add_argument("--across", action="store_true", help=across)
    parser.add_argument("--update-baseline", action="store_true", help="then make NEW the baseline")
    options = parser.parse_args(arguments)
    allowed = limits(options.fail, Path.cwd())
    if options.update_baseline and not options.baseline.exists():
        gate.update(store.read(options.new), options.baseline)
        print(f"baseline written: {options.baseline}")
        return PASSED
    gate.check_kept(options.baseline)
    baseline, run = store.read_all([options.baseline, options.new])
    allowed.check({**baseline.measures, **run.measures})
    passed = _judge(baseline, run, allowed, options)
    if options.update_baseline:
        gate.update(run, options.baseline)
        print(f"baseline updated: {options.baseline}")
        return PASSED
    return PASSED if passed else FAILED


def _judge(baseline: Run, run: Run, allowed: Limits, options: argparse.Namespace) -> bool:
    """Compare, and report to the terminal and GitHub; return whether the gate passed."""
    try:
        entries = expected.read(None, Path.cwd(), None)  # a file of records has the checks that were asked
        outcome = gate.gate(baseline, run, allowed, across=options.across, expected=entries)
    except UsageError as error:
        if not options.update_baseline:
            raise UsageError(f"{options.baseline}: {error}") from error
        print(f"not compared: {error}")
        return False
    terminal.show(report(outcome, options.baseline))
    append_summary(summary_of_gate(outcome, options.baseline))
    return outcome.passed


def report(outcome: Outcome, baseline: Path) -> str:
    """Return the gate's report: a line for the whole, then regressions, what is better, and notes."""
    word = "passed" if outcome.passed else "FAILED"
    compared = f"{counted(outcome.compared, 'cell')} compared with {baseline}"
    lines = [f"gate {word}: {compared}: {counted(len(outcome.worse), 'regression')}, {len(outcome.better)} better"]
    for name, changes in groupby(outcome.worse, lambda change: change.record.id):
        cell = list(changes)
        lines.append(f"regression  {name}: {'; '.join(change.text for change in cell)}")
        lines.append(f"            rerun: {runnable(cell[0].record.command)}")
    lines += [f"better      {better.record.id}: {better.text}" for better in outcome.better]
    return "\n".join([*lines, *(f"note        {note}" for note in outcome.notes)])


def append_summary(text: str) -> None:
    """Append Markdown to the file that GitHub names in GITHUB_STEP_SUMMARY; without the variable, do nothing."""
    if name := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(text + "\n\n")


def summary_of_run(run: Run, verdicts: Sequence[str] = ()) -> str:
    """Return a run in short, as Markdown: the verdicts, cells by backend and outcome, then what failed."""
    backends = grouped(run.records, lambda record: record.backend)
    rows = [[backend, counts(records)] for backend, records in backends.items()]
    failed = [f"{record.outcome} {record.id}: {'; '.join(record.reasons)}" for record in run.records if record.fails]
    note = [] if run.complete else ["The run was interrupted: these are the cells that were done."]
    judged = [f"```text\n{verdict.replace('```', '')}\n```" for verdict in verdicts]
    table = grids.text([*note, Grid(["backend", "cells"], rows), _list(failed)], "github")
    return "\n\n".join([f"### tiebreak: {counts(run.records)}", *judged, table])


def summary_of_gate(outcome: Outcome, baseline: Path) -> str:
    """Return the gate's report in short, as Markdown."""
    word = "passed" if outcome.passed else "failed"
    title = f"### tiebreak: the gate {word} ({outcome.compared} cells compared with {baseline})"
    groups = [("regression", outcome.worse), ("better", outcome.better)]
    lines = [f"{word}: {change.record.id}: {change.text}" for word, changes in groups for change in changes]
    lines += [f"note: {note}" for note in outcome.notes]
    return "\n\n".join([title, grids.text([_list(lines)], "github")]).rstrip()


def _list(lines: Sequence[str]) -> str:
    more = [f"and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else []
    return "\n".join(f"- {line}" for line in [*lines[:_LISTED], *more])


def annotations(run: Run, outcome: Outcome | None, places: Mapping[str, Place]) -> list[str]:
    """Return workflow commands: an error for each cell that fails the run, or that the gate found a regression in.

    They are put at a kernel's function, by `places`, or at the line of its file that raised, by the reason.
    """
    errors = {record.id: (record, record.outcome, record.reasons) for record in run.records if record.fails}
    for change in outcome.worse if outcome is not None else ():
        errors.setdefault(change.record.id, (change.record, "a regression from the baseline", (change.text,)))
    lines = []
    for record, what, reasons in errors.values():
        properties, text = {"title": f"{record.case}: {what}"}, "; ".join(reasons)
        if record.kernel in places:
            file, line = places[record.kernel]
            raised = [at for name, at in _AT.findall(text) if name == Path(file).name]
            properties |= {"file": file, "line": raised[0] if raised else str(line)}
        lines.append(_error(properties, text))
    more = len(lines) - _ANNOTATED
    told = {"title": f"{more + 1} more cells"}
    return lines if more <= 0 else [*lines[: _ANNOTATED - 1], _error(told, "see the summary")]


def _error(properties: Mapping[str, str], text: str) -> str:
    where = ",".join(f"{name}={_escaped(value, ':,')}" for name, value in properties.items())
    return f"::error {where}::{_escaped(text)}"


def _escaped(text: str, separators: str = "") -> str:
    """Return the text as a workflow command takes it: a record may not begin its own command."""
    return "".join(f"%{ord(letter):02X}" if letter in f"%\r\n{separators}" else letter for letter in text)
