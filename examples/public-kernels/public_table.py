"""The command behind public_kernels.py: runs the matrix of each kernel, and tables what is in the records."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from public_sources import FOLDER, version_of
from tabulate import tabulate

from tiebreak.reports.records.record import SKIPPED, UNEXPLAINED, Record, Run
from tiebreak.reports.records.store import read
from tiebreak.reports.tables.marks import plain_text
from tiebreak.reports.tables.plans import percent
from tiebreak.reports.verdict import Verdict, verdicts

SHOWN = (
    "tied_maxima[k=2]", "sink_tie", "no_tail", "single_maximum", "repeated_zero", "repeated_large[r=105]",
    "repeated_tiny",
)  # fmt: skip
_COLUMNS = ("kernel", "version", *(f"`{case}`" for case in SHOWN), "biased", "follows", "bits", "gradients", "s")
_COHERENT = ("kernel", "case", "bias", "mean of a row's absolute mean error", "if its errors were independent")
_ROOT = Path(__file__).parents[2]


def main(arguments: Sequence[str], file: str, sources: Mapping[str, str]) -> int:
    """Run what has no records yet, and print the table of all that has some.

    Args:
        arguments: of the command line.
        file: with the kernels.
        sources: where each kernel's source is, by its function in the file.
    """
    parser = argparse.ArgumentParser(description="put Triton attention of packages through the matrix, on a CPU")
    parser.add_argument("--sources", type=Path, help="folder of unpacked packages and checkouts, beside installed ones")
    parser.add_argument("--only", default=",".join(sources), help="kernels, such as vllm_unified,fla")
    parser.add_argument("--heads", type=int, default=64, help="heads that a cell draws at first")
    parser.add_argument("--cases", help="cases to run (default: all that are one call)")
    parser.add_argument("--dtype", default="bf16", help="format of q, k, v and O")
    parser.add_argument("--as", dest="card", help="the GPU to round as, such as sm_90 (default: exact sums)")
    parser.add_argument("--out", type=Path, default=Path("out/public"), help="folder of the records")
    options = parser.parse_args(arguments)
    if options.sources is not None:
        os.environ[FOLDER] = str(options.sources.resolve())
    names = options.only.split(",")
    if unknown := set(names) - set(sources):
        parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(sources)}")
    out = options.out.resolve()
    for number, name in enumerate(names, 1):
        if not _records(out, name).exists():
            print(f"{number}/{len(names)} {name}", file=sys.stderr, flush=True)
            _run(f"{Path(file).resolve()}:{name}", name, out, options)
    ran = [name for name in sources if _records(out, name).exists()]
    runs = {name: read(_records(out, name)) for name in ran}
    if options.card:
        table = tabulate(list(_coherent(runs)), _COHERENT, "github", disable_numparse=True)
    else:
        rows = [row for name, run in runs.items() for row in _rows(run, name, sources[name])]
        table = tabulate(rows, _COLUMNS, "github", disable_numparse=True)
    (out / "table.md").write_text(f"{table}\n", encoding="utf-8")
    print(table)
    return 0


def _coherent(runs: Mapping[str, Run]) -> Iterator[list[str]]:
    """How far the errors of a row go together, which is what contraction does: over heads it averages out."""
    for name, run in runs.items():
        for record in run.records:
            coherence, independent = map(record.number, ("row_coherence", "row_coherence_independent"))
            if coherence is not None and independent is not None:
                yield [f"`{name}`", f"`{record.case}`", plain_text(record), f"{coherence:.3f}", f"{independent:.3f}"]


def _records(out: Path, name: str) -> Path:
    return out / f"{name}.json"


def _run(target: str, name: str, out: Path, options: argparse.Namespace) -> None:
    """A cell that falls is in the table; only a run that left no records stops the command."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "-n", "2", str(_ROOT / "tests" / "matrix" / "test_cells.py")),
        *("--backend", "interpreter", "--kernel", target, "--experiments", "call", "--dtype", options.dtype),
        *("--heads", str(options.heads), "--out", str(out), "--save", name),
        *(("--cases", options.cases) if options.cases else ()),
        *(("--as", options.card) if options.card else ()),
    ]
    out.mkdir(parents=True, exist_ok=True)
    log = out / f"{name}.log"
    with log.open("w") as output:
        subprocess.run(command, cwd=_ROOT, stdout=output, stderr=subprocess.STDOUT, check=False)
    if not _records(out, name).exists():
        print(f"{name} left no records: {log}", file=sys.stderr)


def _rows(run: Run, name: str, module: str) -> Iterator[list[object]]:
    for verdict in verdicts(run):
        records = [record for record in run.records if record.kernel == verdict.kernel]
        shown = {record.case: plain_text(record) for record in records if record.outcome != SKIPPED}
        failing = verdict.biased + verdict.nonfinite
        plan, bits = _plan(verdict)
        yield [
            f"`{name}`" if verdict.formats == ("bf16",) else f"`{name}`, {', '.join(verdict.formats)}",
            _version(module),
            *(shown.get(case, "") for case in SHOWN),
            f"{failing} of {verdict.inputs}" if failing else verdict.headline.partition(": ")[2],
            plan,
            bits,
            _gradients(records),
            round(sum(run.seconds.get(record.id, 0.0) for record in records)),
        ]


def _version(module: str) -> str:
    try:
        return version_of(module)
    except NotImplementedError:
        return "not here"


def _plan(verdict: Verdict) -> tuple[str, str]:
    explanation = verdict.plan
    if explanation is None:
        return "", ""
    plans = " or ".join(f"`{plan}`" for plan in explanation.plans)
    return f"none, nearest {plans}" if explanation.state == UNEXPLAINED else plans, percent(explanation.share)


def _gradients(records: Sequence[Record]) -> str:
    """In how many cells they are within their bounds, of those that have some."""
    answers = [record.answers["gradients"] for record in records if "gradients" in record.answers]
    return f"{sum(answer.met is True for answer in answers)} of {len(answers)}" if answers else ""
