"""`python -m tiebreak.studies.gallery MACHINE FILE...`: keep records of `make platforms`, for docs/platforms.md.

The records of every machine are in reports/platforms/, in compact form; `tiebreak page` makes the page of all of them,
`tiebreak compare` says which cells disagree. Runs of log-probabilities alone are in reports/nats/.
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
from tiebreak.matrix.experiments.log_probabilities import LogProbabilities
from tiebreak.reports.cli import PASSED, Parser
from tiebreak.reports.records import store
from tiebreak.reports.records.record import NUMBERS, Estimate, Run, Value
from tiebreak.reports.tables.compare import Agreement, compare, numbers
from tiebreak.reports.tables.grids import Grid
from tiebreak.studies.pages import PageTable, table

FOLDER, NATS = CHECKOUT / "reports" / "platforms", CHECKOUT / "reports" / "nats"
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
    for each in TABLES:
        each.renew()
    return PASSED


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
    kinds = {record.experiment for run in runs for record in run.records}
    folder = (NATS if kinds == {LogProbabilities.kind} else FOLDER) / machine
    folder.mkdir(parents=True, exist_ok=True)
    for level, run in by_level.items():
        text = store.as_text(compact(run)).encode()
        (folder / f"{level}.json.gz").write_bytes(gzip.compress(text, 9, mtime=0))


def compact(run: Run) -> Run:
    """Return what tables and comparisons read of a run: numbers to five digits, nothing to be drawn."""
    names = {name for name, about in run.measures.items() if about.column}
    names |= {case.headline for case in run.cases.values() if case.headline}
    records = tuple(
        replace(
            each,
            measures={name: _short(value) for name, value in each.measures.items() if name in names},
            evidence={name: what for name, what in each.evidence.items() if name == NUMBERS},
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


def kept(folder: Path) -> dict[str, dict[str, Run]]:
    """Return the runs by machine and level, the native level first."""
    runs: dict[str, dict[str, Run]] = {}
    paths = folder.glob("*/*.json.gz")
    for path in sorted(paths, key=lambda path: (path.parent, path.name != f"{NATIVE}.json.gz", path)):
        runs.setdefault(path.parent.name, {})[path.name.removesuffix(".json.gz")] = store.read(path)
    return runs


def whole(runs: Mapping[str, Mapping[str, Run]]) -> Iterator[str]:
    """Yield the table of docs/platforms.md: how many cells agree between a machine's levels, and between machines."""
    rows = []
    for machine, levels in runs.items():
        first = next(iter(levels.values()))
        about = f"{_processor(first)}, torch {first.platform['torch']}, `{str(first.platform['commit'])[:7]}`"
        rows.append((f"`{machine}`", about, str(len(levels)), *_agreement(levels)))
    natives = {machine: levels[NATIVE] for machine, levels in runs.items() if NATIVE in levels}
    for (name, left), (other, right) in itertools.combinations(natives.items(), 2):
        rows.append((f"`{name}` beside `{other}`", "", "", *_agreement({name: left, other: right})))
    heads = ("machine", "is", "levels", "cells that all have", "same bits", "same verdict alone", "disagree")
    yield from table(heads, rows)


def nats(machines: Mapping[str, Mapping[str, Run]]) -> Iterator[str]:
    """Yield the table beside it, what `compare` says of log-probabilities: from the first native level to all."""
    named = [(f"`{machine}/{level}`", run) for machine, levels in machines.items() for level, run in levels.items()]
    labels, runs = zip(*sorted(named, key=lambda each: each[1].platform["level"] != NATIVE), strict=True)
    for part in numbers(compare(runs, labels)):
        if isinstance(part, Grid):
            (_, *kernels), *rows = zip(part.headers, *part.rows, strict=True)
            yield from table(["rms (mean), nats", *(str(name).partition(", ")[0] for name in kernels)], rows)


def _processor(run: Run) -> str:
    """Return a processor's name, and the widest of the instruction sets that matter here."""
    if run.platform.get("emulated"):
        return f"{run.platform['machine']}, *emulated processor*"
    features = run.platform.get("cpu_features", ())
    known = [name for name in ("amx_bf16", "avx512_bf16", "avx512f", "avx2") if name in features]
    return f"{run.platform['cpu']}{f' ({known[0]})' if known else ''}"


def _agreement(runs: Mapping[str, Run]) -> tuple[str, ...]:
    """Return how many cells all runs have, and how many of them agree to the bit, in verdict alone, and not."""
    counts = Counter(row.agreement for row in compare(list(runs.values()), list(runs)).rows)
    agreeing = [counts[kind] for kind in (Agreement.BITS, Agreement.VERDICT, Agreement.DISAGREE)]
    return tuple(map(str, (sum(agreeing), *agreeing)))


TABLES = [
    PageTable("platforms.md", "reports/platforms", lambda: whole(kept(FOLDER))),
    PageTable("platforms.md", "reports/nats", lambda: nats(kept(NATS))),
]

if __name__ == "__main__":
    sys.exit(main())
