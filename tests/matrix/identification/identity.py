"""Identification of a kernel's rounding from its outputs: the plan, what is left open, and how much was checked.

What is left open is every change of the plan that nothing tells from it, on inputs made until the two part.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiebreak.cases.case import Case
from tiebreak.cases.scripted import SCRIPTED
from tiebreak.cases.verdicts import judge
from tiebreak.kernels.declarations import values_apart
from tiebreak.kernels.formats import Format
from tiebreak.kernels.kernel import Declaration
from tiebreak.kernels.plans import Accumulator
from tiebreak.kernels.roster import eight_bit_kernels
from tiebreak.matrix.identification import space
from tiebreak.matrix.identification.asking import DesignedOutput, ProbedKernel, threads
from tiebreak.matrix.identification.candidates import on_device
from tiebreak.matrix.identification.designed import BINDING, DESIGNED, HEAD_DIMENSION, LONG, OF_SUMS, SHAPES
from tiebreak.matrix.identification.search import Search
from tiebreak.matrix.identification.settling import DESIGNED_MISSED, designed_answers, unexplained
from tiebreak.matrix.identification.space import PlanChange, changes, forward_alone, text
from tiebreak.matrix.workbench import CaseBench, Emulated, Settings, same_bits
from tiebreak.reports.records.record import FOLLOWED, FOLLOWS, UNEXPLAINED, Estimate, Explanation
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

_HEADS = 32  # of an input by which no plan was chosen
_BIASED = 96  # of one on which the plan's bias is emulated
_SWAPS = 6  # changes for the better after the search, at most
_ANY_TILE = 4  # tiles that nothing tells from that of the plan, above which none is named
FAILING = ("tied_maxima[k=2]", "sink_tie", "no_tail", "single_maximum_sink", "repeated_zero", "near_tie_outside")
_SCRIPTED = {case.name: case for case in SCRIPTED}
_HELD_OUT: tuple[Case, ...] = (
    *(case for case in SCRIPTED if case.group == "normal numbers"),
    *(_SCRIPTED[name] for name in FAILING),
)
_SEEDS = (1, 2)  # of further inputs, where the first of each kind do not part two plans
# A coin gives 12 of 12 once in 4,096 times, and is 4.5 deviations ahead once in 300,000; a plan has a hundred rivals.
_ALL = 12  # rows in which two plans differ that settle which of them a kernel follows, if it has all of them
_DEVIATIONS = 4.5  # by which the one followed must be ahead of a fair coin's share of them, if it has not


@dataclass(frozen=True)
class Bias:
    """The bias that the plan has on one failure input, by emulation."""

    mean: float | None  # ulps of O, away from zero; None: none of it is finite
    half_width: float | None
    verdict: str  # as of a cell


@dataclass(frozen=True)
class Elsewhere:
    """A shape of calls in which the kernel does not follow its plan."""

    share: float  # of bits that the plan has there
    plan: str | None  # with one change, that it follows there; None: none is known


@dataclass(frozen=True)
class Identity:
    """The plan that a kernel follows, and the evidence for it."""

    kernel: str
    backend: str
    evidence: str  # whose bits it rests on, in words
    format: str  # of q, k and v
    plan: str | None  # as --plan takes it; None: none is known
    nearest: str  # the plan with most bits
    share: float | None  # of bits of inputs by which it was not chosen; None: it ran on none of them
    held_out: Mapping[str, float]  # the same by case
    unexplained: Mapping[str, float]  # designed inputs that it does not explain: the share missed
    alike: Mapping[str, Sequence[str]]  # by point, what else it may be there: nothing told them apart
    bias: Mapping[str, Bias]  # by failure input
    asked: Mapping[str, tuple[str, str]]  # designed inputs by name: what each shows, and whose method it is
    refused: Mapping[str, str]  # inputs that it does not take, and why
    elsewhere: Mapping[str, Elsewhere]  # by heads x queries x keys, or case, where the plan is another
    settled: Mapping[str, bool] = field(default_factory=dict)  # by point of a nearest plan: see `_points_settled`
    tried: int = 0  # plans, held against one input each, up to the nearest
    stopped: bool = False  # whether the search ended at its bound, and not where no change led on

    def lines(self) -> Iterator[str]:
        """Yield the lines that the command prints: first what is known, then the inputs that it rests on."""
        yield self.headline
        if self.plan is None:
            for names, what in ((self.unexplained, "designed inputs miss"), (self._short, "inputs not chosen by have")):
                if names:
                    shares = ", ".join(f"{name} {percent(share)}" for name, share in names.items())
                    yield f"  {what:27}{shares}"
            for what, settled in (("settled, as it has them", True), ("left open", False)):
                yield f"  {what:27}{', '.join(key for key, each in self.settled.items() if each is settled)}"
        for point, values in self.alike.items():
            yield f"  not told apart: {point}={', '.join(values)}"
        for shape, other in self.elsewhere.items():
            name = other.plan or "no plan that is known"
            yield f"  in {shape:24}{name}; the one above has {percent(other.share)} of bits"
        for name, bias in self.bias.items():
            finite = None not in (bias.mean, bias.half_width)
            number = f"{bias.mean:+.3f} +- {bias.half_width:.3f} ulp" if finite else "not finite"
            yield f"  on {name:24}{number}, {bias.verdict}"
        yield "inputs:"
        yield from (f"  {name:20}{shows} [{method}]" for name, (shows, method) in self.asked.items())
        yield from (f"  not asked: {name}: {why}" for name, why in self.refused.items())

    @property
    def headline(self) -> str:
        """The plan, in one line."""
        held_out = counted(len(self.held_out), "input")
        inputs = f"{percent(self.share)} of {self.evidence} on {held_out} that it was not chosen by"
        if self.plan is not None:
            changes = "; its plan changes with the shape of the call" if self.elsewhere else ""
            return f"{self.kernel} follows {self.plan} ({inputs}){changes}"
        bound = f"; the search stopped at its bound, after {self.tried:,} trials of a plan" if self.stopped else ""
        return f"{self.kernel}: none known; nearest is {self.nearest} ({inputs}){bound}"

    @property
    def explanation(self) -> Explanation:
        """How well the plan explains the kernel's bits, in words."""
        if self.plan is not None:
            elsewhere = {shape: other.share for shape, other in self.elsewhere.items()}
            return Explanation(FOLLOWS, (self.plan,), len(self.held_out), self.share, elsewhere)
        worst = dict(sorted({**self._short, **{name: 1 - share for name, share in self.unexplained.items()}}.items()))
        return Explanation(UNEXPLAINED, (self.nearest,), len(self.held_out), self.share, worst)

    @property
    def _short(self) -> dict[str, float]:
        return {name: share for name, share in self.held_out.items() if share < FOLLOWED}


