"""The verdict on a pair: its calls, what separates its plans, what changes no bits of either, and a model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import structs

from tiebreak.cases.case import Case
from tiebreak.cases.feature_cases import EVERY
from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.formats import Format
from tiebreak.kernels.plans import Accumulator
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments.call import OneCall
from tiebreak.matrix.experiments.questions import INVARIANCE
from tiebreak.matrix.identification.asking import threads
from tiebreak.matrix.identification.identity import FAILING
from tiebreak.matrix.pairs import DECLARED, Side, bits_of
from tiebreak.matrix.pairs.calls import PairedCall
from tiebreak.matrix.pairs.separation import separation
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.workbench import CaseBench, Settings, SharedBatch, Workbench
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs import verdict as verdicts
from tiebreak.reports.pairs.log_probabilities import ModelRecord
from tiebreak.reports.pairs.verdict import CallRecord, PairVerdict, SideRecord
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.record import FAIL, FAILED, FOLLOWED, MEASURED, PASS, PASSED

Tell = Callable[[str], None]
QUESTIONS = {experiment.name: experiment for experiment in INVARIANCE.experiments}
KNOWN: Mapping[str, Experiment] = {case.name: OneCall(case) for case in EVERY} | QUESTIONS
#: Normal numbers, inputs on which rounding is known to fail, what calls ask more, questions of a second or two. Without
#: near ties: whether they come to tie depends on which keys share a tile, and two renderings of a plan differ there.
CASES = (
    *(case.name for case in EVERY if case.group == "normal numbers"),
    *(name for name in (*FAILING, "tied_maxima_positive_v", "equal_keys") if "near_tie" not in name),
    *("padded", "sink_at_maximum", "window_cuts_tie", "served[sink]"),
    *(f"invariance[{name}]" for name in ("batch", "split", "padding", "memory", "decode")),
)
_TOLD = {PASSED: True, MEASURED: False, FAILED: False}  # of a question: whether no bit changed


def judge_pair(
    sides: tuple[Side, Side],
    fmt: Format,
    cases: Sequence[str],
    settings: Settings,
    tell: Tell,
    through: Callable[[Side, Side], ModelRecord] | None,
    own: Mapping[str, tuple[Case, Case]] = {},
) -> PairVerdict:
    """Compare two kernels, perhaps through a model; a `UsageError` where no case can be compared.

    `own` are cases by name, of A and of B, that the suite does not have.
    """
    a, b = (side.plan for side in sides)
    alike = a is not None and b is not None and a.plan.accumulator is b.plan.accumulator  # what both do tells nothing
    light = (summed_exactly(sides[0]), summed_exactly(sides[1])) if alike else sides
    calls, normal, others = list[CallRecord](), list[SharedBatch](), dict[str, SharedBatch]()
    chosen = [OneCall(own[name][0]) if name in own else KNOWN[name] for name in cases]
    with threads(1), own_randomness(settings.seed):
        for call in (each for each in chosen if isinstance(each, OneCall)):
            tell(f"calling both on {call.name}")
            bench = CaseBench(call.case, fmt, settings)
            other = own.get(call.name, (call.case, call.case))[1]
            same = other.version == call.case.version
            calls.append(PairedCall((bench, bench if same else CaseBench(other, fmt, settings)), light).record())
            if calls[-1].bits is not None and call.case.bits_tell:
                batch = bench.batch(0).first_heads
                if call.case.normal:
                    normal.append(batch)
                else:
                    others[call.name] = batch
        if all(call.severity is None for call in calls):
            why = "; ".join(dict.fromkeys(call.why for call in calls)) or "--cases names no call"
            raise UsageError(f"nothing can be compared: {why}")
        tell("looking for what separates their plans")
        a, b = (side.plan for side in light)
        first = verdicts.headlined(calls).case
        inputs = {first: [others[first]]} if first in others else {}
        points = () if a is None or b is None else separation(a, b, fmt, inputs | {verdicts.NORMAL: normal})
    invariant = {each.name: _invariant(sides, each, fmt, settings, tell) for each in chosen if each.name in QUESTIONS}
    model = None if through is None else through(*map(summed_exactly, sides))
    severity, sentence = verdicts.statement(calls, model)
    names = [s.name if sides[0].name != sides[1].name else f"{s.name} on {s.place}" for s in sides]
    return PairVerdict(
        SCHEMA,
        headline=f"{verdicts.RESULTS[severity]}: {' and '.join(names)} [{fmt.name}]: {sentence}",
        severity=severity,
        ok=verdicts.RESULTS[severity] == PASS,
        sides=(_record(sides[0], 0, calls), _record(sides[1], 1, calls)),
        format=fmt.name,
        seed=settings.seed,
        calls=tuple(calls),
        separation=points,
        invariant=invariant,
        model=model,
    )


def summed_exactly(side: Side) -> Side:
    """Return a side whose plan is emulated in a tenth of the time; sums of 8 bits, which lose more, stay."""
    if side.plan is None or side.plan.plan.quantizes:
        return side
    return replace(side, plan=replace(side.plan, plan=replace(side.plan.plan, accumulator=Accumulator.EXACT)))


def apply_limits(verdict: PairVerdict, limits: Mapping[str, float]) -> PairVerdict:
    """Return a verdict that fails where log-probabilities differ by more than allowed, or there are none."""
    numbers = {name: verdict.model.farthest(name) if verdict.model else None for name in limits}
    beyond = [
        f"{name} is {'not known' if number is None else f'{number:.3g}'}, {limits[name]:g} is allowed"
        for name, number in numbers.items()
        if number is None or not abs(number) <= limits[name]
    ]
    if not beyond:
        return verdict
    _, _, said = verdict.headline.partition(": ")
    return structs.replace(verdict, ok=False, headline=f"{FAIL}: {said}; beyond a limit: {'; '.join(beyond)}")


def _invariant(
    sides: tuple[Side, Side], question: Experiment, fmt: Format, settings: Settings, tell: Tell
) -> tuple[bool | None, bool | None]:
    """Return whether a change of a call leaves each side's bits as they are; None: unknown."""
    tell(f"asking both {question.name}")
    cells = (Cell(side.backend, side.kernel, question, fmt) for side in sides)
    a, b = (_TOLD.get(run_cell(cell, Workbench(settings)).outcome) for cell in cells)
    return a, b


def _record(side: Side, at: int, calls: Sequence[CallRecord]) -> SideRecord:
    """Return a side with the evidence for its plan: a declared one is checked by its bits here."""
    sure, rests_on, shares = side.known, side.rests_on, [x for call in calls if (x := call.plan_bits[at]) is not None]
    if rests_on == DECLARED and shares and not side.backend.predicts:
        sure = min(shares) >= FOLLOWED
        bits = bits_of(sum(shares) / len(shares), side.backend.evidence, len(shares))
        rests_on = f"{DECLARED}, {bits}{'' if sure else ', which is not followed'}"
    return SideRecord(side.name, side.place, side.plan.label if side.plan else None, sure, rests_on)
