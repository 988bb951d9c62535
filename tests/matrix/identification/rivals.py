"""Which plans nothing tells from the one found: every change of it, on inputs made until they part."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from tiebreak.kernels.declarations import values_apart
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Accumulator
from tiebreak.matrix.bits import same_bits
from tiebreak.matrix.identification.asking import Answer, Asked
from tiebreak.matrix.identification.designed import DESIGNED, LONG, OF_SUMS
from tiebreak.matrix.identification.space import ALGORITHM, RULE, SLOW, TILE, Change, changes, moves

_SEEDS = (1, 2)  # of further inputs, where the first of each kind do not part two plans
# A coin gives 12 of 12 once in 4,096 times, and is 4.5 deviations ahead once in 300,000; a plan has a hundred rivals.
_ALL = 12  # rows in which two plans differ that settle which of them a kernel follows, if it has all of them
_DEVIATIONS = 4.5  # by which the one followed must be ahead of a fair coin's share of them, if it has not


@dataclass(frozen=True)
class Rivals:
    """What of the space is told from a plan."""

    asked: Asked
    _predictions: dict[tuple[str, Declaration], Tensor] = field(default_factory=dict)  # by input and plan
    _duels: dict[tuple[Declaration, Declaration], tuple[int, int]] = field(default_factory=dict)  # that were fought

    def better(self, plan: Declaration) -> Declaration | None:
        """A change of the plan that has more of the kernel's bits where the two differ.

        A device's sums have all bits where products are asked for: elsewhere the order of fp32 sums may look like them.
        """
        if plan.plan.accumulator is not Accumulator.EXACT and not self._adds_up(plan):
            return replace(plan, plan=replace(plan.plan, accumulator=Accumulator.EXACT))
        for change, rival in self._changes(plan):
            ours, theirs = self.duel(plan, rival, change)
            if _beats(theirs, ours):
                return rival
        return None

    def _changes(self, plan: Declaration) -> Iterator[tuple[Change, Declaration]]:
        """Those that its answers about sums don't rule out."""
        for change, rival in changes(plan, self.asked.fmt):
            if change.key != SLOW or rival.plan.accumulator is Accumulator.EXACT or self._adds_up(rival):
                yield change, rival

    def _adds_up(self, plan: Declaration) -> bool:
        """Whether a plan has all bits of what was asked of sums."""
        return all(answer.missed(plan) == 0.0 for name, answer in self.asked.answers.items() if name in OF_SUMS)

    def alike(self, plan: Declaration) -> dict[Change, Declaration]:
        """Changes that no input tells from the plan, or of which the kernel's bits do not say which it follows.

        Two at once where they are like the plan together, and not each by itself.
        """
        alike = self._alike(plan, self._changes(plan))
        alone = {(point, value) for rival in alike.values() for point, value in _apart(plan, rival)}
        pairs = ((change, rival) for change, rival in moves(plan, self.asked.fmt) if not _apart(plan, rival) <= alone)
        return alike | self._alike(plan, pairs)

    def _alike(self, plan: Declaration, rivals: Iterable[tuple[Change, Declaration]]) -> dict[Change, Declaration]:
        exact = all(answer.missed(plan) == 0.0 for answer in self._first)
        duels = {change: (rival, *self.duel(plan, rival, change)) for change, rival in rivals}
        # Where the plan has all bits, one that the other lacks tells them apart; elsewhere it may be chance.
        return {
            change: rival
            for change, (rival, ours, theirs) in duels.items()
            if not _beats(ours, theirs) and not (exact and ours and not theirs)
        }

    def duel(self, plan: Declaration, rival: Declaration, change: Change) -> tuple[int, int]:
        """Rows that differ in which the kernel has the one's bits, and the other's, until that is settled."""
        if (plan, rival) not in self._duels:
            ours = theirs = 0
            for answer in self._inputs(change):
                more = self._on(answer, plan, rival)
                ours, theirs = ours + more[0], theirs + more[1]
                if _beats(ours, theirs) or _beats(theirs, ours):
                    break
            self._duels[plan, rival] = ours, theirs
        return self._duels[plan, rival]

    def _on(self, answer: Answer, plan: Declaration, rival: Declaration) -> tuple[int, int]:
        """Of one input, the rows in which they differ where the kernel has more bits of the one, and of the other.

        A row is one event: its elements come of one P and one l, and chance that gives a plan one gives it others.
        """
        if answer.missed(plan) == 0.0:  # it has them all, and the other none of those in which it differs
            return answer.miss(rival).rows, 0
        key = answer.name, plan
        if key not in self._predictions:  # one plan has a hundred rivals
            self._predictions[key] = answer.predicted(plan)
        one, other = self._predictions[key], answer.predicted(rival)
        differ = ~same_bits(one, other)
        ours, theirs = ((differ & same_bits(answer.o, each)).sum(-1) for each in (one, other))
        return int((ours > theirs).sum()), int((theirs > ours).sum())

    def _inputs(self, change: Change) -> Iterator[Answer]:
        """Those that were asked first, then others like them."""
        if change.key == SLOW:
            yield from (answer for name, answer in self.asked.answers.items() if name in OF_SUMS)
        yield from self._first
        further = [(designed, 0) for designed in LONG if change.key in (TILE, RULE, ALGORITHM)]
        if change.key != SLOW:
            further += [(designed, seed) for seed in _SEEDS for designed in DESIGNED if designed.name not in OF_SUMS]
        for designed, seed in further:
            if (answer := self.asked.ask(designed, seed)) is not None:
                yield answer

    @property
    def _first(self) -> list[Answer]:
        """What was asked first, but for sums."""
        names = {designed.name for designed in DESIGNED} - OF_SUMS
        return [answer for name, answer in self.asked.answers.items() if name in names]


def _beats(ours: int, theirs: int) -> bool:
    """Whether that one has so many and the other so few is no chance: where bits are open, each is as likely."""
    ahead = ours - theirs
    return (not theirs and ours >= _ALL) or (ahead > 0 and ahead**2 >= _DEVIATIONS**2 * (ours + theirs))


def _apart(plan: Declaration, rival: Declaration) -> set[tuple[str, str]]:
    return set(values_apart(plan.plan, rival.plan).items())
