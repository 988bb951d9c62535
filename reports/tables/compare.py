"""`tiebreak compare FILE FILE...`: platforms across, kernels and cases down; what differs is marked."""

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import selection, store
from tiebreak.reports.records.order import cases_of, grouped, kernel_places
from tiebreak.reports.records.record import NUMBERS, PASSING, REPLACED, SKIPPED, Estimate, Record, Run, record_id
from tiebreak.reports.tables import grids, texts
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted

_VERSIONS = ("torch", "python", "os", "commit", "wheel")  # what may tell platforms of one processor apart


class Agreement(enum.Enum):
    """The agreement of runs in one cell: its word for --only, its row's mark, its name in a summary."""

    BITS = "agree", "=", "agree to the bit"
    VERDICT = "bits", "~", "agree in verdict, not in bits"  # verdict and outcome are the same
    DISAGREE = "different", "!", "disagree in verdict or outcome"
    LACKING = "missing", "-", "missing or skipped somewhere"  # those that ran it agree in verdict
    NOT_COMPARABLE = "incomparable", "/", "not comparable (other inputs)"  # another version, seed or number of heads

    def __init__(self, option: str, mark: str, words: str) -> None:
        self.option, self.mark, self.words = option, mark, words


@dataclass(frozen=True)
class Row:
    """One cell in every run."""

    records: tuple[Record | None, ...]  # one a run; None: the run lacks the cell
    inputs: tuple[str, ...]  # one a run: what decides the inputs; "" where it lacks the cell
    agreement: Agreement
    largest: str | None = None  # the measure that is its largest error, if its kind of experiment names one

    @property
    def record(self) -> Record:
        """The record of the first run that has the cell: all agree in the cell's names."""
        return next(record for record in self.records if record is not None)

    @property
    def letters(self) -> tuple[str, ...]:
        """A letter for each run, the same for the same bits, "" where there are none; a to z, then a1, b1 and so on."""
        digests = [record.digest if record else None for record in self.records]
        names = {digest: at for at, digest in enumerate(dict.fromkeys(filter(None, digests)))}
        letters = {digest: f"{chr(ord('a') + at % 26)}{at // 26 or ''}" for digest, at in names.items()}
        return tuple("" if digest is None else letters[digest] for digest in digests)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    labels: tuple[str, ...]  # of the platforms
    rows: tuple[Row, ...]  # by backend and format, then in the order of the cases' groups and of the kernels


DIFFERING = frozenset(Agreement) - {Agreement.BITS}  # the rows that are shown unless others are asked for
_FINER = {f"{sign}.{digits}f": f"{sign}.{digits + 1}f" for sign in ("", "+") for digits in range(6)}
_LEGEND = (
    "What tiebreak show shows, a mean with a digit more and the half width of its 99.9 % interval; B: biased, ?: not"
    " known yet;\nmax: largest error, in ulps. The same letter: the same bits. !..!: it failed there; (..): that is"
    " excused. Rows: " + ", ".join(f"{each.mark} {each.words}" for each in Agreement)
)


def main(arguments: Sequence[str]) -> int:
    """Run the verb `compare`; see `tiebreak.reports.cli.main`."""
    parser = Parser(prog="tiebreak compare", description="Several runs side by side.")
    parser.add_argument("files", type=Path, nargs="+", metavar="FILE", help="records of two or more runs")
    parser.add_argument("--format", choices=("simple", "github", "latex"), default="simple", help="default: simple")
    parser.add_argument("--all", action="store_true", help="show rows that agree to the bit everywhere, too")
    only = {each.option: each for each in Agreement}
    about = ", ".join(f"{option}: {each.words}" for option, each in only.items())
    parser.add_argument("--only", choices=only, help=f"show these rows alone; {about}")
    selection.add_options(parser)
    selection.add_match(parser)
    options = parser.parse_args(arguments)
    if options.all and options.only:
        raise UsageError("--all and --only exclude one another: give one of them")
    if len(options.files) < 2:
        raise UsageError("one file alone has nothing to compare with; name two or more")
    runs = store.read_all(options.files)
    labels = platform_labels(runs, options.files)
    chosen = selection.filtered(runs, options)
    comparison = compare(match_kernels(chosen) if options.match else chosen, labels)
    shown = {only[options.only]} if options.only else set(Agreement) if options.all else DIFFERING
    grids.show([_platforms(runs, options.files, labels), *parts(comparison, shown)], options.format)
    return PASSED


