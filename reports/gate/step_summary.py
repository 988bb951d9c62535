"""The short report that GitHub shows on the page of a workflow's run."""

import os
from collections.abc import Sequence
from pathlib import Path

from tiebreak.reports.gate.gate import Outcome
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.grids import Grid

_MOST = 20  # lines of a list: the page is for a glance, the log has them all


def append(text: str) -> None:
    """Append Markdown to the file that GitHub names in GITHUB_STEP_SUMMARY; without the variable, do nothing.

    Raises:
        OSError: the file can't be written.
    """
    if name := os.environ.get("GITHUB_STEP_SUMMARY"):
        with Path(name).open("a", encoding="utf-8") as file:
            file.write(text + "\n\n")


def of_run(run: Run, verdicts: Sequence[str] = ()) -> str:
    """Return a run in short: the verdicts, cells by backend and outcome, then what did not hold."""
    backends = grouped(run.records, lambda record: record.backend)
    rows = [[backend, tables.counts(records)] for backend, records in backends.items()]
    lines = [f"- {record.outcome} {record.id}: {'; '.join(record.reasons)}" for record in run.records if record.fails]
    note = [] if run.complete else ["The run was interrupted: these are the cells that were done."]
    title = f"### tiebreak: {tables.counts(run.records)}"
    judged = [f"```text\n{verdict.replace('```', '')}\n```" for verdict in verdicts]
    table = grids.text([*note, Grid(["backend", "cells"], rows), *_listed(lines)], "github")
    return "\n\n".join([title, *judged, table])


def of_gate(outcome: Outcome, baseline: Path) -> str:
    """Return what the gate found, in short."""
    word = "held" if outcome.held else "fell"
    title = f"### tiebreak: the gate {word} ({outcome.compared} cells compared with {baseline})"
    lines = [f"- worse: {change.record.id}: {change.text}" for change in outcome.worse]
    lines += [f"- better: {change.record.id}: {change.text}" for change in outcome.better]
    lines += [f"- note: {note}" for note in outcome.notes]
    return "\n\n".join([title, grids.text(_listed(lines), "github")]).rstrip()


def _listed(lines: list[str]) -> list[str]:
    """Return a Markdown list of one paragraph, cut short."""
    more = [f"- and {len(lines) - _MOST} more"] if len(lines) > _MOST else []
    return ["\n".join([*lines[:_MOST], *more])] if lines else []
