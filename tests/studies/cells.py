"""One cell alone: a kernel in a case of the suite, or in another experiment, and its record."""

from collections.abc import Mapping

from tiebreak.backends.backend import CPU, Backend
from tiebreak.cases.case import Case
from tiebreak.cases.feature_cases import EVERY
from tiebreak.kernels.formats import BF16, Format
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import Settings, Workbench
from tiebreak.reports.records.record import Record

CASES: Mapping[str, Case] = {case.name: case for case in EVERY}


def judged(
    kernel: Kernel,
    what: str | Case | Experiment,
    heads: int = 16,
    *,
    seed: int = 1,
    fmt: Format = BF16,
    backend: Backend = CPU,
    bench: Workbench | None = None,
) -> Record:
    """Return the record of a kernel in a case, or a named one; `bench` has what cells share, heads and seed too."""
    case = CASES[what] if isinstance(what, str) else what
    experiment = OneCall(case) if isinstance(case, Case) else case
    return run_cell(Cell(backend, kernel, experiment, fmt), bench or Workbench(Settings(seed=seed, heads=heads)))
