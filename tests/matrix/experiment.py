"""What an experiment is, and a cell: backend x kernel x experiment x format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from tiebreak.backends.backend import Backend
from tiebreak.cases.case import Case
from tiebreak.kernels.formats import Format, Formats
from tiebreak.kernels.kernel import Kernel
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records.record import CaseRecord, ExperimentRecord, MeasureRecord, record_id

Pair = tuple[Backend, Kernel]


@dataclass(frozen=True)
class SelectionContext:
    """What the command line says of kernels and formats."""

    pairs: Sequence[Pair]  # backends with the kernels that are named, or their default ones, for any kind of experiment
    backends: Sequence[Backend]  # chosen, and able to run
    fmt: Format  # of q, k, v and O
    kernels_named: bool = False  # whether --kernels or --kernel was given
    cases_named: bool = False  # whether --cases was given
    emulated_backward: bool = False  # whether users' kernels train with the suite's own backward pass


def time_limit(cell: "Cell", given: float | None) -> float | None:
    """Seconds that a cell may take, given what --cell-timeout says; None: the suite's own kernels are known to end."""
    if given is not None or not cell.kernel.external:
        return given
    return cell.experiment.time_limit * cell.backend.slower


class Experiment(ABC):
    kind: ClassVar[str]  # name of its kind
    options: tuple[str, ...] = ()  # of the command line, that bring it in
    time_limit: ClassVar[float] = 60.0  # seconds that a cell of a user's kernel may take

    @property
    @abstractmethod
    def name(self) -> str:
        """How tables and --cases call it."""

    @property
    @abstractmethod
    def version(self) -> int:
        """Records of other versions are not comparable."""

    @property
    def tags(self) -> frozenset[str]:
        """By which profiles of statements choose; an experiment without any is in none."""
        return frozenset()

    @abstractmethod
    def described(self) -> CaseRecord:
        """What it is, for the file of records."""

    def told(self) -> Sequence[tuple[str, str]]:
        """What `tiebreak list cases NAME` says of it beside what is `described`: rows of a word and a text."""
        return ()

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        """The backends and kernels that it is for, of those asked for; none in a format that it does not come in."""
        formats = self.formats()
        comes = formats is None or asked.fmt in formats
        return [pair for pair in asked.pairs if comes and self.is_for(pair[1], asked)]

    def is_for(self, kernel: Kernel, asked: SelectionContext) -> bool:
        return kernel.unsuited(Formats.of(asked.fmt)) is None

    def refusal(self, cell: "Cell", bench: Workbench) -> str | None:
        """None, or why a cell can't run, in one line; by default running it tells."""
        return None

    def refused(self, cell: "Cell") -> bool:
        """Tell whether it is known before any call that the kernel takes no such input."""
        del cell
        return False

    @abstractmethod
    def run(self, cell: "Cell", bench: Workbench) -> Result:
        """Run one cell; whatever the kernel raises is raised."""

    def on_another(self, change: Callable[[Case], Case]) -> "Experiment | None":
        """Return the same on a changed case; None where it has none."""
        return None

    def formats(self) -> Sequence[Format] | None:
        """The formats that it comes in; None: any."""
        return None

    def input_kind(self, fmt: Format) -> str | None:
        """What a kernel that is not the suite's must take to be held to it by a profile; None: no profile does."""
        return None

    def check(self, fmt: Format) -> None:
        """Raise a `UsageError`, before any work, if its data can't be read."""
        del fmt

    def group(self, fmt: Format) -> str | None:
        """What cells share that are best run on one worker, one after the other; None: nothing."""
        return None


@dataclass(frozen=True)
class Cell:
    backend: Backend
    kernel: Kernel
    experiment: Experiment
    fmt: Format

    @property
    def id(self) -> str:
        return record_id(self.backend.name, self.kernel.name, self.experiment.name, self.fmt.name)


class Offer(ABC):
    """What brings experiments to a run, of kinds that are there, or of its own."""

    @abstractmethod
    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        """Return the experiments of a run, perhaps with a folder of captured tensors."""

    def featured(self, experiments: Sequence[Experiment], names: str, kernels: Sequence[Kernel]) -> list[Experiment]:
        """Return experiments with the features that --features names, for kernels one of which takes them."""
        return []


@dataclass(frozen=True)
class Kind(Offer):
    name: str
    described: ExperimentRecord  # what it is, for the file of records
    experiments: Sequence[Experiment] = ()  # that --cases takes by name
    measured: Mapping[str, MeasureRecord] = field(default_factory=dict)  # by its results
    advice: str = ""  # what to know about names where no cell is left
    on_request: bool = False  # whether it runs only where --experiments or --cases names it

    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        """The experiments of a run; a usable folder of captured tensors runs alone unless --cases is given."""
        return () if captured is not None and not cases_named else self.experiments

    def kernels(self, backend: Backend) -> Mapping[str, Kernel]:
        """Kernels by name that it has beside the backend's own, and that --kernels takes."""
        return {}
