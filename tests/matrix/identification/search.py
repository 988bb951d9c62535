"""The search: from known plans, one change after the other, to the plan with most of the kernel's bits."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

from tiebreak.kernels.algorithms import FLASH_ATTENTION
from tiebreak.kernels.declarations import parse_declaration
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Accumulator
from tiebreak.matrix.identification import space
from tiebreak.matrix.identification.asking import DesignedOutput

_FEW = 3  # plans that lead on where the best one does not
_LOST = 1e-3  # share of bits, on an input, below which a miss counts as none: fp32's order of summation
# Comparisons of a plan with one input, after which a search ends: some are found after 10,000.
_MOST = 20_000
# Cost of a bit that lies between a plan's O and the kernel's: where nothing is known there are 1.5 a number, and they
# weigh as much as the share of numbers that differ, which alone does not show that a plan comes nearer.
_OF_A_BIT = math.log1p(1.0 / _LOST) / 1.5
_HIDDEN = 0.5  # share of the largest cost of shares above which a plan shows nothing of the kernel's
_RACE, _AHEAD = 4, 0.98  # inputs after which one of two changes at once must cost so much less than the plan
_RULES = frozenset({space.RULE, space.ALGORITHM})
_STARTS = tuple(f"flash@fused{q}" for q in ("", ",q=input,base=2", ",q=fp16,base=2"))  # where nothing shows
_ENOUGH = 0.7  # cost at which nothing is left to find: one input is missed by as much as counts as none


@dataclass(frozen=True)
class Search:
    """A search for the plan that explains the most bits of a kernel's answers."""

    answers: Sequence[DesignedOutput]
    fmt: Format  # of the call
    starts: Sequence[Declaration]  # known plans, as `forward_alone` gives them
    costs: dict[Declaration, float] = field(default_factory=dict)  # of plans that were tried on all answers
    _shown: dict[str, list[float]] = field(default_factory=dict)  # by input: costs of plans there, their number

    def cost(self, declaration: Declaration, least: float = math.inf, than: Declaration | None = None) -> float:
        """Return how far a plan is from explaining all bits, 0 if it does; stop adding up at `least`.

        The cost is a sum over inputs of the logarithm of the share of missed bits: to explain one input completely
        outweighs explaining several better, so that points are found one by one, by the inputs that show them. The
        distance from the missed bits is added: where one point hides another, only nearness shows the other.

        The sum stops at `least`, beyond which it does not matter. After a few inputs the plan must be ahead of the plan
        `than`, clearly so where nothing shows.
        """
        if declaration in self.costs:
            return self.costs[declaration]
        cost = level = 0.0
        for number, answer in enumerate(sorted(self.answers, key=self._mean_cost, reverse=True)):
            here = _cost(answer, declaration)
            shown = self._shown.setdefault(answer.name, [0.0, 0.0])
            shown[:] = shown[0] + here, shown[1] + 1.0
            cost += here
            level += 0.0 if than is None or number >= _RACE else _cost(answer, than)
            if cost >= least:
                return math.inf
            if than is not None and number == _RACE - 1 and cost > (_AHEAD if self._is_hidden(than) else 1.0) * level:
                return math.inf
        self.costs[declaration] = cost
        return cost

    def _is_hidden(self, declaration: Declaration) -> bool:
        """Return whether a plan explains so little that its cost shows nothing about single points."""
        cost = sum(math.log1p(answer.missed(declaration) / _LOST) for answer in self.answers)
        return cost > _HIDDEN * len(self.answers) * math.log1p(1.0 / _LOST)

    def _mean_cost(self, answer: DesignedOutput) -> float:
        """Return the average cost of plans on one input: one that tells them apart settles most of them by itself."""
        total, number = self._shown.get(answer.name, (math.inf, 1.0))
        return total / number

    @property
    def tried(self) -> int:
        """How many plans were compared with an input, counted once for each."""
        return sum(len(answer.misses) for answer in self.answers)

    @property
    def stopped(self) -> bool:
        """True if the search ended at its bound, and not because no change was better."""
        return self.tried >= _MOST and self._cost_of_best >= _ENOUGH

    @property
    def _ended(self) -> bool:
        return self._cost_of_best < _ENOUGH or self.stopped

    def nearest_known(self) -> Declaration:
        """Return the known plan with the least cost, the first of equals."""
        self._try(self.starts, _FEW)
        return self._best

    def nearest(self, tell: Callable[[str], None]) -> Declaration:
        """Return the plan with the least cost: start from the best known one, go on while changes of a group help."""
        plan = self.nearest_known()
        if all(answer.missed(plan) <= _LOST for answer in self.answers):  # a known plan that misses none of them
            return plan
        if self._cost_of_best >= _ENOUGH:  # the cast of O hides from every input what else a plan has right
            self._try((other for _, other in space.changes(plan, self.fmt, {"o"})), _FEW)
            cast = self._best.plan.o
            if cast != plan.plan.o:
                self._try((replace(start, plan=replace(start.plan, o=cast)) for start in self.starts), _FEW)
        if self._is_hidden(self._best):
            self._try(space.combined(map(parse_declaration, _STARTS), self.fmt, _RULES, {"s"}, usual=True), _FEW)
        while not self._ended and self._improves():
            tell(f"{len(self.costs)} plans tried on all inputs")
        return self._best

    def _improves(self) -> bool:
        """Look for a better plan near the best one, or near the next best; return whether a group of changes had one.

        The groups, in order: one change; how devices add up; changes that show only together, if nothing shows; two
        changes at once, of which the first removes a point, changes nothing, or sets another shift rule or algorithm.

        Without a device's sums the points of a plan are the same, and take a tenth of the time.
        """
        if self._expands(1):
            return True
        fmt, plan = self.fmt, self._quick[0]
        sums = (other for _, other in space.changes(plan, fmt, {space.SLOW}))
        flash = replace(plan, algorithm=FLASH_ATTENTION)  # which alone has every shift rule
        hidden = [
            space.combined([plan], fmt, {"q"}, {"s"}, usual=True),
            space.combined([flash], fmt, _RULES, {"s"}, {"shifted"}, usual=True),
            space.combined(self.starts, fmt, _RULES),
        ]
        together = [
            space.combined(
                [space.without(plan, fmt, "pv", "o_bar")], fmt, {space.ALGORITHM}, {space.TILE}, {"pv", "o_bar"}
            ),
            space.combined([plan], fmt, {"divisor"}, {"scale"}, {"q", "s"}),
            space.combined([plan], fmt, {space.SPLITS}, {space.ORDER}),
        ]
        firsts = chain(space.without_one(plan, fmt), self._level(plan), space.combined([plan], fmt, _RULES))
        pairs = (space.combined([first], fmt, space.QUICK) for first in firsts)
        groups = chain(hidden if self._is_hidden(plan) else (), together, pairs)
        return self._leads_on(sums, 1) or any(self._leads_on(group, 1, plan) for group in groups) or self._expands(_FEW)

    def _expands(self, patience: int) -> bool:
        """Return whether one change of the best few plans is better."""
        done: set[Declaration] = set()
        while left := [plan for plan in self._quick if plan not in done]:
            plan = left[0]
            done.add(plan)
            near = chain(space.changes(plan, self.fmt, space.QUICK), space.moves(plan, self.fmt))
            # Where nothing shows, a small gain is chance.
            if self._leads_on((other for _, other in near), patience, plan if self._is_hidden(plan) else None):
                return True
        return False

    def _leads_on(self, group: Iterable[Declaration], patience: int, than: Declaration | None = None) -> bool:
        """Return whether a plan of a group is better than all before it."""
        if self._ended:
            return False
        before = self._cost_of_best
        self._try(group, patience, than)
        return self._cost_of_best < before

    def _level(self, plan: Declaration) -> Iterator[Declaration]:
        """Yield the moves that cost nothing."""
        cost = self.costs[plan]
        for _, other in space.moves(plan, self.fmt):
            if self.cost(other, math.nextafter(cost, math.inf)) <= cost:
                yield other

    @property
    def _best(self) -> Declaration:
        return min(self.costs, key=self.costs.__getitem__)

    @property
    def _cost_of_best(self) -> float:
        return min(self.costs.values())

    @property
    def _quick(self) -> list[Declaration]:
        quick = (plan for plan in self.costs if plan.plan.accumulator is Accumulator.EXACT)
        return sorted(quick, key=self.costs.__getitem__)[:_FEW]

    def _try(self, plans: Iterable[Declaration], patience: int, than: Declaration | None = None) -> None:
        """Compute the cost of plans, each until it is worse than the best, or the best few."""
        for plan in plans:
            order = sorted(self.costs.values())
            self.cost(plan, order[patience - 1] if len(order) >= patience else math.inf, than)


def _cost(answer: DesignedOutput, declaration: Declaration) -> float:
    miss = answer.miss(declaration)
    return math.log1p(miss.share / _LOST) + _OF_A_BIT * miss.bits_between
