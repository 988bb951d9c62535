"""`tiebreak gate BASELINE NEW`: fail if a run is worse than a baseline."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from tiebreak.reports import terminal
from tiebreak.reports.cli import FELL, HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate import expected, gate, report
from tiebreak.reports.gate.settings import Limits, limits
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Run


def main(arguments: Sequence[str]) -> int:
    """The verb `gate`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak gate", description="Fail if a run is worse than a baseline.")
    parser.add_argument("baseline", type=Path, metavar="BASELINE", help="records that were kept")
    parser.add_argument("new", type=Path, metavar="NEW", help="records of the run to judge")
    parser.add_argument(
        "--fail",
        metavar="LIMITS",
        help="how much worse which measures may get: NAME:NUMBER, ...; NAME_share: of itself",
    )
    parser.add_argument(
        "--across",
        action="store_true",
        help="BASELINE is another platform's: compare all but bits and what has no interval",
    )
    parser.add_argument("--update-baseline", action="store_true", help="then make NEW the baseline")
    options = parser.parse_args(arguments)
    allowed = limits(options.fail, Path.cwd())
    if options.update_baseline and not options.baseline.exists():
        gate.update(store.read(options.new), options.baseline)
        print(f"baseline written: {options.baseline}")
        return HELD
    baseline, run = store.read_all([options.baseline, options.new])
    allowed.check({**baseline.measures, **run.measures})
    held = _judge(baseline, run, allowed, options)
    if options.update_baseline:
        gate.update(run, options.baseline)
        print(f"baseline updated: {options.baseline}")
        return HELD
    return HELD if held else FELL


def _judge(baseline: Run, run: Run, allowed: Limits, options: argparse.Namespace) -> bool:
    """Compare, and tell the terminal and GitHub; whether the gate held."""
    try:
        entries = expected.read(None, Path.cwd(), None)  # a file of records has the checks that were asked
        outcome = gate.gate(baseline, run, allowed, across=options.across, expected=entries)
    except UsageError as error:
        if not options.update_baseline:
            raise UsageError(f"{options.baseline}: {error}") from error
        print(f"not compared: {error}")
        return False
    terminal.show(report.report(outcome, options.baseline))
    report.append_summary(report.summary_of_gate(outcome, options.baseline))
    return outcome.held
