"""`tiebreak training FILE...`: the training runs of one or several seeds as one table, and as a figure."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tiebreak.reports import terminal
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.record import Run
from tiebreak.reports.tables.training import TRAINING, training_grids, training_tables


def main(arguments: Sequence[str]) -> int:
    """The verb `training`; see `tiebreak.reports.cli.main`."""
    parser = Parser(
        prog="tiebreak training",
        description="The short training runs of several seeds in one table, lowest to highest.",
    )
    parser.add_argument(
        "files", type=Path, nargs="+", metavar="FILE", help="records of runs on one platform, a seed each"
    )
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="default: simple")
    parser.add_argument(
        "--figure", type=Path, metavar="FILE", help="also draw it: .svg, .png or .pdf (needs matplotlib)"
    )
    selection.add_options(parser)
    options = parser.parse_args(arguments)
    runs = store.read_all(options.files)
    _check_one_platform(runs, options.files)
    records = [record for run in runs for record in run.records if record.experiment == TRAINING]
    if not records:
        raise UsageError(f"{options.files[0]}: no training runs in there; run cases called train_...")
    wanted = selection.Selection(options.backend, options.kernels, options.cases).apply(records)
    kept = {record.id for record in wanted}
    chosen = [replace(run, records=tuple(one for one in run.records if one.id in kept)) for run in runs]
    terminal.show(training_tables(chosen, options.format))
    if options.figure is not None:
        from tiebreak.reports.page import plots

        plots.save_training(training_grids(chosen), options.figure)
        print(f"figure: {options.figure}")
    return HELD


def _check_one_platform(runs: Sequence[Run], paths: Sequence[Path]) -> None:
    """Refuse a mixture: its ranges would be those of platforms, not of seeds."""
    for run, path in zip(runs, paths, strict=True):
        for name in ("cpu", "level"):
            first, other = runs[0].platform[name], run.platform[name]
            if first != other:
                raise UsageError(
                    f"{path}: platform.{name} is {other!r}, {first!r} in {paths[0]}; compare puts them side by side"
                )
