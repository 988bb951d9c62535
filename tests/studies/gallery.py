"""`python -m tiebreak.studies.gallery MACHINE FILE...`: keep records of `make platforms`, for docs/platforms.md.

The records of every machine are in reports/platforms/, in compact form; `tiebreak page` makes the page of all of them.
"""

import gzip
import itertools
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from tiebreak.backends.provenance import CHECKOUT
from tiebreak.reports.cli import HELD, Parser
from tiebreak.reports.records import store
from tiebreak.reports.records.record import OUTCOMES, Estimate, Record, Run, Value
from tiebreak.reports.tables.comparison import Agreement, compare
from tiebreak.reports.tables.marks import shown_text
from tiebreak.studies.pages import PageTable, table

FOLDER = CHECKOUT / "reports" / "platforms"
NATIVE = "native"
_DIGITS = 5  # significant ones of a measure: verdicts and digests stand beside them


def main(arguments: Sequence[str] | None = None) -> int:
    """Keep records and renew the page; end with 2 where a name or a file can't be used."""
    parser = Parser(prog="python -m tiebreak.studies.gallery", description="Keep the records of a machine.")
    parser.add_argument("machine", help="its folder: small letters, digits and dashes")
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="records, a file for each level")
    options = parser.parse_args(arguments)
    try:
        _keep(options.machine, store.read_all(options.files))
    except (store.UnreadableRecordsError, ValueError) as error:
        parser.error(str(error))
    TABLES[0].renew()
    return HELD


def _keep(machine: str, runs: Sequence[Run]) -> None:
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", machine):
        raise ValueError(f"{machine}: a name is of small letters, digits and dashes")
    by_level = {str(run.platform["level"]): run for run in runs}
    if len(by_level) < len(runs):
        raise ValueError(f"{machine}: two runs are of the same level")
    for level, run in by_level.items():
        if not run.complete:
            raise ValueError(f"{machine}: the run at level {level} was interrupted")
        if str(run.platform.get("commit", "")).endswith("-dirty"):
            raise ValueError(f"{machine}: the run at level {level} is of a checkout with changes; commit them first")
    (FOLDER / machine).mkdir(parents=True, exist_ok=True)
    for level, run in by_level.items():
        text = store.as_text(compact(run)).encode()
        (FOLDER / machine / f"{level}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


def compact(run: Run) -> Run:
    """Return what tables and comparisons read of a run: numbers to five digits, nothing to be drawn."""
    names = {name for name, about in run.measures.items() if about.column}
    names |= {case.headline for case in run.cases.values() if case.headline}
    records = tuple(
        replace(
            each, measures={name: _short(value) for name, value in each.measures.items() if name in names}, evidence={}
        )
        for each in run.records
    )
    kept = {name: about for name, about in run.measures.items() if name in names}
    return replace(run, records=records, measures=kept, seconds={})


def _short(value: Value) -> Value:
    if isinstance(value, Estimate):
        return replace(value, mean=_rounded(value.mean), half_width=_rounded(value.half_width))
    return _rounded(value)


def _rounded(number: float | None) -> float | None:
    return None if number is None else float(f"{number:.{_DIGITS}g}")


def kept() -> dict[str, dict[str, Run]]:
    """Return the runs by machine and level, the native level first."""
    runs: dict[str, dict[str, Run]] = {}
    paths = FOLDER.glob("*/*.json.gz")
    for path in sorted(paths, key=lambda path: (path.parent, path.name != f"{NATIVE}.json.gz", path)):
        runs.setdefault(path.parent.name, {})[path.name.removesuffix(".json.gz")] = store.read(path)
    return runs


def whole(runs: Mapping[str, Mapping[str, Run]]) -> Iterator[str]:
    """Yield the tables of docs/platforms.md."""
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
    """Return a processor's name, and the widest of the instruction sets that matter here."""
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
    """Yield how many cells agree, and the first of those that do not and show the same."""
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


TABLES = [PageTable("platforms.md", "reports/platforms", lambda: whole(kept()))]

if __name__ == "__main__":
    sys.exit(main())
