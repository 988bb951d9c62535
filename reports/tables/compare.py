"""`tiebreak compare FILE FILE...`: platforms across, kernels and cases down; what differs is marked."""

from collections.abc import Collection, Sequence
from pathlib import Path

from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.order import grouped
from tiebreak.reports.records.record import PASSING, REPLACED, Estimate, Record, Run
from tiebreak.reports.tables import grids, marks
from tiebreak.reports.tables.comparison import Agreement, Comparison, Row, compare, matched, platform_labels
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted

DIFFERING = frozenset(Agreement) - {Agreement.BITS}  # the rows that are shown unless others are asked for
_FINER = {f"{sign}.{digits}f": f"{sign}.{digits + 1}f" for sign in ("", "+") for digits in range(6)}
_LEGEND = (
    "What tiebreak show shows, a mean with a digit more and the half width of its 99.9 % interval; B: biased, ?: not"
    " known yet;\nmax: largest error, in ulps. The same letter: the same bits. !..!: the cell fell there; (..): that is"
    " excused. Rows: " + ", ".join(f"{each.mark} {each.words}" for each in Agreement)
)


def main(arguments: Sequence[str]) -> int:
    """The verb `compare`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak compare", description="Several runs side by side.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of two or more runs")
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="default: simple")
    parser.add_argument("--all", action="store_true", help="show rows that agree to the bit everywhere, too")
    parser.add_argument(
        "--only",
        choices=[each.option for each in Agreement],
        help="show these rows alone; " + ", ".join(f"{each.option}: {each.words}" for each in Agreement),
    )
    selection.add_options(parser)
    selection.add_match(parser)
    options = parser.parse_args(arguments)
    if options.all and options.only:
        raise UsageError("--all and --only exclude one another: give one of them")
    if len(options.files) < 2:
        raise UsageError("one file alone has nothing to compare with; name two or more")
    runs = store.read_all(options.files)
    labels = platform_labels(runs, options.files)
    chosen = selection.narrowed(runs, options)
    comparison = compare(matched(chosen) if options.match else chosen, labels)
    shown: Collection[Agreement] = set(Agreement) if options.all else DIFFERING
    if options.only:
        shown = {each for each in Agreement if each.option == options.only}
    grids.show([_platforms(runs, options.files, labels), *parts(comparison, shown)], options.format)
    return HELD


def _platforms(runs: Sequence[Run], paths: Sequence[Path], labels: Sequence[str]) -> str:
    """Return a list of the platforms, an item each."""
    items = []
    for run, path, label in zip(runs, paths, labels, strict=True):
        software = "".join(f", {name} {run.platform[name]}" for name in ("torch", "numpy") if name in run.platform)
        note = "" if run.complete else ", INCOMPLETE: the run was interrupted"
        items.append(f"- {label}: {path}, {counted(len(run.records), 'cell')}{software}{note}")
    return "\n".join(items)


def parts(comparison: Comparison, shown: Collection[Agreement] = DIFFERING) -> list[Part]:
    """Return what `compare` shows: counts, then a table for every backend and format of the rows that are shown."""
    rows = [row for row in comparison.rows if row.agreement in shown]
    told: list[Part] = [summary(comparison)]
    for title, group in grouped(rows, lambda row: f"{row.record.backend}, {row.record.format}").items():
        names = (f"{row.agreement.mark} {row.record.kernel} {row.record.case}" for row in group)
        texts = [[name, *cell_texts(row)] for name, row in zip(names, group, strict=True)]
        told.append(Grid(["kernel, case", *comparison.labels], texts, title))
    if hidden := len(comparison.rows) - len(rows):
        why = " with the same bits everywhere" if shown is DIFFERING else ""
        told.append(f"left out: {counted(hidden, 'row')}{why}; --all shows all")
    return [*told, _LEGEND] if rows else told


def summary(comparison: Comparison) -> str:
    """Return how many cells agree, and in what."""
    counts = [f"{count} {agreement.words}" for agreement, count in comparison.counts.items() if count]
    head = f"{counted(len(comparison.rows), 'cell')} on {len(comparison.labels)} platforms"
    return f"{head}: {', '.join(counts)}" if counts else head


def cell_texts(row: Row) -> list[str]:
    """Return a text a platform: letter of the bits (or what makes the inputs others), what is shown, largest error."""
    keys = row.inputs if row.agreement is Agreement.NOT_COMPARABLE else row.letters
    return [f"{key} {_text(record, row.largest)}".strip() for key, record in zip(keys, row.records, strict=True)]


def _text(record: Record | None, largest: str | None) -> str:
    if record is None:
        return "missing"
    text, shown = marks.plain_text(record), record.shown
    mean = record.measures.get(shown.kind) if shown is not None and shown.kind not in REPLACED else None
    if shown is not None and isinstance(mean, Estimate):
        text = marks.shown_text(shown, _FINER.get(shown.spec, shown.spec), mean.half_width)
    if largest is not None and (error := record.number(largest)) is not None:
        text += f" max {error:.3g}"
    # Whether anything was asked depends on the backend: what passes has no mark.
    return text if record.outcome in PASSING else marks.marked(text, marks.mark_of(record))
