"""Experiments, and cells: backend x kernel x experiment x format."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

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
    """The command line's choice of kernels and formats."""

    pairs: Sequence[Pair]  # backends with the kernels that are named, or their default ones, for any kind of experiment
    backends: Sequence[Backend]  # chosen, and able to run
    fmt: Format  # of q, k, v and O
    kernels_named: bool = False  # whether --kernels or --kernel was given
    cases_named: bool = False  # whether --cases was given
    emulated_backward: bool = False  # whether users' kernels train with the suite's own backward pass


def time_limit(cell: "Cell", given: float | None) -> float | None:
    """Return the seconds that a cell may take, given --cell-timeout; None: the suite's own kernels are known to end."""
    if given is not None or not cell.kernel.external:
        return given
    return cell.experiment.time_limit * cell.backend.slower


class Experiment(ABC):
    """One way of running a kernel, to measures and answers; a case of calls, a training run, a question."""

    kind: ClassVar[str]  # name of its kind
    case: Any  # what it runs on, with a name and a version: a case, a snippet, a question
    options: tuple[str, ...] = ()  # of the command line, that bring it in
    time_limit: ClassVar[float] = 60.0  # seconds that a cell of a user's kernel may take

    @property
    def name(self) -> str:
        """The name in tables and for --cases."""
        return str(self.case.name)

    @property
    def version(self) -> int:
        """The version: records of other versions are not comparable."""
        return int(self.case.version)

    @property
    def tags(self) -> frozenset[str]:
        """The words by which profiles of statements choose it; without any it is in none."""
        return frozenset()

    @abstractmethod
    def described(self) -> CaseRecord:
        """Return the description for the file of records."""

    def told(self) -> Sequence[tuple[str, str]]:
        """Return what `tiebreak list cases NAME` adds to `described`: rows of a word and a text."""
        return ()

    def pairs(self, context: SelectionContext) -> Sequence[Pair]:
        """Return the requested backends and kernels that it is for; none in a format that it does not have."""
        formats = self.formats()
        comes = formats is None or context.fmt in formats
        return [pair for pair in context.pairs if comes and self.is_for(pair[1], context)]

    def is_for(self, kernel: Kernel, context: SelectionContext) -> bool:
        """Return whether it is for a kernel."""
        return kernel.unsuited(Formats.of(context.fmt)) is None

    def refusal(self, cell: "Cell", bench: Workbench) -> str | None:
        """Return None, or why a cell can't run, in one line; by default only running it shows."""
        return None

    def refused(self, cell: "Cell") -> bool:
        """Return whether it is known before any call that the kernel takes no such input."""
        del cell
        return False

    @abstractmethod
    def run(self, cell: "Cell", bench: Workbench) -> Result:
        """Run one cell; an error of the kernel is raised."""

    def on_another(self, change: Callable[[Case], Case]) -> "Experiment | None":
        """Return the same on a changed case; None where it has none."""
        return None

    def formats(self) -> Sequence[Format] | None:
        """Return the formats that it has; None: any."""
        return None

    def input_kind(self, fmt: Format) -> str | None:
        """Return the kind of input, in words, that profiles ask of a user's kernel; None: no profile asks for it."""
        return None

    def check(self, fmt: Format) -> None:
        """Raise a `UsageError`, before any work, if its data can't be read."""
        del fmt

    def group(self, fmt: Format) -> str | None:
        """Return a key shared by cells that are best run on one worker, one after the other; None: none."""
        return None


@dataclass(frozen=True)
class Cell:
    """One test: an experiment with a kernel on a backend in a format."""

    backend: Backend
    kernel: Kernel
    experiment: Experiment
    fmt: Format

    @property
    def id(self) -> str:
        """The cell's name in pytest and in records."""
        return record_id(self.backend.name, self.kernel.name, self.experiment.name, self.fmt.name)


class Offer(ABC):
    """A source of experiments for a run, of kinds that are there or of a new one."""

    @abstractmethod
    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        """Return the experiments of a run, perhaps with a folder of captured tensors."""

    def featured(self, experiments: Sequence[Experiment], names: str, kernels: Sequence[Kernel]) -> list[Experiment]:
        """Return experiments with the features that --features names, for kernels one of which takes them."""
        return []


@dataclass(frozen=True)
class Kind(Offer):
    """A kind of experiments: what it offers, and the measures and descriptions of its records."""

    name: str
    described: ExperimentRecord  # what it is, for the file of records
    experiments: Sequence[Experiment] = ()  # that --cases takes by name
    measured: Mapping[str, MeasureRecord] = field(default_factory=dict)  # by its results
    advice: str = ""  # what to know about names where no cell is left
    on_request: bool = False  # whether it runs only where --experiments or --cases names it

    def offered(self, captured: str | None, *, cases_named: bool) -> Sequence[Experiment]:
        """Return the experiments of a run; a usable folder of captured tensors runs alone unless --cases is given."""
        return () if captured is not None and not cases_named else self.experiments

    def kernels(self, backend: Backend) -> Mapping[str, Kernel]:
        """Return kernels by name, other than the backend's own, that --kernels takes."""
        return {}
