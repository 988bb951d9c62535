"""`tiebreak show FILE...`: the table of one run, audit or sweep, or of training over seeds, in a format of choice."""

import argparse
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from tiebreak.reports import files
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.files import FileKind
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.decode import Data
from tiebreak.reports.records.order import cases_of
from tiebreak.reports.records.record import OUTCOMES, Estimate, Record, Run
from tiebreak.reports.tables import grids
from tiebreak.reports.tables import run as tables
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.texts import shown_text
from tiebreak.reports.tables.training import pooled, training_tables

_D = TypeVar("_D", bound=Data)
FORMATS = ("simple", "github", "csv", "json", "latex")
_NAMED = ("id", "backend", "kernel", "case", "case_version", "format", "seed", "heads", "experiment", "outcome",
          "verdict")  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    """Run the verb `show`; see `tiebreak.reports.cli.main`."""
    about = "The table of one run, pair, audit or sweep; of several files, their short training runs over the seeds."
    parser = Parser(prog="tiebreak show", description=about)
    files_help = "records of a run, a pair (--json), an audit, or a sweep's folder"
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help=files_help)
    parser.add_argument("--format", choices=FORMATS, default="simple", help="default: simple, for the terminal")
    selection.add_options(parser)
    parser.add_argument("--only", choices=OUTCOMES, help="show cells with this outcome alone")
    options = parser.parse_args(arguments)
    if len(options.files) > 1:
        if options.format in ("csv", "json"):
            raise UsageError(f"--format {options.format}: the table over seeds is simple, github or latex")
        runs = pooled(dict(zip(options.files, store.read_all(options.files), strict=True)))
        grids.show(training_tables(selection.filtered(runs, options, options.only)), options.format)
        return PASSED
    data = files.read(options.files[0])
    if isinstance(data, Run):
        (chosen,) = selection.filtered([data], options, options.only)
        cases = list(cases_of([data]))
        ordered = tuple(sorted(chosen.records, key=lambda record: cases.index(record.case)))
        also = [tables.summary(chosen), "\n".join(tables.failures(ordered))] if options.format == "simple" else []
        chosen = replace(chosen, records=ordered)
        _show(options.format, chosen, csv_grid, lambda run: [*tables.tables(run), *also])
    else:
        kind = files.kind_of(data)
        _show(options.format, _filtered(data, kind, options), kind.grid, kind.parts)
    return PASSED


def _show(tablefmt: str, data: _D, as_csv: Callable[[_D], Grid], as_parts: Callable[[_D], Sequence[Part]]) -> None:
    if tablefmt in ("json", "csv"):
        print(store.as_text(data) if tablefmt == "json" else grids.csv_text(as_csv(data)), end="")
    else:
        grids.show(as_parts(data), tablefmt)


def _filtered(data: _D, kind: FileKind[_D], options: argparse.Namespace) -> _D:
    """Return what is shown of a file that is none of records: all, or what --kernels chooses."""
    for flag in ("backend", "cases", "only", *(("kernels",) if kind.only is None else ())):
        if getattr(options, flag) is not None:
            alone = "; --kernels alone narrows it" if kind.only else ", which is shown whole"
            raise UsageError(f"--{flag}: {options.files[0]} is {kind.about}{alone}")
    if kind.only is None or options.kernels is None:
        return data
    return kind.only(data, selection.pick("kernels", "kernel", options.kernels, kind.kernels(data)))


def csv_grid(run: Run) -> Grid:
    """Return a row for each record: every measure and check that the run describes, empty where there is none."""
    estimated = {name for each in run.records for name, value in each.measures.items() if isinstance(value, Estimate)}
    rows = [_row(record, run, estimated) for record in run.records]
    return Grid(list(rows[0]) if rows else ["id"], [list(row.values()) for row in rows])


def _row(record: Record, run: Run, estimated: Collection[str]) -> dict[str, Any]:
    """Return a record's row of CSV, by column."""
    numbers, answers = dict[str, Any](), dict[str, Any]()
    for name in run.measures:
        value = record.measures.get(name)
        numbers[name] = record.number(name)
        if name in estimated:
            numbers[f"{name}_half_width"] = value.half_width if isinstance(value, Estimate) else None
    for name in run.checks:
        answer = record.answers.get(name)
        answers |= {name: answer and answer.asked, f"{name}_passed": answer and answer.passed}
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
