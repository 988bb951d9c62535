"""Questions: a kernel called in several ways, on ever more heads until it is known whether the answers agree."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tiebreak.backends.backend import Backend
from tiebreak.cases.verdicts import LOOKS
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import split_words
from tiebreak.kernels.formats import Formats
from tiebreak.kernels.kernel import CannotRunError
from tiebreak.matrix.experiment import Cell, Experiment, Kind, Pair, SelectionContext
from tiebreak.matrix.questions import comparison, invariance, usage
from tiebreak.matrix.questions.comparison import WithinError, WithoutBias
from tiebreak.matrix.questions.session import Question, Session
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records


@dataclass(frozen=True)
class _Table:
    kind: str
    group: str  # in words
    comparing: Callable[[Session], WithinError | WithoutBias]  # what compares the answers
    calls: float  # what its calls cost, as a share of those of a call's cell
    of_users: bool  # whether they are of users' kernels, in statements too, and a device's own only where it is named


@dataclass(frozen=True)
class Asked(Experiment):
    table: _Table
    question: Question

    @property
    def kind(self) -> str:  # type: ignore[override]
        return self.table.kind

    @property
    def name(self) -> str:
        return self.question.name

    @property
    def version(self) -> int:
        return self.question.version

    @property
    def tags(self) -> frozenset[str]:
        return frozenset({self.kind}) if self.table.of_users else frozenset()

    def described(self) -> records.CaseRecord:
        return records.CaseRecord(self.question.about, self.question.source, group=self.table.group)

    def pairs(self, asked: SelectionContext) -> Sequence[Pair]:
        """All kernels but those for other formats, or users' alone.

        A device's own are not asked how they are used in a default run of the suite: they take copies of their
        arguments, and keep no state.
        """
        formats, of_users = Formats.of(asked.fmt), self.table.of_users
        return [
            (backend, kernel)
            for backend, kernel in asked.pairs
            if (of_users and isinstance(kernel, UserKernel))
            or (kernel.unsuited(formats) is None and not (of_users and (kernel.composed or not asked.cases_named)))
        ]

    def cost(self, backend: Backend) -> float:
        return self.table.calls * backend.call_steps

    def run(self, cell: Cell, bench: Workbench) -> Result:
        session = Session(cell, bench.settings.seed, bench.settings.heads)
        found = self.table.comparing(session)
        for look in range(LOOKS):
            for session.index in range(2**look // 2, 2**look):
                self.question.ask(session, found)
            if found.nothing:
                raise CannotRunError("; ".join(session.refused))
            if found.settled:
                break
        return found.result


def _without_bias(session: Session) -> WithoutBias:
    """What compares the answers of a kernel that perhaps declares that this change alters no bit."""
    names = {f"{comparison.INVARIANCE}[{word}]" for word in split_words(session.options.invariant)}
    return WithoutBias(declared=session.cell.experiment.name in names)


_USAGE = _Table(comparison.USAGE, usage.GROUP, lambda session: WithinError(session.cell.fmt), 0.25, of_users=True)
_INVARIANCE = _Table(comparison.INVARIANCE, invariance.GROUP, _without_bias, 2.0, of_users=False)
USAGE = Kind(
    _USAGE.kind,
    records.ExperimentRecord(
        "a user's kernel called in other ways, on the same numbers",
        "share of elements with other bits in the other call; as good are others of equal accuracy;\n"
        "of the log-sum-exp its largest error in fp32 ulps, and its base;"
        " of hidden NaN the share of O or a gradient lost.",
    ),
    experiments=tuple(Asked(_USAGE, question) for question in usage.QUESTIONS),
    measured=comparison.WITHIN_ERROR,
    advice=f"{usage.QUESTIONS[0].name} and its like are asked of users' kernels, which --kernel names, and of a"
    " device's own where --cases names the question",
)
INVARIANCE = Kind(
    _INVARIANCE.kind,
    records.ExperimentRecord(
        "a call compared with itself under one change",
        "0: the same bits; else the signed mean of the difference in ulps, + away from zero, farthest from 0 of all"
        " changes.\nB: with a bias (99.9 % beyond 0.05 ulp), ?: not known yet, neither: without one.",
    ),
    on_request=True,
    experiments=tuple(Asked(_INVARIANCE, question) for question in invariance.QUESTIONS),
    measured=comparison.WITHOUT_BIAS,
)