def identify(
    probed: ProbedKernel, seed: int = 1, tell: Callable[[str], None] = lambda line: None, *, beyond_known: bool = True
) -> Identity:
    """Find the plan that a kernel follows, from its outputs alone; it raises what `designed_answers` does.

    Args:
        probed: the kernel, with its answers so far.
        seed: of the inputs that the plan is checked with.
        tell: called with a line of progress.
        beyond_known: whether to look for a nearer plan where a known one explains every designed input.
    """
    with threads(1):
        designed = designed_answers(probed, tell)
        search = _search(probed, designed)
        plan = search.nearest_known()
        if beyond_known or unexplained(designed, plan):
            plan = search.nearest(tell)
        tried, stopped = search.tried, search.stopped
        plan, alike = _against_rivals(probed, designed, plan, tell)
        tell("running inputs that it was not chosen by")
        held_out, elsewhere = _held_out(probed, plan, seed)
        missed = unexplained(designed, plan)
        follows = not missed and bool(held_out) and min(held_out.values()) >= FOLLOWED
        any_tile = len(alike.get(space.TILE, ())) > _ANY_TILE
        declaration = space.named(plan)
        declaration = replace(declaration, tile_named=declaration.algorithm.tiled and not any_tile)
        return Identity(
            kernel=probed.kernel.name,
            backend=probed.backend.name,
            evidence=probed.backend.evidence,
            format=probed.fmt.name,
            plan=declaration.label if follows else None,
            nearest=declaration.label,
            share=sum(held_out.values()) / len(held_out) if held_out else None,
            held_out=held_out,
            unexplained=missed,
            alike=alike,
            bias=_biases(declaration, probed.fmt, seed) if follows else {},
            asked={each.name: (each.shows, each.method) for each in DESIGNED if each.name in probed.answers},
            refused=probed.refused,
            elsewhere=elsewhere | _in_other_shapes(probed, plan, tell) if follows else {},
            settled={} if follows else _points_settled(probed, designed, plan),
            tried=tried,
            stopped=stopped,
        )


def _search(probed: ProbedKernel, designed: Sequence[DesignedOutput]) -> Search:
    """Return a search that starts from the known plans, over all designed inputs except those about sums."""
    eight_bits = [kernel.declaration for kernel in eight_bit_kernels() if kernel.declaration is not None]
    starts = [*on_device(probed.backend).values(), *eight_bits]
    answers = [answer for answer in designed if answer.name not in OF_SUMS]
    return Search(answers, probed.fmt, [forward_alone(start, probed.fmt) for start in starts])


