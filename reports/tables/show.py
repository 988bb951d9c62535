"""`tiebreak show FILE...`: the table of one run, audit or sweep, or of training over seeds, in a format of choice."""

import argparse
import csv
import io
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiebreak.reports import terminal
from tiebreak.reports.audit import record as audit
from tiebreak.reports.audit import tables as audit_tables
from tiebreak.reports.audit.record import Audits
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.page import plots
from tiebreak.reports.records import files, selection, store
from tiebreak.reports.records.order import case_places
from tiebreak.reports.records.record import Estimate, Record, Run
from tiebreak.reports.sweeps import tables as sweep_tables
from tiebreak.reports.sweeps.store import Sweep
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.marks import shown_text
from tiebreak.reports.tables.training import training_grids, training_tables

FORMATS = ("simple", "github", "csv", "json", "latex")


def main(arguments: Sequence[str]) -> int:
    """The verb `show`; see `tiebreak.reports.cli.main`."""
    parser = Parser(
        prog="tiebreak show",
        description="The table of one run, audit or sweep; of several files, their short training runs over the seeds.",
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="records of a run, an audit, or a sweep's folder"
    )
    parser.add_argument("--format", choices=FORMATS, default="simple", help="default: simple, for the terminal")
    selection.add_options(parser)
    selection.add_only(parser)
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the short training runs to an SVG file")
    options = parser.parse_args(arguments)
    if len(options.files) > 1 or options.figure is not None:
        _show_training(store.read_all(options.files), options)
        return HELD
    content = files.read(options.files[0])
    if isinstance(content, Run):
        _show_run(content, options)
    elif isinstance(content, Sweep):
        _show_sweep(content, options)
    else:
        _show_audits(content, options)
    return HELD


def _show_training(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Training runs of several seeds as one table, lowest to highest, and as a figure."""
    if options.format in ("csv", "json"):
        raise UsageError(f"--format {options.format}: the table over seeds is simple, github or latex")
    _check_one_platform(runs, options.files)
    records = [record for run in runs for record in run.records if record.experiment in run.pooled]
    if not records:
        raise UsageError(f"{options.files[0]}: no training runs in there, and compare puts calls side by side")
    wanted = {record.id for record in _selection(options).apply(records)}
    chosen = [replace(run, records=tuple(record for record in run.records if record.id in wanted)) for run in runs]
    terminal.show(training_tables(chosen, options.format))
    if options.figure is not None:
        plots.save_training(training_grids(chosen), options.figure)
        print(f"figure: {options.figure}")


def _check_one_platform(runs: Sequence[Run], paths: Sequence[Path]) -> None:
    """Refuse a mixture: its ranges would be those of platforms, not of seeds."""
    for run, path in zip(runs, paths, strict=True):
        for name in ("cpu", "level"):
            first, other = runs[0].platform[name], run.platform[name]
            if first != other:
                raise UsageError(
                    f"{path}: platform.{name} is {other!r}, {first!r} in {paths[0]}; compare puts them side by side"
                )


def _selection(options: argparse.Namespace) -> selection.Selection:
    return selection.Selection(options.backend, options.kernels, options.cases, options.only)


def _show_run(run: Run, options: argparse.Namespace) -> None:
    place = case_places([run])
    chosen = _selection(options).apply(run.records)
    run = replace(run, records=tuple(sorted(chosen, key=lambda record: place[record.case])))
    if options.format == "json":
        print(store.as_text(run), end="")
    elif options.format == "csv":
        print(as_csv(run), end="")
    else:
        # What a filter by outcome leaves out is not missing.
        terminal.show(_as_tables(run, options.format, "" if options.only else "missing"))


def _show_sweep(sweep: Sweep, options: argparse.Namespace) -> None:
    _narrowed_by_kernels_alone(options, "a sweep")
    if options.kernels is not None:
        wanted = selection.pick("kernels", "kernel", options.kernels, sweep.settings.kernels)
        kept = tuple(name for name in sweep.settings.kernels if name in wanted)
        runs = tuple(run for run in sweep.runs if run.kernel in wanted)
        sweep = Sweep(replace(sweep.settings, kernels=kept), runs)
    if options.format == "json":
        print(sweep_tables.as_json(sweep), end="")
    elif options.format == "csv":
        print(sweep_tables.as_csv(sweep), end="")
    else:
        terminal.show(sweep_tables.sweep_tables(sweep, terminal.limit(options.format), options.format))


def _narrowed_by_kernels_alone(options: argparse.Namespace, what: str) -> None:
    for flag in ("backend", "cases", "only"):
        if getattr(options, flag) is not None:
            raise UsageError(f"--{flag}: {options.files[0]} is {what}; --kernels alone narrows it")


def _show_audits(audits: Audits, options: argparse.Namespace) -> None:
    _narrowed_by_kernels_alone(options, "an audit of compiled kernels")
    if options.kernels is not None:
        wanted = selection.pick("kernels", "kernel", options.kernels, audits.kernels)
        audits = replace(audits, audits=tuple(each for each in audits.audits if each.kernel in wanted))
    if options.format == "json":
        print(audit.as_json(audits), end="")
    elif options.format == "csv":
        print(audit_tables.as_csv(audits), end="")
    else:
        terminal.show(audit_tables.audit_tables(audits, terminal.limit(options.format), options.format))


def _as_tables(run: Run, tablefmt: str, absent: str) -> str:
    parts = [tables.tables(run, terminal.limit(tablefmt), tablefmt, absent)]
    if tablefmt == "simple":
        parts += [tables.summary(run), tables.fallen(run.records)]
    return "\n\n".join(part for part in parts if part)


def as_csv(run: Run) -> str:
    """The records as CSV, a line each: every measure and check that the run describes; what there is not is empty."""
    out = io.StringIO()
    estimated = {name for each in run.records for name, value in each.measures.items() if isinstance(value, Estimate)}
    rows = [_row(record, run, estimated) for record in run.records]
    writer = csv.DictWriter(out, list(rows[0]) if rows else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


_NAMED = (
    "id",
    "backend",
    "kernel",
    "case",
    "case_version",
    "format",
    "seed",
    "heads",
    "experiment",
    "outcome",
    "verdict",
)


def _row(record: Record, run: Run, estimated: Collection[str]) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    for name in run.measures:
        value = record.measures.get(name)
        numbers[name] = record.number(name)
        if name in estimated:
            numbers[f"{name}_half_width"] = value.half_width if isinstance(value, Estimate) else None
    answers: dict[str, Any] = {}
    for name in run.checks:
        answer = record.answers.get(name)
        answers[name] = answer and answer.asked
        answers[f"{name}_met"] = answer and answer.met
    return {
        **{name: getattr(record, name) for name in _NAMED},
        **numbers,
        "plan": record.plan,
        **answers,
        "shown": record.shown and shown_text(record.shown),
        "digest": record.digest,
        "seconds": run.seconds.get(record.id),
        "excused": record.excused,
        "reasons": "; ".join(record.reasons),
        "command": record.command,
    }
