"""The search: from known plans, one change after the other, to the plan with most of the kernel's bits."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Accumulator
from tiebreak.matrix.identification.asking import Answer
from tiebreak.matrix.identification.space import (
    SLOW,
    added_up,
    changes,
    forward_alone,
    hidden_by,
    hiding,
    moves,
    ruled,
    scaled,
    without_one,
)

_FEW = 3  # plans that lead on where the best one does not
_LOST = 1e-3  # share of bits, on an input, below which a miss counts as none: fp32's order of summation
# Plans held against one input, after which a search ends: some are found after 10,000.
_MOST = 20_000
# Cost of a bit that lies between a plan's O and the kernel's: where nothing is known there are 1.5 a number, and they
# weigh as much as the share of numbers that differ, which alone does not show that a plan comes nearer.
_OF_A_BIT = math.log1p(1.0 / _LOST) / 1.5
_HIDDEN = 0.5  # share of the largest cost of shares above which a plan shows nothing of the kernel's
_RACE, _AHEAD = 4, 0.98  # inputs after which one of two changes at once must cost so much less than the plan
_ENOUGH = 0.7  # cost at which nothing is left to find: one input is missed by as much as counts as none


@dataclass(frozen=True)
class Search:
    """A search through the space of plans, by a kernel's answers."""

    answers: Sequence[Answer]
    fmt: Format  # of the call
    known: Iterable[Declaration]  # plans to start from
    tell: Callable[[str], None]  # how far it is
    costs: dict[Declaration, float] = field(default_factory=dict)  # of plans that were tried on all answers
    _shown: dict[str, list[float]] = field(default_factory=dict)  # by input: costs of plans there, their number

    def cost(self, declaration: Declaration, least: float = math.inf, than: Declaration | None = None) -> float:
        """How far a plan is from all bits: 0 is none; counted on until it is `least` or more.

        The sum over inputs of the logarithm of what it misses: an input that a plan explains wholly outweighs one that
        it explains better, so that points are found one by one, by the inputs that show them. And of how far it is from
        what it misses: where one point hides another, that one shows nothing but nearness.

        Args:
            declaration: as `forward_alone` gives it.
            least: from which on it does not matter how much more it is.
            than: another, which it must be ahead of after a few inputs; where nothing shows, clearly so.
        """
        if declaration in self.costs:
            return self.costs[declaration]
        cost = level = 0.0
        for number, answer in enumerate(sorted(self.answers, key=self._tells, reverse=True)):
            here = _cost(answer, declaration)
            shown = self._shown.setdefault(answer.name, [0.0, 0.0])
            shown[:] = shown[0] + here, shown[1] + 1.0
            cost += here
            level += 0.0 if than is None or number >= _RACE else _cost(answer, than)
            if cost >= least:
                return math.inf
            if than is not None and number == _RACE - 1 and cost > (_AHEAD if self._hidden(than) else 1.0) * level:
                return math.inf
        self.costs[declaration] = cost
        return cost

    def _hidden(self, declaration: Declaration) -> bool:
        """Whether a plan misses so much that it shows nothing of the kernel's."""
        cost = sum(_share_cost(answer, declaration) for answer in self.answers)
        return cost > _HIDDEN * len(self.answers) * math.log1p(1.0 / _LOST)

    def _tells(self, answer: Answer) -> float:
        """What plans cost there on the average: an input that tells them apart settles most of them by itself."""
        total, number = self._shown.get(answer.name, (math.inf, 1.0))
        return total / number

    @property
    def tried(self) -> int:
        """How many plans were held against an input, counted once for each."""
        return sum(answer.tried for answer in self.answers)

    @property
    def stopped(self) -> bool:
        """Whether it ended at its bound, and not where no change led on."""
        return self.tried >= _MOST and self._best()[1] >= _ENOUGH

    def nearest(self) -> Declaration:
        """The plan with the least cost that one change after the other leads to: of the best, then of the best few."""
        starts = [forward_alone(known, self.fmt) for known in self.known]
        self._try(starts, _FEW)
        self._cast_o(starts)
        if self._hidden(self._best()[0]):
            self._try(hiding(self.fmt), _FEW)
            self._climb(1)
            self._uncover(starts)
        for patience in (1, _FEW):
            self._climb(patience)
            self._add_up()
            # A point that was taken for another stands in the way of the one that it is.
            while self._best()[1] >= _ENOUGH and not self.stopped and self._replace_one():
                self._climb(1)
                self._add_up()
        return self._best()[0]

    def _uncover(self, starts: Sequence[Declaration]) -> None:
        """Try more that may hide the rest, until something shows."""
        plan, before = self._best()
        for group in hidden_by(plan, self.fmt, starts):
            if not self._hidden(self._best()[0]) or self.stopped:
                break
            self._try(group, 1, plan)
            if self._best()[1] < before:
                self._climb(1)

    def _cast_o(self, starts: Sequence[Declaration]) -> None:
        """Try how O is cast, and then all with that cast: it hides from every input what else a plan has right."""
        plan, cost = self._best()
        if cost >= _ENOUGH:
            self._try((other for change, other in changes(plan, self.fmt) if change.key == "o"), _FEW)
            cast = self._best()[0].plan.o
            if cast != plan.plan.o:
                self._try((replace(start, plan=replace(start.plan, o=cast)) for start in starts), _FEW)

    def _climb(self, patience: int) -> None:
        """From change to change, as long as one of the best few plans leads on."""
        expanded: set[Declaration] = set()
        while (plan := self._next(expanded)) is not None:
            self.tell(f"{len(expanded)} changes, {len(self.costs)} plans tried on all inputs")
            expanded.add(plan)
            others = chain(changes(plan, self.fmt), moves(plan, self.fmt))
            than = plan if self._hidden(plan) else None  # where nothing shows, a small gain is chance
            self._try((other for change, other in others if change.key != SLOW), patience, than)

    def _add_up(self) -> None:
        """Try how devices add up."""
        plan, cost = self._best()
        if cost >= _ENOUGH:
            self._try((other for change, other in changes(plan, self.fmt) if change.key == SLOW), 1)

    def _replace_one(self) -> bool:
        """Whether two changes at once, or more that only show together, make the best plan better.

        Of two the first takes a point off it, changes nothing, or gives it another shift rule or algorithm.
        """
        plan, (_, before) = self._fast()[0], self._best()
        cost = self.costs[plan]
        level = (
            other for _, other in moves(plan, self.fmt) if self.cost(other, math.nextafter(cost, math.inf)) <= cost
        )
        rules = (other for _, other in ruled(plan, self.fmt))
        firsts = chain(without_one(plan, self.fmt), level, rules)
        for group in chain([added_up(plan, self.fmt), scaled(plan, self.fmt)], map(self._with_changes, firsts)):
            self._try(group, 1, plan)
            if self._best()[1] < before:
                return True
            if self.stopped:
                break
        return False

    def _with_changes(self, plan: Declaration) -> Iterator[Declaration]:
        yield plan
        yield from (other for change, other in changes(plan, self.fmt) if change.key != SLOW)

    def _best(self) -> tuple[Declaration, float]:
        return min(self.costs.items(), key=lambda tried: tried[1])

    def _next(self, expanded: set[Declaration]) -> Declaration | None:
        """The best plan whose changes have not been tried, unless all bits are there, or the best few led nowhere.

        Not one with a device's sums: its points are those of a plan without them, which takes a tenth of the time.
        """
        if self._best()[1] < _ENOUGH or self.stopped:
            return None
        return next((declaration for declaration in self._fast()[:_FEW] if declaration not in expanded), None)

    def _fast(self) -> list[Declaration]:
        """Plans without a device's sums, the best first."""
        fast = (plan for plan in self.costs if plan.plan.accumulator is Accumulator.EXACT)
        return sorted(fast, key=self.costs.__getitem__)

    def _try(self, declarations: Iterable[Declaration], patience: int, than: Declaration | None = None) -> None:
        """Try plans, each until it is worse than the best, or the best few."""
        for declaration in declarations:
            order = sorted(self.costs.values())
            self.cost(declaration, order[patience - 1] if len(order) >= patience else math.inf, than)


def _share_cost(answer: Answer, declaration: Declaration) -> float:
    return math.log1p(answer.missed(declaration) / _LOST)


def _cost(answer: Answer, declaration: Declaration) -> float:
    return _share_cost(answer, declaration) + _OF_A_BIT * answer.apart(declaration)