def _against_rivals(
    probed: ProbedKernel, designed: Sequence[DesignedOutput], plan: Declaration, tell: Callable[[str], None]
) -> tuple[Declaration, Mapping[str, Sequence[str]]]:
    """Return the best plan, the plainest of those that nothing tells apart from it, and the others, by point."""
    rivals = Rivals(probed)
    for _ in range(_SWAPS):
        tell(f"holding {text(plan)} against its changes")
        if (better := rivals.better(plan)) is None:
            break
        plan = better
    if unexplained(designed, plan):  # what is like the nearest plan is not the kernel's either
        return plan, {}
    alike = rivals.alike(plan)
    for _ in range(_SWAPS):
        plainest = min([plan, *alike.values()], key=space.plainness)
        if plainest == plan:
            break
        plan, alike = plainest, rivals.alike(plainest)
    points: dict[str, list[str]] = {}
    for change in alike:
        points.setdefault(change.key, []).append(change.value)
    return plan, points


def _points_settled(probed: ProbedKernel, designed: Sequence[DesignedOutput], plan: Declaration) -> dict[str, bool]:
    """Return, by point of a plan, whether every other value explains fewer designed inputs that the plan explains."""
    explained = [each for each in designed if each.name in BINDING and each.missed(plan) <= DESIGNED_MISSED]
    settled: dict[str, bool] = {}
    for change, rival in changes(plan, probed.fmt, space.QUICK):
        fewer = any(each.missed(rival) > DESIGNED_MISSED for each in explained)
        settled[change.key] = settled.get(change.key, True) and fewer
    return settled


def _held_out(probed: ProbedKernel, plan: Declaration, seed: int) -> tuple[dict[str, float], dict[str, Elsewhere]]:
    """Return, by case, the share of bits that the plan predicts; or else the tiles that explain the case.

    Kernels choose their tiles by the head dimension: other tiles at another dimension are the same plan.
    """
    shares, elsewhere = {}, {}
    for case in _HELD_OUT:
        answer = probed.answer(case.name, Emulated(case.make(seed, 0, _HEADS, probed.fmt)))
        if answer is None:
            continue
        usual = answer.inputs.q.shape[-1] == HEAD_DIMENSION
        other = None if usual else _elsewhere(answer, plan, probed.fmt, {space.TILE})
        if other is not None and other.plan is not None:
            elsewhere[case.name] = other
        else:
            shares[case.name] = 1.0 - answer.missed(plan)
    return shares, elsewhere


def _in_other_shapes(probed: ProbedKernel, plan: Declaration, tell: Callable[[str], None]) -> dict[str, Elsewhere]:
    """Return the shapes in which a kernel does not follow its plan, and what it follows there."""
    others = {}
    for designed in SHAPES:
        tell(f"asking {designed.name}")
        if answer := probed.answer(designed.name, Emulated(designed.make(probed.fmt))):
            others[designed.name] = _elsewhere(answer, plan, probed.fmt, space.QUICK)
    return {name: other for name, other in others.items() if other is not None}


def _elsewhere(answer: DesignedOutput, plan: Declaration, fmt: Format, keys: Collection[str]) -> Elsewhere | None:
    """Return one of the plan's changes where a kernel does not follow the plan; None where it does.

    The plan without one of its roundings, if that explains the input, else the nearest change.
    """
    share = 1.0 - answer.missed(plan)
    if share >= FOLLOWED:
        return None
    fewer = space.without_one(plan, fmt) if keys == space.QUICK else ()
    nearest = next((rival for rival in fewer if answer.missed(rival) <= 1.0 - FOLLOWED), None)
    nearest = nearest or min((rival for _, rival in changes(plan, fmt, keys)), key=answer.missed, default=plan)
    return Elsewhere(share, text(nearest) if answer.missed(nearest) <= 1.0 - FOLLOWED else None)


def _biases(plan: Declaration, fmt: Format, seed: int) -> dict[str, Bias]:
    biases = {}
    for name in FAILING:
        _, errors = CaseBench(_SCRIPTED[name], fmt, Settings(seed, _BIASED)).emulated(0, plan)
        estimate = Estimate.of(errors.bias.mean, errors.bias.half_width)
        biases[name] = Bias(estimate.mean, estimate.half_width, judge(errors.bias).value)
    return biases


