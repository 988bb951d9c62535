"""Questions: a kernel called in several ways, on ever more heads until it is known whether the answers agree."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from tiebreak.cases.verdicts import LOOKS, batches_of
from tiebreak.kernels.external.kernels import UserKernel
from tiebreak.kernels.external.options import split_words
from tiebreak.kernels.kernel import CannotRunError, Kernel, NotAskedError
from tiebreak.matrix.experiment import Cell, Experiment, Kind, SelectionContext
from tiebreak.matrix.questions import comparison, invariance, shapes, usage
from tiebreak.matrix.questions.comparison import WithinError, WithoutBias
from tiebreak.matrix.questions.session import Question, Session
from tiebreak.matrix.resolver import plan_of
from tiebreak.matrix.result import Result
from tiebreak.matrix.workbench import Workbench
from tiebreak.reports.records import record as records


@dataclass(frozen=True)
class _Asked(Experiment):
    case: Question
    heading: ClassVar[str]  # of their group, in words

    def described(self) -> records.CaseRecord:
        return records.CaseRecord(self.case.about, self.case.source, group=self.heading)

    @abstractmethod
    def comparing(self, session: Session) -> WithinError | WithoutBias:
        """Return the rule that compares the answers."""

    def run(self, cell: Cell, bench: Workbench) -> Result:
        session = Session(cell, bench.settings.seed, bench.settings.heads, partial(plan_of, cell, bench))
        results = self.comparing(session)
        for look in range(LOOKS):
            for session.index in batches_of(look):
                try:
                    self.case.ask(session, results)
                except NotAskedError:
                    if not look:
                        raise
                    return results.result
            if results.is_empty:
                raise CannotRunError("; ".join(session.refused))
            if results.settled:
                break
        return results.result


class _Usage(_Asked):
    kind, heading = comparison.USAGE, usage.GROUP
    tags = frozenset({comparison.USAGE})

    def is_for(self, kernel: Kernel, context: SelectionContext) -> bool:
        """Return whether it is a user's kernel; a device's own, which copies its arguments, runs only where named."""
        is_named = context.cases_named and not kernel.composed and super().is_for(kernel, context)
        return is_named or isinstance(kernel, UserKernel)

    def comparing(self, session: Session) -> WithinError:
        return WithinError(session.cell.fmt)


class _Invariance(_Asked):
    kind, heading = comparison.INVARIANCE, invariance.GROUP

    def comparing(self, session: Session) -> WithoutBias:
        """Return the rule, strict if the kernel declares that this change alters no bit."""
        words = split_words(session.options.invariant)
        return WithoutBias(declared=self.name in {f"{self.kind}[{word}]" for word in words})


USAGE = Kind(
    _Usage.kind,
    records.ExperimentRecord(
        "a user's kernel called in other ways, on the same numbers",
        "share of elements with other bits in the other call; as good are others of equal accuracy;\n"
        "of the log-sum-exp its largest error in fp32 ulps, and its base;"
        " of hidden NaN the share of O or a gradient lost.",
    ),
    experiments=tuple(map(_Usage, (*usage.QUESTIONS, *shapes.QUESTIONS))),
    measured=comparison.WITHIN_ERROR,
    advice=f"{usage.QUESTIONS[0].name} and its like are asked of users' kernels, which --kernel names, and of a"
    " device's own where --cases names the question",
)
INVARIANCE = Kind(
    _Invariance.kind,
    records.ExperimentRecord(
        "a call compared with itself under one change",
        "0: bitwise equal; else the signed mean of the difference in ulps, + away from zero, farthest from 0 of all"
        " changes.\nB: with a bias (99.9 % beyond 0.05 ulp), ?: not known yet, neither: without one.",
    ),
    on_request=True,
    experiments=tuple(map(_Invariance, invariance.QUESTIONS)),
    measured=comparison.WITHOUT_BIAS,
)
