"""`tiebreak show FILE`: the table of one run, on the terminal or in a format for elsewhere."""

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiebreak.reports import selection, store, tables, terminal
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.records import Record, Run

FORMATS = ("simple", "github", "csv", "json", "latex")


def main(arguments: Sequence[str]) -> int:
    """The verb `show`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak show", description="The table of one run.")
    parser.add_argument("file", type=Path, metavar="FILE", help="records of a run")
    parser.add_argument("--format", choices=FORMATS, default="simple", help="default: simple, for the terminal")
    selection.add_options(parser)
    selection.add_only(parser)
    options = parser.parse_args(arguments)
    run = store.read(options.file)
    chosen = selection.Selection(options.backend, options.kernels, options.cases, options.only).apply(run.records)
    run = replace(run, records=tuple(chosen))
    if options.format == "json":
        print(json.dumps(run.as_dict(), indent=1))
    elif options.format == "csv":
        print(as_csv(run), end="")
    else:
        # What a filter by outcome leaves out is not missing.
        terminal.show(_as_tables(run, options.format, "" if options.only else "missing"))
    return HELD


def _as_tables(run: Run, tablefmt: str, absent: str) -> str:
    width = terminal.width() if tablefmt == "simple" else None
    parts = [tables.tables(run.records, width, tablefmt, absent)]
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
