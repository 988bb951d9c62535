"""Profiles of a statement: which cells must be there, derived from cases and kernels without a device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NoReturn

from tiebreak.backends.backend import CPU, Backend
from tiebreak.backends.registry import BACKENDS
from tiebreak.backends.torch_device import PREFIX, torch_device
from tiebreak.kernels.formats import BF16
from tiebreak.kernels.kernel import Kernel
from tiebreak.laboratory.statement.format import Profile
from tiebreak.matrix.experiment import Experiment, SelectionContext
from tiebreak.matrix.experiments import offered
from tiebreak.matrix.selection import cells_of
from tiebreak.matrix.workbench import Settings
from tiebreak.reports.records.order import grouped

_MAIN = ("standard", "flash@paper", "flash@fused", "stabilized@paper", "dithered@fused", "fair")


def _absent(*_: object) -> NoReturn:
    raise NotImplementedError("a kernel that is not here")


ABSENT = Kernel("", _absent, None)  # replaces a user's, or another machine's


@dataclass(frozen=True)
class Selector:
    """The cells that a profile requires. An experiment is in it by a tag that both name: a new kind is in none."""

    about: str  # one line
    tags: frozenset[str]  # of the experiments that are in it: one of these is enough
    kernels: Sequence[str] | None = None  # of the suite's own; None: all of a default run
    ran: float = 0.9  # share of the cells that must have run: of a whole matrix on a CPU 99 % do
    recomputed: int = 20  # cells that `--verify` must recompute, at least


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
    """Return the profile of that name: for users' kernels, the cases of one with a backward pass."""
    asks, settings = PROFILES[name], Settings()
    experiments = [each for each in offered(cases_named=False) if each.tags & asks.tags]
    inputs = [(kind, each) for each in experiments if (kind := each.input_kind(BF16)) is not None]
    users = SelectionContext([(CPU, replace(ABSENT, external=True))], [CPU], BF16, kernels_named=True)
    cases = (name for name in BACKENDS if BACKENDS.origin(name) == "tiebreak")
    suites = {name: BACKENDS[name] for name in cases}  # the same wherever it is asked for
    suites[PREFIX[:-1]] = torch_device(PREFIX)  # each torch:DEVICE has the same
    return Profile(
        name,
        asks.about,
        BF16.name,
        settings.seed,
        settings.heads,
        {experiment.name: experiment.version for experiment in experiments},
        {name: _suite_cases(backend, experiments, asks.kernels) for name, backend in suites.items()},
        {kind: tuple(each.name for _, each in cases) for kind, cases in grouped(inputs, lambda pair: pair[0]).items()},
        tuple(each.name for _, each in inputs if each.pairs(users)),
        asks.ran,
        asks.recomputed,
    )


def _suite_cases(
    backend: Backend, experiments: Sequence[Experiment], kernels: Sequence[str] | None
) -> dict[str, tuple[str, ...]]:
    """Return the suite's kernels of a default run, each with its cases; none where a backend runs only its own."""
    bare = replace(backend, vendor_kernels=lambda: ())  # which the device alone can list
    context = SelectionContext([(bare, kernel) for kernel in bare.kernels()], [bare], BF16)
    chosen = (cell for cell in cells_of(experiments, context) if kernels is None or cell.kernel.name in kernels)
    cells = grouped(chosen, lambda cell: cell.kernel.name)
    return {kernel: tuple(cell.experiment.name for cell in group) for kernel, group in cells.items()}