def _platforms(runs: Sequence[Run], paths: Sequence[Path], labels: Sequence[str]) -> str:
    """Return a list of the platforms, an item each."""
    items = []
    for run, path, label in zip(runs, paths, labels, strict=True):
        software = "".join(f", {name} {run.platform[name]}" for name in ("torch", "numpy") if name in run.platform)
        note = "" if run.complete else ", INCOMPLETE: the run was interrupted"
        items.append(f"- {label}: {path}, {counted(len(run.records), 'cell')}{software}{note}")
    return "\n".join(items)


def parts(comparison: Comparison, shown: Collection[Agreement] = DIFFERING) -> list[Part]:
    """Return the output of `compare`: counts, then a table for every backend and format of the rows that are shown."""
    rows = [row for row in comparison.rows if row.agreement in shown]
    shown_parts: list[Part] = [summary(comparison)]
    for title, group in grouped(rows, lambda row: f"{row.record.backend}, {row.record.format}").items():
        names = (f"{row.agreement.mark} {row.record.kernel} {row.record.case}" for row in group)
        lines = [[name, *cell_texts(row)] for name, row in zip(names, group, strict=True)]
        shown_parts.append(Grid(["kernel, case", *comparison.labels], lines, title))
    if hidden := len(comparison.rows) - len(rows):
        why = " with the same bits everywhere" if shown is DIFFERING else ""
        shown_parts.append(f"left out: {counted(hidden, 'row')}{why}; --all shows all")
    return [*shown_parts, *numbers(comparison), *([_LEGEND] if rows else [])]


def numbers(comparison: Comparison) -> Iterator[Part]:
    """Yield a table of cells that keep numbers of one kind, how far from the first run they are, and its legend."""
    kept = [(row, [record and record.evidence.get(NUMBERS) for record in row.records]) for row in comparison.rows]
    rows = [(row, values, next(filter(None, values))) for row, values in kept if any(values)]
    for title, group in grouped(rows, lambda each: f"{each[2].about}, {each[2].unit}").items():
        names = (f"{row.record.kernel}, {row.record.backend}, {row.record.format}" for row, *_ in group)
        lines = [[name, *_deviations(values, first)] for name, (_, values, first) in zip(names, group, strict=True)]
        yield Grid(["kernel", *comparison.labels], lines, title)
        yield "First their rms; of each other run the rms of the difference to that, and its mean with the sign."


def _deviations(kept: Sequence[Any], first: Any) -> Iterator[str]:
    """Yield a text a run."""
    for run in kept:
        if run is None or run.inputs != first.inputs:
            yield "other inputs" if run else "missing"
            continue
        pairs = zip(run.values, first.values, strict=True)
        values = [math.nan if None in pair else pair[0] - (pair[1] if run is not first else 0.0) for pair in pairs]
        rms = math.sqrt(sum(value**2 for value in values) / len(values))
        yield f"{rms:.3g}" if run is first else f"{rms:.2g} ({sum(values) / len(values):+.1g})"


def summary(comparison: Comparison) -> str:
    """Return how many cells agree, and in what."""
    agreed = Counter(row.agreement for row in comparison.rows)
    counts = [f"{agreed[each]} {each.words}" for each in Agreement if agreed[each]]
    head = f"{counted(len(comparison.rows), 'cell')} on {len(comparison.labels)} platforms"
    return f"{head}: {', '.join(counts)}" if counts else head


def cell_texts(row: Row) -> list[str]:
    """Return a text a platform: letter of the bits (or what makes the inputs others), what is shown, largest error."""
    keys = row.inputs if row.agreement is Agreement.NOT_COMPARABLE else row.letters
    return [f"{key} {_text(record, row.largest)}".strip() for key, record in zip(keys, row.records, strict=True)]


def _text(record: Record | None, largest: str | None) -> str:
    if record is None:
        return "missing"
    text, shown = texts.plain_text(record), record.shown
    mean = record.measures.get(shown.kind) if shown is not None and shown.kind not in REPLACED else None
    if shown is not None and isinstance(mean, Estimate):
        text = texts.shown_text(shown, _FINER.get(shown.spec, shown.spec), mean.half_width)
    if largest is not None and (error := record.number(largest)) is not None:
        text += f" max {error:.3g}"
    # Whether a check was asked depends on the backend, so passes have no mark.
    return text if record.outcome in PASSING else texts.marked(text, texts.mark_of(record))