@dataclass(frozen=True)
class Rivals:
    """Plans near a plan, and whether the kernel's bits tell them apart from it."""

    probed: ProbedKernel
    _duels: dict[tuple[Declaration, Declaration], tuple[int, int]] = field(default_factory=dict)  # that were fought

    def better(self, plan: Declaration) -> Declaration | None:
        """Return a change of the plan that has more of the kernel's bits where the two differ; None if there is none.

        A device's sums must have all bits on inputs about products: elsewhere fp32 sums may look like them.
        """
        if plan.plan.accumulator is not Accumulator.EXACT and not self._explains_sums(plan):
            return replace(plan, plan=replace(plan.plan, accumulator=Accumulator.EXACT))
        for change, rival in self._changes(plan):
            ours, theirs = self.duel(plan, rival, change)
            if _is_more_than_chance(theirs, ours):
                return rival
        return None

    def _changes(self, plan: Declaration) -> Iterator[tuple[PlanChange, Declaration]]:
        """Yield the changes that the answers about sums do not rule out."""
        for change, rival in changes(plan, self.probed.fmt):
            if change.key != space.SLOW or rival.plan.accumulator is Accumulator.EXACT or self._explains_sums(rival):
                yield change, rival

    def _explains_sums(self, plan: Declaration) -> bool:
        """Return whether a plan predicts all bits of the answers about sums."""
        return all(answer.missed(plan) == 0.0 for name, answer in self.probed.answers.items() if name in OF_SUMS)

    def alike(self, plan: Declaration) -> dict[PlanChange, Declaration]:
        """Return the changes that no input tells apart from the plan, and those between which the bits do not decide.

        Two changes at once count if only together they are like the plan.
        """
        alike = self._alike(plan, self._changes(plan))
        alone = {point for rival in alike.values() for point in _differing_points(plan, rival)}
        pairs = (move for move in space.moves(plan, self.probed.fmt) if not _differing_points(plan, move[1]) <= alone)
        return alike | self._alike(plan, pairs)

    def _alike(
        self, plan: Declaration, rivals: Iterable[tuple[PlanChange, Declaration]]
    ) -> dict[PlanChange, Declaration]:
        exact = all(answer.missed(plan) == 0.0 for answer in self._first)
        duels = {change: (rival, *self.duel(plan, rival, change)) for change, rival in rivals}
        # Where the plan has all bits, one that the other lacks tells them apart; elsewhere it may be chance.
        return {
            change: rival
            for change, (rival, ours, theirs) in duels.items()
            if not _is_more_than_chance(ours, theirs) and not (exact and ours and not theirs)
        }

    def duel(self, plan: Declaration, rival: Declaration, change: PlanChange) -> tuple[int, int]:
        """Return how many rows favour the plan, and how many its rival, after as many inputs as settle it."""
        if (plan, rival) not in self._duels:
            ours = theirs = 0
            for answer in self._inputs(change):
                more = self._on(answer, plan, rival)
                ours, theirs = ours + more[0], theirs + more[1]
                if _is_more_than_chance(ours, theirs) or _is_more_than_chance(theirs, ours):
                    break
            self._duels[plan, rival] = ours, theirs
        return self._duels[plan, rival]

    def _on(self, answer: DesignedOutput, plan: Declaration, rival: Declaration) -> tuple[int, int]:
        """Return the rows of one input that favour the plan, and those that favour its rival.

        A row is one event: its elements share one P and one l, so chance that favours a plan in one favours it in all.
        """
        if answer.missed(plan) == 0.0:  # it has them all, and the other none of those in which it differs
            return answer.miss(rival).rows, 0
        one, other = answer.predicted(plan), answer.output(rival).o  # one plan has a hundred rivals
        differ = ~same_bits(one, other)
        ours, theirs = ((differ & same_bits(answer.o, each)).sum(-1) for each in (one, other))
        return int((ours > theirs).sum()), int((theirs > ours).sum())

    def _inputs(self, change: PlanChange) -> Iterator[DesignedOutput]:
        """Yield the inputs that were used first, then others like them."""
        if change.key == space.SLOW:
            yield from (answer for name, answer in self.probed.answers.items() if name in OF_SUMS)
        yield from self._first
        further = [(designed, 0) for designed in LONG if change.key in space.BETWEEN_TILES]
        if change.key != space.SLOW:
            further += [(designed, seed) for seed in _SEEDS for designed in DESIGNED if designed.name not in OF_SUMS]
        for designed, seed in further:
            if (answer := self.probed.ask(designed, seed)) is not None:
                yield answer

    @property
    def _first(self) -> list[DesignedOutput]:
        """The answers to the designed inputs, without those about sums."""
        names = {designed.name for designed in DESIGNED} - OF_SUMS
        return [answer for name, answer in self.probed.answers.items() if name in names]


def _is_more_than_chance(ours: int, theirs: int) -> bool:
    """Return whether `ours` rows against `theirs` is no chance: where bits are open, each side is as likely."""
    ahead = ours - theirs
    return (not theirs and ours >= _ALL) or (ahead > 0 and ahead**2 >= _DEVIATIONS**2 * (ours + theirs))


def _differing_points(plan: Declaration, rival: Declaration) -> set[tuple[str, str]]:
    return set(values_apart(plan.plan, rival.plan).items())
