"""The verdict on a pair: its calls, what separates its plans, and the changes of a call that one alone withstands."""

from collections.abc import Callable, Sequence

from tiebreak.cases.scripted import GROUPS, SCRIPTED
from tiebreak.kernels.external.isolation import own_randomness
from tiebreak.kernels.formats import Format
from tiebreak.matrix.experiment import Cell, Experiment
from tiebreak.matrix.experiments.call import Call
from tiebreak.matrix.experiments.questions import INVARIANCE
from tiebreak.matrix.identification.asking import Asked, threads
from tiebreak.matrix.identification.identity import FAILING
from tiebreak.matrix.pairs.calls import PairedCall, Sided
from tiebreak.matrix.pairs.separation import separation
from tiebreak.matrix.pairs.side import DECLARED, Side
from tiebreak.matrix.run import run_cell
from tiebreak.matrix.settings import Settings
from tiebreak.matrix.workbench import CaseBench, SharedBatch, Workbench
from tiebreak.reports.errors import UsageError
from tiebreak.reports.pairs.verdict import (
    ROUNDINGS,
    SAME,
    A,
    B,
    CallRecord,
    InvarianceRecord,
    PairVerdict,
    SideRecord,
    statement,
)
from tiebreak.reports.records.decode import SCHEMA
from tiebreak.reports.records.record import FELL, FOLLOWED, HELD, MEASURED
from tiebreak.reports.tables.texts import percent

KNOWN: dict[str, Experiment] = {
    **{case.name: Call(case) for case in SCRIPTED},
    **{each.name: each for each in INVARIANCE.experiments},
}
#: Normal numbers; inputs on which rounding is known to fail; what calls ask more; questions of a second or two.
CASES = (
    *(case.name for case in GROUPS["normal numbers"]),
    *FAILING,
    *("tied_maxima_positive_v", "equal_keys", "padded", "sink_at_maximum", "window_cuts_tie", "served[sink]"),
    *(f"invariance[{name}]" for name in ("batch", "split", "padding", "memory", "decode", "chunks")),
)
_TOLD = {HELD: True, MEASURED: False, FELL: False}  # of a question: whether no bit changed


def judged(
    sides: tuple[Side, Side], fmt: Format, cases: Sequence[str], settings: Settings, tell: Callable[[str], None]
) -> PairVerdict:
    """Hold two kernels against each other; a `UsageError` where no case could be compared."""
    asked = [KNOWN[name] for name in cases]
    a, b = (
        Sided(letter, side, Asked(side.backend, side.kernel, fmt)) for letter, side in zip((A, B), sides, strict=True)
    )
    calls, normal, others = list[CallRecord](), list[SharedBatch](), list[SharedBatch]()
    with threads(1), own_randomness(settings.seed):
        for experiment in asked:
            if isinstance(experiment, Call):
                tell(f"calling both on {experiment.name}")
                bench = CaseBench(experiment.case, fmt, settings)
                calls.append(PairedCall(bench, (a, b)).record())
                if calls[-1].bits is not None and experiment.case.bits_tell:
                    (normal if experiment.case.normal else others).append(bench.batch(0).first_heads)
    if all(call.severity is None for call in calls):
        why = "; ".join(dict.fromkeys(call.why for call in calls)) or "--cases names no call"
        raise UsageError(f"nothing can be compared: {why}")
    records = _record(a), _record(b)
    severity, sentence = statement(calls)
    apart = ()
    if sides[0].plan is not None and sides[1].plan is not None and severity != SAME:
        tell("looking for what separates both plans")
        with threads(1):
            apart = separation(sides[0].plan, sides[1].plan, fmt, normal, others)
    asked_both = []
    for experiment in asked:
        if not isinstance(experiment, Call):
            tell(f"asking both {experiment.name}")
            held = [
                _TOLD.get(run_cell(Cell(side.backend, side.kernel, experiment, fmt), Workbench(settings)).outcome)
                for side in sides
            ]
            asked_both.append(InvarianceRecord(experiment.name, *held))
    return PairVerdict(
        SCHEMA,
        headline=f"{' and '.join(_names(sides))} [{fmt.name}]: {sentence}",
        severity=severity,
        ok=severity in (ROUNDINGS, SAME),
        sides=records,
        format=fmt.name,
        seed=settings.seed,
        calls=tuple(calls),
        separation=apart,
        invariances=tuple(asked_both),
    )


def _names(sides: tuple[Side, Side]) -> list[str]:
    """How a headline calls them: where both have one name, by where they run too."""
    one, other = sides
    return [side.name if one.name != other.name else f"{side.name} on {side.backend.name}" for side in sides]


def _record(sided: Sided) -> SideRecord:
    """A side with what its plan rests on: one that is declared is held to its bits here."""
    side, shares = sided.side, sided.shares
    known, rests_on = side.known, side.rests_on
    if rests_on == DECLARED and shares and not side.kernel.composed:
        known = min(shares) >= FOLLOWED
        rests_on = f"{DECLARED}, {percent(sum(shares) / len(shares))} of bits on {len(shares)} inputs"
    return SideRecord(side.name, side.backend.name, side.plan.label if side.plan else None, known, rests_on)
