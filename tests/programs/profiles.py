"""Profiles of a statement: which cells must be there, derived from cases and kernels without a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NoReturn

from tiebreak.backends.backend import CPU, Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.experiment import Experiment, SelectionContext
from tiebreak.matrix.experiments import kinds
from tiebreak.matrix.selection import cells_of
from tiebreak.matrix.settings import Settings
from tiebreak.reports.statement import Profile

_MAIN = ("standard", "flash@paper", "flash@fused", "stabilized@paper", "dithered@fused", "fair")


@dataclass(frozen=True)
class Selector:
    """What a profile asks for. An experiment is in it by a tag that both name: a new kind is in none."""

    about: str  # one line
    tags: frozenset[str]  # of the experiments that are in it: one of these is enough
    kernels: Sequence[str] | None = None  # of the suite's own; None: all of a default run
    ran: float = 0.9  # share of the cells that must have run: of a whole matrix on a CPU 99 % do
    recomputed: int = 20  # cells of the suite's kernels that whoever verifies must run again on the emulation


PROFILES: Mapping[str, Selector] = {
    "quick": Selector("the inputs on which rounding is known to fail, the main kernels", frozenset({"failure"}), _MAIN),
    "full": Selector("every cell of a default run", frozenset({"call", "training"})),
    "training": Selector(
        "the short training runs, and calls whose backward pass is measured", frozenset({"training", "backward"})
    ),
    "inference": Selector("every single call", frozenset({"call"})),
}


@cache
def profile(name: str) -> Profile:
    """The profile of that name, one of `PROFILES`."""
    asks = PROFILES[name]
    experiments = [
        experiment
        for kind in kinds().values()
        for experiment in kind.offered(None, cases_named=False)
        if experiment.tags & asks.tags
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
        _of_users(experiments),
        asks.ran,
        asks.recomputed,
    )


def _of_the_suite(
    backend: Backend, experiments: Sequence[Experiment], kernels: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """The suite's own kernels of a default run, each with its cases; none where a backend runs its own alone."""
    bare = replace(backend, vendor_kernels=lambda: ())  # which the device alone can list
    pairs = [(bare, kernel) for kernel in bare.kernels()]
    asked = SelectionContext(pairs, [bare], kernels_named=False, cases_named=False, fmt=BF16)
    cases: dict[str, tuple[str, ...]] = {}
    for cell in cells_of(experiments, asked):
        if kernels is None or cell.kernel.name in kernels:
            cases[cell.kernel.name] = (*cases.get(cell.kernel.name, ()), cell.experiment.name)
    return cases


def _of_other_kernels(experiments: Sequence[Experiment]) -> dict[str, tuple[str, ...]]:
    """By kind of input, the cases that a kernel with a backward pass has in a default run."""
    cases: dict[str, tuple[str, ...]] = {}
    for experiment in experiments:
        kind = experiment.input_kind(BF16)
        if kind is not None:
            cases[kind] = (*cases.get(kind, ()), experiment.name)
    return cases


def _of_users(experiments: Sequence[Experiment]) -> tuple[str, ...]:
    """The cases that a user's kernel with a backward pass has in a default run."""

    def absent(*_: object) -> NoReturn:
        raise NotImplementedError

    pairs = [(CPU, Kernel("a user's", absent, None, external=True))]
    asked = SelectionContext(pairs, [CPU], kernels_named=True, cases_named=False, fmt=BF16)
    return tuple(each.name for each in experiments if each.input_kind(BF16) is not None and each.pairs(asked))
