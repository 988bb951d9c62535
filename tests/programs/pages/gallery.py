"""The gallery: what this suite found on every machine that it has run on, from the records in reports/platforms/.

    python -m tiebreak.programs.pages.gallery add MACHINE FILE...    # keep records of `make platforms`, in compact form
    python -m tiebreak.programs.pages.gallery                        # renew docs/platforms.md

`tiebreak page` makes the page of all of them. Not a line is written by hand.
"""

import argparse
import gzip
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from tiebreak.programs.pages.tables import renew, table
from tiebreak.reports.records import store
from tiebreak.reports.records.record import OUTCOMES, Estimate, Record, Run, Value
from tiebreak.reports.tables.comparison import Agreement, compare
from tiebreak.reports.tables.marks import shown_text

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "reports" / "platforms"
PAGE = ROOT / "docs" / "platforms.md"
SOURCE = "reports/platforms"
NATIVE = "native"
_DIGITS = 5  # significant ones of a measure: verdicts and digests stand beside them
_NAME = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep records, or renew the page; 2 where a name or a file can't be used."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    verbs = parser.add_subparsers(dest="verb")
    add = verbs.add_parser("add", help="keep records in compact form, and renew the page")
    add.add_argument("machine", help="its folder: small letters, digits and dashes")
    add.add_argument("files", nargs="+", type=Path, metavar="FILE", help="records, a file for each level")
    options = parser.parse_args(arguments)
    if options.verb == "add":
        if not _NAME.fullmatch(options.machine):
            parser.error(f"{options.machine}: a name is of small letters, digits and dashes")
        try:
            _keep(options.machine, store.read_all(options.files))
        except (store.UnreadableRecordsError, ValueError) as error:
            parser.error(str(error))
    runs = kept()
    renew(PAGE, SOURCE, whole(runs))
    return 0


def _keep(machine: str, runs: Sequence[Run]) -> None:
    levels = [str(run.platform["level"]) for run in runs]
    for level, run in zip(levels, runs, strict=True):
        if levels.count(level) > 1:
            raise ValueError(f"{machine}: two runs at level {level}")
        if not run.complete:
            raise ValueError(f"{machine}: the run at level {level} was interrupted")
        if str(run.platform.get("commit", "")).endswith("-dirty"):
            raise ValueError(f"{machine}: the run at level {level} is of a checkout with changes; commit them first")
    (FOLDER / machine).mkdir(parents=True, exist_ok=True)
    for level, run in zip(levels, runs, strict=True):
        text = store.as_text(compact(run)).encode()
        (FOLDER / machine / f"{level}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


def compact(run: Run) -> Run:
    """A run as the gallery keeps it: what tables and comparisons read, numbers to five digits, nothing to be drawn."""
    names = {name for name, about in run.measures.items() if about.column}
    names |= {case.headline for case in run.cases.values() if case.headline}
    return replace(
        run,
        records=tuple(_compact(record, names) for record in run.records),
        measures={name: about for name, about in run.measures.items() if name in names},
        seconds={},
    )


def _compact(record: Record, names: set[str]) -> Record:
    measures = {name: _short(value) for name, value in record.measures.items() if name in names}
    return replace(record, measures=measures, evidence={})


def _short(value: Value) -> Value:
    if isinstance(value, Estimate):
        mean, half_width = (
            None if number is None else float(f"{number:.{_DIGITS}g}") for number in (value.mean, value.half_width)
        )
        return replace(value, mean=mean, half_width=half_width)
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def kept() -> dict[str, dict[str, Run]]:
    """The runs by machine and level, the native level first."""
    runs: dict[str, dict[str, Run]] = {}
    for path in sorted(
        FOLDER.glob("*/*.json.gz"), key=lambda path: (path.parent, path.name != f"{NATIVE}.json.gz", path)
    ):
        runs.setdefault(path.parent.name, {})[path.name.removesuffix(".json.gz")] = store.read(path)
    return runs


def whole(runs: Mapping[str, Mapping[str, Run]]) -> Iterator[str]:
    """The tables of docs/platforms.md."""
    for machine, levels in runs.items():
        first = next(iter(levels.values()))
        torch, commit = first.platform["torch"], str(first.platform["commit"])[:7]
        emulated = f" {_sentence(str(first.platform['emulated']))}." if first.platform.get("emulated") else ""
        yield from [f"### {machine}", "", f"{_processor(first)}, torch {torch}, commit `{commit}`.{emulated}", ""]
        yield from [*_machine(levels), ""]
    natives = {machine: levels[NATIVE] for machine, levels in runs.items() if NATIVE in levels}
    for (name, left), (other, right) in itertools.combinations(natives.items(), 2):
        yield from [f"### {name} beside {other}", "", *_agreement({name: left, other: right})]


def _processor(run: Run) -> str:
    """The name, and the widest of the instruction sets that matter here; levels name emulated ones."""
    if run.platform.get("emulated"):
        return f"{run.platform['machine']}, *emulated processor*"
    features = run.platform.get("cpu_features", ())
    known = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in features]
    return f"{run.platform['cpu']}{f' ({known[0]})' if known else ''}"


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _machine(levels: Mapping[str, Run]) -> Iterator[str]:
    outcomes = [
        name for name in OUTCOMES if any(record.outcome == name for run in levels.values() for record in run.records)
    ]
    rows = []
    for level, run in levels.items():
        counted = Counter(record.outcome for record in run.records)
        verdicts = Counter(record.verdict for record in run.records)
        numbers = [*(counted[name] for name in outcomes), verdicts["biased"], verdicts["nonfinite"]]
        rows.append((f"`{level}`", *map(str, numbers)))
    yield from table(("level", *outcomes, "biased", "NaN"), rows)
    if len(levels) > 1:
        yield from ["", *_agreement(levels)]


def _agreement(runs: Mapping[str, Run]) -> Iterator[str]:
    """How many cells agree, and the first of those that do not and show the same."""
    compared = compare(list(runs.values()), list(runs))
    counts = compared.counts
    shared = sum(counts[kind] for kind in (Agreement.BITS, Agreement.VERDICT, Agreement.DISAGREE))
    yield (
        f"Of {shared} cells that all have, {counts[Agreement.BITS]} agree to the bit, {counts[Agreement.VERDICT]} in"
        f" verdict alone, {counts[Agreement.DISAGREE]} disagree."
    )
    rows = [row for row in compared.rows if row.agreement is Agreement.DISAGREE]
    if not rows:
        return
    shown = [tuple(_shown(row.records[place]) for row in rows) for place in range(len(runs))]
    alike: dict[tuple[str, ...], list[str]] = {}  # platforms that show the same in all of these cells share a column
    for name, column in zip(runs, shown, strict=True):
        alike.setdefault(column, []).append(name)
    cells: dict[tuple[str, ...], list[str]] = {}
    for row, *texts in zip(rows, *alike, strict=True):
        cells.setdefault(tuple(texts), []).append(f"`{row.record.kernel}` `{row.record.case}`")
    headings = ["<br>".join(f"`{name}`" for name in names) for names in alike.values()]
    first = ((names[0] + (f", {len(names) - 1} more" if names[1:] else ""), *texts) for texts, names in cells.items())
    yield from ["", *table(("kernel, case", *headings), first)]


def _shown(record: Record | None) -> str:
    return (shown_text(record.shown) if record.shown else record.outcome) if record else "missing"


if __name__ == "__main__":
    sys.exit(main())