def compare(runs: Sequence[Run], labels: Sequence[str]) -> Comparison:
    """Put runs side by side: a row for every cell that any run has."""
    by_id = [{record.id: record for record in run.records} for run in runs]
    first_of = {record.id: record for run in runs for record in run.records}
    cases, kernels = list(cases_of(runs)), kernel_places(runs)
    largest = {kind: described.largest for run in runs for kind, described in run.experiments.items()}

    def place(cell: Record) -> tuple[str, str, int, int]:
        return cell.backend, cell.format, cases.index(cell.case), kernels[cell.kernel]

    rows = []
    for cell in sorted(first_of.values(), key=place):
        records = tuple(by_cell.get(cell.id) for by_cell in by_id)
        inputs = tuple(
            f"case v{each.case_version}, seed {each.seed}, {run.options.get('heads', '')} heads" if each else ""
            for each, run in zip(records, runs, strict=True)
        )
        rows.append(Row(records, inputs, _agreement(records, inputs), largest.get(cell.experiment)))
    return Comparison(tuple(labels), tuple(rows))


def match_kernels(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with one name for the kernel that each has alone; UsageError if one has none, or several."""
    kernels = [list(dict.fromkeys(record.kernel for record in run.records)) for run in runs]
    shared = set(kernels[0]).intersection(*kernels)
    alone = [[name for name in names if name not in shared] for names in kernels]
    if not any(alone):
        return list(runs)
    for number, names in enumerate(alone, start=1):
        if len(names) != 1:
            listed = ", ".join(names) or "none"
            raise UsageError(f"--match kernel: file {number} has {listed}; expected one kernel that only it has")
    common = " -> ".join(name for (name,) in alone)

    def renamed(cell: Record) -> Record:
        return replace(cell, kernel=common, id=record_id(cell.backend, common, cell.case, cell.format))

    return [
        replace(run, records=tuple(renamed(cell) if cell.kernel == name else cell for cell in run.records))
        for run, (name,) in zip(runs, alone, strict=True)
    ]


def _agreement(records: Sequence[Record | None], inputs: Sequence[str]) -> Agreement:
    if len(set(inputs) - {""}) > 1:
        return Agreement.NOT_COMPARABLE
    ran = [record for record in records if record is not None and record.outcome != SKIPPED]
    # Whether a passing cell was asked anything depends on the backend, not on the result.
    if len({(record.verdict, record.outcome not in PASSING and record.outcome) for record in ran}) > 1:
        return Agreement.DISAGREE
    if len(ran) < len(records):
        return Agreement.LACKING
    digests = {record.digest for record in ran}
    # Without a digest (a crash everywhere) nothing is known of the bits.
    return Agreement.BITS if len(digests) == 1 and None not in digests else Agreement.VERDICT


def platform_labels(runs: Sequence[Run], paths: Sequence[Path]) -> list[str]:
    """Return a label a platform: processor, devices, level unless it is native, and what tells it from the others."""
    labels = []
    for platform in (run.platform for run in runs):
        # The name of an emulated processor says its level too.
        emulated, cpu, level = platform.get("emulated"), platform["cpu"], platform["level"]
        machine = platform.get("machine", "")
        devices = [str(platform[name]) for name in ("gpu", "device") if platform.get(name)]
        processor = f"{machine} {cpu}" if emulated and machine not in cpu else cpu
        if "stated" in platform:  # of outputs that were judged elsewhere
            labels.append(f"stated: {platform['stated'].get('device', 'no device')}")
            continue
        labels.append(", ".join([processor, *devices, *([] if emulated or level == "native" else [level])]))
    for version in _VERSIONS:
        words = [f"{version} {value}" if (value := run.platform.get(version)) else "" for run in runs]
        pairs = list(zip(labels, words, strict=True))
        several = [label for label, _ in set(pairs)]
        labels = [f"{label}, {word}" if word and several.count(label) > 1 else label for label, word in pairs]
    return distinct(labels, paths)


def distinct(labels: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return the labels; behind those that are alike the names of their files, as short as tells them apart."""
    often = Counter(labels)
    for names in ([path.stem for path in paths], [str(path) for path in paths]):
        pairs = list(zip(labels, names, strict=True))
        if len(set(pairs)) == len(pairs):
            return [f"{label} ({name})" if often[label] > 1 else label for label, name in pairs]
    return list(labels)
