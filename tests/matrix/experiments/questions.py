"""One question: a kernel called in several ways, on ever more heads until it is known whether the answers agree."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

from tiebreak.backends.backend import Backend
from tiebreak.cases.verdicts import LOOKS
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import split_words
from tiebreak.kernels.formats import Formats
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.experiment import Cell, Experiment, Kind, Pair, SelectionContext
from tiebreak.matrix.questions import invariance, usage, within_error, without_bias
from tiebreak.matrix.questions.session import Question, Session
from tiebreak.matrix.questions.within_error import WithinError
from tiebreak.matrix.questions.without_bias import WithoutBias
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records

_Found = TypeVar("_Found", WithinError, WithoutBias)


@dataclass(frozen=True)
class _Asked(Experiment, Generic[_Found]):
    """One question, on ever more heads until it is known whether the answers agree."""

    group_name: ClassVar[str]  # of the table that it is in
    question: Question[_Found]

    @property
    def name(self) -> str:
        """As `Experiment.name`."""
        return self.question.name

    @property
    def version(self) -> int:
        """As `Experiment.version`."""
        return self.question.version

    def described(self) -> records.CaseRecord:
        """As `Experiment.described`."""
        return records.CaseRecord(self.question.about, self.question.source, group=self.group_name)

    @abstractmethod
    def comparing(self, cell: Cell) -> _Found:
        """Return what compares the answers."""

    def run(self, cell: Cell, bench: Workbench) -> Result:
        """As `Experiment.run`."""
        session = Session(cell, bench.settings.seed, bench.settings.heads, self.comparing(cell))
        for look in range(LOOKS):
            for session.index in range(2**look // 2, 2**look):
                self.question.ask(session)
            if session.found.nothing:
                raise CannotRunError("; ".join(session.refused))
            if session.found.settled:
                break
        return session.found.result


@dataclass(frozen=True)
class Usage(_Asked[WithinError]):
    """A question of how a kernel is used: small calls on normal numbers."""

    kind: ClassVar[str] = within_error.KIND
    group_name: ClassVar[str] = usage.GROUP

    @property
    def tags(self) -> frozenset[str]:
        """As `Experiment.tags`."""
        return frozenset({self.kind})

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        """As `Experiment.pairs`: users' kernels; where the question is named, a device's own kernels too.

        In a default run of the suite they are not asked: they take copies of their arguments, and keep no state.
        """
        return [
            (backend, kernel)
            for backend, kernel in asked.pairs
            if isinstance(kernel, UserKernel)
            or (asked.cases_named and not kernel.composed and kernel.unsuited(Formats.of(asked.fmt)) is None)
        ]

    def cost(self, backend: Backend) -> float:
        """As `Experiment.cost`: a dozen calls of a few heads."""
        return backend.call_steps / 4

    def comparing(self, cell: Cell) -> WithinError:
        """As `_Asked.comparing`."""
        return WithinError(cell.fmt)


@dataclass(frozen=True)
class Invariance(_Asked[WithoutBias]):
    """A question of what a change of a call does, on a run's heads."""

    kind: ClassVar[str] = without_bias.KIND
    group_name: ClassVar[str] = invariance.GROUP

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        """As `Experiment.pairs`: all kernels but those for other formats."""
        return [pair for pair in asked.pairs if pair[1].unsuited(Formats.of(asked.fmt)) is None]

    def cost(self, backend: Backend) -> float:
        """As `Experiment.cost`: a hundred calls of a few heads."""
        return 2.0 * backend.call_steps

    def comparing(self, cell: Cell) -> WithoutBias:
        """As `_Asked.comparing`."""
        kernel = cell.kernel
        declared = kernel.caller.convention.options.invariant if isinstance(kernel, UserKernel) else ""
        return WithoutBias(self.name in {f"{self.kind}[{word}]" for word in split_words(declared)})


USAGE = Kind(
    Usage.kind,
    records.ExperimentRecord(
        "a user's kernel called in other ways, on the same numbers",
        "share of elements with other bits in the other call; as good are others of equal accuracy;\n"
        "of the log-sum-exp its largest error in fp32 ulps, and its base;"
        " of hidden NaN the share of O or a gradient lost.",
    ),
    experiments=tuple(map(Usage, usage.QUESTIONS)),
    measured=within_error.MEASURES,
    advice=f"{usage.QUESTIONS[0].name} and its like are asked of users' kernels, which --kernel names, and of a"
    " device's own where --cases names the question",
)
INVARIANCE = Kind(
    Invariance.kind,
    records.ExperimentRecord(
        "a call compared with itself under one change",
        "0: the same bits; else the signed mean of the difference in ulps, + away from zero, farthest from 0 of all"
        " changes.\nB: with a bias (99.9 % beyond 0.05 ulp), ?: not known yet, neither: without one.",
    ),
    on_request=True,
    experiments=tuple(map(Invariance, invariance.QUESTIONS)),
    measured=without_bias.MEASURES,
)
