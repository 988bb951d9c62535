"""`tiebreak show FILE`: the table of one run or audit, on the terminal or in a format for elsewhere."""

import argparse
import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiebreak.reports import audit, audit_tables, files, selection, tables, terminal
from tiebreak.reports.audit import Audits
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import Record, Run

FORMATS = ("simple", "github", "csv", "json", "latex")


def main(arguments: Sequence[str]) -> int:
    """The verb `show`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak show", description="The table of one run or audit.")
    parser.add_argument("file", type=Path, metavar="FILE", help="records of a run, or an audit")
    parser.add_argument("--format", choices=FORMATS, default="simple", help="default: simple, for the terminal")
    selection.add_options(parser)
    selection.add_only(parser)
    options = parser.parse_args(arguments)
    found = files.read(options.file)
    if isinstance(found, Run):
        _show_run(found, options)
    else:
        _show_audits(found, options)
    return HELD


def _show_run(run: Run, options: argparse.Namespace) -> None:
    chosen = selection.Selection(options.backend, options.kernels, options.cases, options.only).apply(run.records)
    run = replace(run, records=tuple(chosen))
    if options.format == "json":
        print(json.dumps(run.as_dict(), indent=1))
    elif options.format == "csv":
        print(as_csv(run), end="")
    else:
        # What a filter by outcome leaves out is not missing.
        terminal.show(_as_tables(run, options.format, "" if options.only else "missing"))


def _show_audits(audits: Audits, options: argparse.Namespace) -> None:
    for flag in ("backend", "cases", "only"):
        if getattr(options, flag) is not None:
            raise UsageError(f"--{flag}: {options.file} is an audit of compiled kernels; --kernels alone narrows it")
    if options.kernels is not None:
        wanted = selection.pick("kernels", "kernel", options.kernels, audits.kernels)
        audits = replace(audits, audits=tuple(one for one in audits.audits if one.kernel in wanted))
    if options.format == "json":
        print(audit.as_json(audits), end="")
    elif options.format == "csv":
        print(audit_tables.as_csv(audits), end="")
    else:
        terminal.show(audit_tables.audit_tables(audits, terminal.limit(options.format), options.format))


def _as_tables(run: Run, tablefmt: str, absent: str) -> str:
    parts = [tables.tables(run.records, terminal.limit(tablefmt), tablefmt, absent)]
    if tablefmt == "simple":
        parts += [tables.summary(run), tables.fallen(run.records)]
    return "\n\n".join(part for part in parts if part)


def as_csv(run: Run) -> str:
    """The records as CSV, a line each, fields that have no number empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, list(_row(run.records[0], run)) if run.records else ["id"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row(record, run) for record in run.records)
    return out.getvalue()


def _row(record: Record, run: Run) -> dict[str, Any]:
    measures, claim, prediction, training = record.measures, record.claim, record.prediction, record.training
    named = ("id", "backend", "kernel", "case", "case_version", "format", "seed", "heads", "outcome", "verdict")
    numbers = ("rms_ulps", "max_ulps", "error_over_bound", "gain", "nonfinite", "left_out", "elements", "repeatable")
    return {
        **{name: getattr(record, name) for name in named},
        "bias": measures and measures.bias.mean,
        "bias_half_width": measures and measures.bias.half_width,
        **{name: measures and getattr(measures, name) for name in numbers},
        "delta_bias": measures and measures.delta_bias.mean,
        "delta_bias_half_width": measures and measures.delta_bias.half_width,
        "plan": record.plan,
        "claim": claim and claim.expectation,
        "claim_met": claim and claim.met,
        "predicted_bias": prediction and prediction.bias.mean,
        "prediction_met": prediction and prediction.met,
        "equal_bits": prediction and prediction.equal_bits,
        "trained_measure": training and training.headline,
        "trained_value": training and training.measures.get(training.headline),
        "digest": record.digest,
        "seconds": run.seconds.get(record.id),
        "reasons": "; ".join(record.reasons),
        "command": record.command,
    }
