"""Put Triton attention of packages through the matrix on a CPU: the command behind examples/public-kernels/."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tiebreak.backends.provenance import CHECKOUT
from tiebreak.programs.processes import finished
from tiebreak.reports.records.record import SKIPPED, UNEXPLAINED, Record, Run
from tiebreak.reports.records.store import read
from tiebreak.reports.tables.texts import percent, plain_text
from tiebreak.reports.verdict import Verdict, verdicts
from tiebreak.studies.pages import table
from tiebreak.studies.study import Study

SHOWN = ("tied_maxima[k=2]", "sink_tie", "no_tail", "single_maximum", "repeated_zero", "repeated_large[r=105]")
_COLUMNS = ("kernel", "version", *(f"`{case}`" for case in SHOWN), "biased", "follows", "bits", "gradients")
_COHERENT = ("kernel", "version", "case", "bias", "row coherence", "of independent errors")


@dataclass(frozen=True)
class Task:
    """One kernel."""

    target: str  # as --kernel takes it
    version: str  # of its package
    heads: int  # that a cell draws at first
    cases: str | None  # None: all
    dtype: str  # of q, k, v and O
    card: str | None  # the GPU to round as; None: exact sums


@dataclass(frozen=True)
class Rows:
    """What its records say, without the columns of its name and version."""

    verdicts: list[list[str]]  # a row each
    coherence: list[list[str]]  # a row each case


def run(task: Task) -> Rows:
    """Run the matrix of one kernel; a cell that fails is in the row."""
    with TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "pytest", "-q", "-n", "0", str(CHECKOUT / "tests" / "matrix" / "test_cells.py")),
            *("--backend", "interpreter", "--kernel", task.target, "--experiments", "call", "--dtype", task.dtype),
            *("--heads", str(task.heads), "--out", folder, "--save", "run"),
            *(("--cases", task.cases) if task.cases else ()),
            *(("--as", task.card) if task.card else ()),
        ]
        done = finished(command, folder=CHECKOUT)
        records = Path(folder, "run.json")
        if not records.exists():
            return Rows([[f"left no records: {(done.stdout + done.stderr).strip().splitlines()[-1]}"]], [])
        kept = read(records)
    return Rows([verdict_row(kept, verdict) for verdict in verdicts(kept)], list(coherence_rows(kept)))


STUDY = Study("public_kernels", run, seconds=600.0, gib=4.0)


def verdict_row(run: Run, verdict: Verdict) -> list[str]:
    """Return the bias in the cases that are shown, how many others are biased, the plan and its bits, the gradients."""
    records = [record for record in run.records if record.kernel == verdict.kernel]
    shown = {record.case: plain_text(record) for record in records if record.outcome != SKIPPED}
    failing = verdict.biased + verdict.nonfinite
    biased = f"{failing} of {verdict.inputs}" if failing else verdict.headline.partition(": ")[2]
    return [*(shown.get(case, "") for case in SHOWN), biased, *_plan(verdict), _gradients(records)]


def _plan(verdict: Verdict) -> tuple[str, str]:
    if verdict.plan is None:
        return "", ""
    plans = " or ".join(f"`{plan}`" for plan in verdict.plan.plans)
    return f"none, nearest {plans}" if verdict.plan.state == UNEXPLAINED else plans, percent(verdict.plan.share)


def _gradients(records: Sequence[Record]) -> str:
    """Return in how many cells they are within their bounds, of those that have some."""
    answers = [record.answers["gradients"] for record in records if "gradients" in record.answers]
    return f"{sum(answer.passed is True for answer in answers)} of {len(answers)}" if answers else ""


def coherence_rows(run: Run) -> Iterator[list[str]]:
    """Yield how far the errors of a row go together, which is what contraction does: over heads it averages out."""
    for record in run.records:
        coherence, independent = map(record.number, ("row_coherence", "row_coherence_independent"))
        if coherence is not None and independent is not None:
            yield [f"`{record.case}`", plain_text(record), f"{coherence:.3f}", f"{independent:.3f}"]


def main(file: str, folder: str, versions: Mapping[str, Callable[[], str]], arguments: Sequence[str]) -> int:
    """Run what has no result yet, and print the table of all that are named; return 0, 2, 130 as every study.

    Args:
        file: with the kernels.
        folder: environment variable of unpacked packages and checkouts.
        versions: of each kernel's package, by its function in the file.
        arguments: of the command line.
    """
    parser = STUDY.parser(__doc__)
    parser.add_argument("--sources", type=Path, help="folder of unpacked packages and checkouts, beside installed ones")
    parser.add_argument("--only", default=",".join(versions), help="kernels, such as vllm_unified,fla")
    parser.add_argument("--heads", type=int, default=64, help="heads that a cell draws at first")
    parser.add_argument("--cases", help="cases to run (default: all that are one call)")
    parser.add_argument("--dtype", default="bf16", help="format of q, k, v and O")
    parser.add_argument("--as", dest="card", help="the GPU to round as, such as sm_90 (default: exact sums)")
    options = parser.parse_args(arguments)
    if options.sources is not None:
        os.environ[folder] = str(options.sources.resolve())
    if unknown := [name for name in options.only.split(",") if name not in versions]:
        parser.error(f"--only: unknown kernel {unknown[0]!r}: known are {', '.join(versions)}")
    asked = (options.heads, options.cases, options.dtype, options.card)
    tasks = {name: Task(f"{Path(file).resolve()}:{name}", versions[name](), *asked) for name in options.only.split(",")}
    results = STUDY.results(tasks.values(), options)
    head = _COHERENT if options.card else _COLUMNS
    rows = (
        [f"`{name}`", task.version, *row]
        for name, task in tasks.items()
        for row in (results[task].coherence if options.card else results[task].verdicts)
    )
    print(*table(head, rows, right=False), sep="\n")
    return 0
