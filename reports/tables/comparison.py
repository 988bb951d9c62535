"""Several runs side by side: for every cell, what the platforms agree on. No printing."""

import enum
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records.order import case_places, kernel_places
from tiebreak.reports.records.record import HELD, PASSING, SKIPPED, Record, Run, record_id

_NATIVE = "native"  # the level that a processor has by itself
_DEVICES = ("gpu", "npu")  # of a platform
_VERSIONS = ("torch", "python", "os", "commit", "wheel")  # what may tell platforms of one processor apart


class Agreement(enum.Enum):
    """What the runs agree on in one cell: what --only takes for it, the mark of its row, how a summary counts it."""

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
        """That of the first run that has the cell: all agree in the cell's names."""
        return next(record for record in self.records if record is not None)

    @property
    def letters(self) -> tuple[str, ...]:
        """One a run: the same letter for the same bits, "" where there are none; a to z, then a1, b1 and so on."""
        digests = [record.digest if record else None for record in self.records]
        names = {digest: at for at, digest in enumerate(dict.fromkeys(filter(None, digests)))}
        letters = {digest: f"{chr(ord('a') + at % 26)}{at // 26 or ''}" for digest, at in names.items()}
        return tuple("" if digest is None else letters[digest] for digest in digests)


@dataclass(frozen=True)
class Comparison:
    """Runs side by side."""

    labels: tuple[str, ...]  # of the platforms
    rows: tuple[Row, ...]  # by backend and format, then in the order of the cases' groups and of the kernels

    @property
    def counts(self) -> dict[Agreement, int]:
        """Rows of each agreement."""
        return {agreement: sum(row.agreement is agreement for row in self.rows) for agreement in Agreement}


def compare(runs: Sequence[Run], labels: Sequence[str]) -> Comparison:
    """Put runs side by side: a row for every cell that any run has."""
    by_id = [{record.id: record for record in run.records} for run in runs]
    heads = [str(run.options.get("heads", "")) for run in runs]
    known = {record.id: record for run in runs for record in run.records}
    place, kernels = case_places(runs), kernel_places(runs)
    largest = {kind: described.largest for run in runs for kind, described in run.experiments.items()}
    order = sorted(known.values(), key=lambda cell: (cell.backend, cell.format, place[cell.case], kernels[cell.kernel]))
    rows = (_row([run.get(cell.id) for run in by_id], heads, largest.get(cell.experiment)) for cell in order)
    return Comparison(tuple(labels), tuple(rows))


def matched(runs: Sequence[Run]) -> list[Run]:
    """Return the runs, with one name for the one kernel of each that not all of them have: an old one and a new one.

    Raises:
        UsageError: a run has none of its own, or several; names them.
    """
    kernels = [list(dict.fromkeys(record.kernel for record in run.records)) for run in runs]
    shared = set(kernels[0]).intersection(*kernels)
    own = [[name for name in names if name not in shared] for names in kernels]
    if not any(own):
        return list(runs)
    for number, names in enumerate(own, start=1):
        if len(names) != 1:
            found = ", ".join(names) or "none"
            raise UsageError(f"--match kernel: file {number} has {found}; expected one kernel of its own in each file")
    common = " -> ".join(name for (name,) in own)

    def renamed(cell: Record) -> Record:
        return replace(cell, kernel=common, id=record_id(cell.backend, common, cell.case, cell.format))

    return [
        replace(run, records=tuple(renamed(cell) if cell.kernel == name else cell for cell in run.records))
        for run, (name,) in zip(runs, own, strict=True)
    ]


def _row(records: Sequence[Record | None], heads: Sequence[str], largest: str | None) -> Row:
    inputs = tuple(
        f"case v{record.case_version}, seed {record.seed}, {heads} heads" if record else ""
        for record, heads in zip(records, heads, strict=True)
    )
    return Row(tuple(records), inputs, _agreement(records, inputs), largest)


def _agreement(records: Sequence[Record | None], inputs: Sequence[str]) -> Agreement:
    if len(set(inputs) - {""}) > 1:
        return Agreement.NOT_COMPARABLE
    ran = [record for record in records if record is not None and record.outcome != SKIPPED]
    if len({(record.verdict, _passed(record)) for record in ran}) > 1:
        return Agreement.DISAGREE
    if len(ran) < len(records):
        return Agreement.LACKING
    digests = {record.digest for record in ran}
    # Without a digest (a crash everywhere) nothing is known of the bits.
    return Agreement.BITS if len(digests) == 1 and None not in digests else Agreement.VERDICT


def _passed(record: Record) -> str:
    """Return the outcome; whether anything was asked of what passes depends on the backend, not on the result."""
    return HELD if record.outcome in PASSING else record.outcome


def platform_labels(runs: Sequence[Run], paths: Sequence[Path]) -> list[str]:
    """Return a label a platform: its processor and devices, and its level unless that is the processor's own.

    Where that leaves some alike: the versions that tell them apart, and the file's name where none does.
    """
    labels = []
    for run in runs:
        devices = [str(run.platform[name]) for name in _DEVICES if run.platform.get(name)]
        level = run.platform["level"]
        # An emulated processor's level is its name.
        named = level == _NATIVE or run.platform.get("emulated")
        cpu, machine = run.platform["cpu"], run.platform.get("machine", "")
        processor = f"{machine} {cpu}" if run.platform.get("emulated") and machine not in cpu else cpu
        labels.append(", ".join([processor, *devices, *([] if named else [level])]))
    for version in _VERSIONS:
        words = [f"{version} {value}" if (value := run.platform.get(version)) else "" for run in runs]
        pairs = list(zip(labels, words, strict=True))
        several = [label for label, _ in set(pairs)]
        labels = [f"{label}, {word}" if word and several.count(label) > 1 else label for label, word in pairs]
    return distinct(labels, paths)


def distinct(labels: Sequence[str], paths: Sequence[Path]) -> list[str]:
    """Return the labels; behind those that are alike the names of their files, as short as tells them apart."""
    for names in ([path.stem for path in paths], [str(path) for path in paths]):
        often, stems = Counter(labels), Counter(zip(labels, names, strict=True))
        if max(stems.values(), default=1) == 1:
            return [
                f"{label} ({name})" if often[label] > 1 else label for label, name in zip(labels, names, strict=True)
            ]
    return list(labels)
