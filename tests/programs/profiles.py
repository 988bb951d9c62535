"""Profiles of a statement: which cells must be there, derived from cases and kernels without a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import MappingProxyType

from tiebreak.backends.backend import Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.cases.case import Case
from tiebreak.kernels.formats import BF16, Formats
from tiebreak.matrix.experiment import Cell, Experiment, SelectionContext
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.experiments.training import TrainingRun
from tiebreak.matrix.settings import Settings
from tiebreak.reports.statement.folder import Profile

_MAIN = ("standard", "flash@paper", "flash@fused", "stabilized@paper", "dithered@fused", "fair")
_TRAINING = "training runs"


@dataclass(frozen=True)
class _Asks:
    """What a profile asks for."""

    about: str  # one line
    experiment: Callable[[Experiment], bool]  # which of them
    kernels: Sequence[str] | None = None  # of the suite's own; None: all of a default run


def _case(experiment: Experiment) -> Case | None:
    return experiment.case if isinstance(experiment, Call) else None


def _fails(experiment: Experiment) -> bool:
    case = _case(experiment)
    return case is not None and case.failure


def _trains(experiment: Experiment) -> bool:
    case = _case(experiment)
    return case is None or case.gradients


PROFILES: Mapping[str, _Asks] = MappingProxyType(
    {
        "quick": _Asks("the inputs on which rounding is known to fail, the main kernels", _fails, _MAIN),
        "full": _Asks("every cell of a default run", lambda experiment: True),
        "training": _Asks("the short training runs, and calls whose backward pass is measured", _trains),
        "inference": _Asks("every single call", lambda experiment: _case(experiment) is not None),
    }
)


@cache
def profile(name: str) -> Profile:
    """The profile of that name, one of `PROFILES`."""
    asks = PROFILES[name]
    experiments = [
        experiment
        for kind in kinds().values()
        for experiment in kind.offered(None, cases_named=False)
        if asks.experiment(experiment)
    ]
    settings = Settings()
    return Profile(
        name,
        asks.about,
        BF16.name,
        settings.seed,
        settings.heads,
        {experiment.name: experiment.version for experiment in experiments},
        {backend.name: _of_the_suite(backend, experiments, asks.kernels) for backend in BACKENDS.values()},
        _of_other_kernels(experiments),
    )


def _of_the_suite(
    backend: Backend, experiments: Sequence[Experiment], kernels: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """The suite's own kernels of a default run, each with its cases; none where a backend runs its own alone."""
    bare = replace(backend, vendor_kernels=lambda: ())  # which the device alone can list
    pairs = [(bare, kernel) for kernel in bare.kernels()]
    asked = SelectionContext(pairs, [bare], kernels_named=False, cases_named=False, fmt=BF16)
    cells = [Cell(*pair, experiment, BF16) for experiment in experiments for pair in experiment.pairs(asked)]
    found: dict[str, tuple[str, ...]] = {}
    for cell in cells:
        if kernels is None or cell.kernel.name in kernels:
            found[cell.kernel.name] = (*found.get(cell.kernel.name, ()), cell.experiment.name)
    return found


def _of_other_kernels(experiments: Sequence[Experiment]) -> dict[str, tuple[str, ...]]:
    """By kind of input, the cases that a kernel with a backward pass has in a default run."""
    found: dict[str, tuple[str, ...]] = {}
    for experiment in experiments:
        case = _case(experiment)
        if case is not None:
            formats = case.formats(BF16)
            kind = "calls" if formats == Formats.of(BF16) else f"calls with V in {formats.v.name}"
        elif isinstance(experiment, TrainingRun) and not experiment.snippet.amplified:
            kind = _TRAINING
        else:
            continue  # in a format that no device has
        found[kind] = (*found.get(kind, ()), experiment.name)
    return found
