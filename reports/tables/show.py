"""`tiebreak show FILE...`: the table of one run, audit or sweep, or of training over seeds, in a format of choice."""

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from tiebreak.reports import audit as audit_tables
from tiebreak.reports.audit import Audits
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.page import figures
from tiebreak.reports.pairs.verdict import PairVerdict
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.order import cases_of
from tiebreak.reports.records.record import OUTCOMES, Estimate, Record, Run
from tiebreak.reports.sweeps import tables as sweep_tables
from tiebreak.reports.sweeps.store import Sweep
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.texts import shown_text
from tiebreak.reports.tables.training import training_grids, training_tables

_D = TypeVar("_D", Run, Audits, PairVerdict, Sweep)
FORMATS = ("simple", "github", "csv", "json", "latex")
_NAMED = ("id", "backend", "kernel", "case", "case_version", "format", "seed", "heads", "experiment", "outcome",
          "verdict")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """The verb `show`; see `tiebreak.reports.cli.main`."""
    about = "The table of one run, pair, audit or sweep; of several files, their short training runs over the seeds."
    parser = Parser(prog="tiebreak show", description=about)
    files_help = "records of a run, a pair (--json), an audit, or a sweep's folder"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=files_help)
    parser.add_argument("--format", choices=FORMATS, default="simple", help="default: simple, for the terminal")
    selection.add_options(parser)
    parser.add_argument("--only", choices=OUTCOMES, help="show cells with this outcome alone")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="draw the short training runs to an SVG file")
    options = parser.parse_args(arguments)
    if len(options.files) > 1 or options.figure is not None:
        _show_training(store.read_all(options.files), options)
        return HELD
    match selection.read(options.files[0]):
        case Run() as run:
            (chosen,) = selection.narrowed([run], options, options.only)
            cases = list(cases_of([run]))
            ordered = tuple(sorted(chosen.records, key=lambda record: cases.index(record.case)))
            also = [tables.summary(chosen), "\n".join(tables.fallen(ordered))] if options.format == "simple" else []
            chosen = replace(chosen, records=ordered)
            _show(options.format, chosen, csv_grid, lambda run: [*tables.tables(run), *also])
        case Sweep(settings, runs):
            wanted = _kernels(options, "a sweep", settings.kernels)
            kernels = tuple(name for name in settings.kernels if name in wanted)
            narrowed = Sweep(replace(settings, kernels=kernels), tuple(run for run in runs if run.kernel in wanted))
            _show(options.format, narrowed, sweep_tables.csv_grid, sweep_tables.sweep_tables)
        case PairVerdict() as pair:
            _show(options.format, pair, PairVerdict.grid, PairVerdict.parts)
        case Audits() as audits:
            wanted = _kernels(options, "an audit of compiled kernels", audits.kernels)
            kept = replace(audits, audits=tuple(each for each in audits.audits if each.kernel in wanted))
            _show(options.format, kept, audit_tables.csv_grid, audit_tables.audit_tables)
    return HELD


def _show(tablefmt: str, data: _D, as_csv: Callable[[_D], Grid], as_parts: Callable[[_D], Sequence[Part]]) -> None:
    if tablefmt in ("json", "csv"):
        print(store.as_text(data) if tablefmt == "json" else grids.csv_text(as_csv(data)), end="")
    else:
        grids.show(as_parts(data), tablefmt)


def _show_training(runs: Sequence[Run], options: argparse.Namespace) -> None:
    """Training runs of several seeds as one table, lowest to highest, and as a figure."""
    if options.format in ("csv", "json"):
        raise UsageError(f"--format {options.format}: the table over seeds is simple, github or latex")
    for run, path in zip(runs, options.files, strict=True):
        for name in ("cpu", "level"):  # ranges of a mixture would be those of platforms, not of seeds
            first, other = runs[0].platform[name], run.platform[name]
            if first != other:
                there = f"{other!r}, {first!r} in {options.files[0]}"
                raise UsageError(f"{path}: platform.{name} is {there}; compare puts them side by side")
    records = (tuple(each for each in run.records if each.experiment in run.pooled) for run in runs)
    pooled = [replace(run, records=own) for run, own in zip(runs, records, strict=True)]
    if not any(run.records for run in pooled):
        raise UsageError(f"{options.files[0]}: no training runs in there, and compare puts calls side by side")
    chosen = selection.narrowed(pooled, options, options.only)
    grids.show(training_tables(chosen), options.format)
    if options.figure is not None:
        figures.save_training(training_grids(chosen), options.figure)
        print(f"figure: {options.figure}")


def _kernels(options: argparse.Namespace, what: str, known: Sequence[str]) -> Collection[str]:
    """Return the kernels that are shown of what no other filter narrows."""
    for flag in ("backend", "cases", "only"):
        if getattr(options, flag) is not None:
            raise UsageError(f"--{flag}: {options.files[0]} is {what}; --kernels alone narrows it")
    return known if options.kernels is None else selection.pick("kernels", "kernel", options.kernels, known)


def csv_grid(run: Run) -> Grid:
    """Return a row a record: every measure and check that the run describes; what there is not is empty."""
    estimated = {name for each in run.records for name, value in each.measures.items() if isinstance(value, Estimate)}
    rows = [_row(record, run, estimated) for record in run.records]
    return Grid(list(rows[0]) if rows else ["id"], [list(row.values()) for row in rows])


def _row(record: Record, run: Run, estimated: Collection[str]) -> dict[str, Any]:
    numbers, answers = dict[str, Any](), dict[str, Any]()
    for name in run.measures:
        value = record.measures.get(name)
        numbers[name] = record.number(name)
        if name in estimated:
            numbers[f"{name}_half_width"] = value.half_width if isinstance(value, Estimate) else None
    for name in run.checks:
        answer = record.answers.get(name)
        answers |= {name: answer and answer.asked, f"{name}_met": answer and answer.met}
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
