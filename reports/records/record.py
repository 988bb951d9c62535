"""Records: the measured result of every cell of a run, and the file that keeps them.

A record is a cell's identity, its measures, the answers to the checks that were asked of it, and evidence to look at.
What a measure, a check, a case or a kind of experiment is, the file says itself, once: nothing here knows their names.
Numbers that are NaN or infinite are written as null, which no comparison takes for a pass.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, field, fields
from functools import cache, cached_property
from typing import Annotated, Any

from tiebreak.reports.names import matching
from tiebreak.reports.records.decode import ByName, decoder

SCHEMA = 7  # see tiebreak.reports.records.migrations for what changed

HELD, MEASURED, FELL, INCONCLUSIVE, SKIPPED = "held", "measured", "fell", "inconclusive", "skipped"
NO_TIME = "left out: the budget was spent"  # why a cell was skipped that --budget had no time for
CRASHED, TIMED_OUT = "crashed", "timed_out"
OUTCOMES = (HELD, MEASURED, FELL, INCONCLUSIVE, CRASHED, TIMED_OUT, SKIPPED)
PASSING = frozenset({HELD, MEASURED})

RUNS, IN_TIME = "runs", "in_time"  # the checks of every cell: that the kernel ran to its end, and in its time
CLAIM, PREDICTION = "claim", "prediction"  # the checks about a cell's rounding that files of older schemas have
WHOLE = "outcome"  # what a file of an older schema says of a cell without saying which check it did not meet
IMPLIED = frozenset({RUNS, IN_TIME, WHOLE})  # checks that a cell with a result has met, and is not asked

UNBIASED, UNDECIDED, BIASED, NONFINITE = "unbiased", "inconclusive", "biased", "nonfinite"
VERDICTS = (UNBIASED, UNDECIDED, BIASED, NONFINITE)  # from the best to the worst

# What tables show of a result: the number of the measure that Shown.kind names, or one of these in its place.
SHRUNK, NO_NUMBER = "shrunk", "none"
REPLACED = frozenset({NONFINITE, SHRUNK, NO_NUMBER})
_SPECS = frozenset(f"{sign}.{digits}{style}" for sign in ("", "+") for digits in range(7) for style in "efg")

# Of a kernel that declares no plan: one has its bits; it has random bits of its own and the bias of one; several have
# its bits and can't be told apart; none has.
FOLLOWS, BEHAVES_LIKE, AMBIGUOUS, UNEXPLAINED = "follows", "behaves_like", "ambiguous", "unexplained"
STATES = (FOLLOWS, BEHAVES_LIKE, AMBIGUOUS, UNEXPLAINED)
FOLLOWED = 0.98  # share of equal bits, in every cell, from which on a plan is followed
#: The same of dQ, dK and dV each, of a backward pass. The last bit of a sum turns more of their bits: of sound kernels
#: up to 2 % in bf16 and 10 % in fp16; a cast that is elsewhere turns 23 % and more.
FOLLOWED_BACKWARD = 0.85

MORE, LESS, FARTHER = "more", "less", "farther"  # which way a measure is worse; farther: from 0
WORSE = (MORE, LESS, FARTHER)

OutcomeName = Annotated[str, frozenset(OUTCOMES)]
VerdictName = Annotated[str, frozenset(VERDICTS)]
Count = Annotated[int, 0]


@dataclass(frozen=True)
class Estimate:
    """A mean with the half width of its confidence interval; None where there is no such number."""

    mean: float | None
    half_width: Annotated[float, 0] | None

    @classmethod
    def of(cls, mean: float, half_width: float) -> "Estimate":
        """NaN and Inf become None."""
        return cls(finite(mean), finite(half_width))


@dataclass(frozen=True)
class FitRecord(Estimate):
    """What a known plan has in common with a kernel that declares none: its bias less the plan's, and equal bits."""

    bits: Annotated[float, 0] | None = None  # share of elements of O that agree to the bit; older files don't tell

    @classmethod
    def measured(cls, bits: float, mean: float, half_width: float) -> "FitRecord":
        """NaN and Inf become None."""
        return cls(finite(mean), finite(half_width), finite(bits))


Value = Estimate | float | None  # of a measure


def finite(number: float) -> float | None:
    """The number, or None if it is NaN or infinite."""
    return number if math.isfinite(number) else None


def number_of(value: Value) -> float | None:
    """The number of a value: of an estimate its mean."""
    return value.mean if isinstance(value, Estimate) else value


@dataclass(frozen=True)
class Answer:
    """What a check was told of a cell."""

    met: bool | None  # None: the data do not tell
    asked: str  # what had to hold
    why: str = ""  # what was found instead, in one line; empty where it was met
    source: str | None = None  # who claims it, of a claim


@dataclass(frozen=True)
class Shown:
    """What tables show of a result; `tiebreak.reports.tables.marks` puts it in words."""

    kind: str  # the measure whose number it is, or what there is in its place: one of REPLACED
    number: float | None = None  # of the measure; of what has shrunk the share of its size that is left
    unit: str = ""  # that stands behind it; empty: the table's legend says it
    verdict: VerdictName | None = None  # on a bias
    spec: Annotated[str, _SPECS] = "+.2f"  # how the number is written, as Python's format takes it

    @classmethod
    def of(cls, measure: str, number: float, unit: str = "", verdict: str | None = None, spec: str = "+.2f") -> "Shown":
        """The number of a measure; where it is NaN or infinite, that."""
        return cls(measure, number, unit, verdict, spec) if math.isfinite(number) else cls(NONFINITE)


@dataclass(frozen=True)
class Explanation:
    """Which known plan explains a kernel that declares none; `tiebreak.reports.tables.plans` puts it in words."""

    state: Annotated[str, frozenset(STATES)]
    plans: tuple[str, ...]  # those that can't be told apart, the plainest first; where none explains it the nearest
    cells: Count  # that were compared
    share: Annotated[float, 0] | None = None  # of bits that agree with the first of the plans, mean over the cells
    worst: Mapping[str, float] = field(default_factory=dict)  # cases, or shapes, that it fails, with the share


@dataclass(frozen=True)
class PlanRecord:
    """What a plan is that records and explanations name."""

    rule: str  # by what a row's shift is chosen
    fix: bool = False  # whether that moves the shift away from a maximum that repeats; else it is the row's maximum


@dataclass(frozen=True)
class MeasureRecord:
    """What a measure is, and how the gate holds it."""

    about: str  # one line
    unit: str = ""  # ulp; empty: a plain number
    worse: Annotated[str, frozenset(WORSE)] | None = None  # None: neither way is
    limit: Annotated[float, 0] | None = None  # how much worse it may get; None: the gate looks at its being there alone
    margin: Annotated[float, 0] | None = None  # within this of 0 it is none: the verdict is on it; None: there is none
    share: Annotated[float, 0] = 0.0  # of itself, that it may get worse by; both have to be passed
    per: str | None = None  # the measure that it is a share of
    portable: bool = False  # whether the gate holds it between platforms too
    column: bool = False  # whether the page's table of all cells has a column of it


@dataclass(frozen=True)
class CheckRecord:
    """What a check asks."""

    about: str  # one line
    judges: bool = False  # whether it is about the cell's rounding: what is held has met such a one
    wrong: bool = False  # whether a kernel that does not meet it computes something else than attention, or nothing


@dataclass(frozen=True)
class SeriesFigure:
    """How a page draws one series of the evidence of a case's cells: those whose headline is largest and smallest."""

    series: str  # its name in the evidence
    title: str
    note: str  # what to see in it
    y_label: str
    summed: bool = False  # whether readings are added up from step to step


@dataclass(frozen=True)
class CaseRecord:
    """What a case is."""

    about: str  # one line
    source: str = ""  # where the input or the claims come from
    label: str | None = None  # a letter or two for headings
    headline: str | None = None  # the measure that tables show
    unclaimed: str | None = None  # why nothing is claimed of the kernels that no claim speaks of
    family: str | None = None  # what varies between cases that belong together
    at: float | None = None  # where the case stands in its family
    failure: bool = False  # whether it is an input on which rounding is known to fail
    needed: bool = False  # whether a verdict on a kernel of one's own says little without it
    group: str = ""  # what the cases that stand beside it are about; empty: not told
    backward: bool = False  # whether the backward pass is run and measured too
    figure: SeriesFigure | None = None  # of its readings


@dataclass(frozen=True)
class ExperimentRecord:
    """What a kind of experiment is."""

    about: str  # one line
    legend: str = ""  # what its tables show
    headline: str | None = None  # the measure, in ulps, that heat maps colour
    largest: str | None = None  # the measure that comparisons show beside what tables show: the largest error
    agreement: str | None = None  # the measure that is the share of bits that agree with a prediction
    carried: str | None = None  # the measure that is how much of a bias of O gradients contain, as a share
    pooled: bool = False  # whether tables put all seeds of a kernel in one place, kernels down and cases across


@dataclass(frozen=True)
class TraceRecord:
    """The error of one element of O-bar as its sum over the keys proceeds (paper, equation 5)."""

    error: tuple[float | None, ...]  # after each key
    at_one: tuple[Count, ...]  # keys whose P-bar is exactly 1


@dataclass(frozen=True)
class HistogramRecord:
    """Signed errors of O in ulps, counted in bins of one width."""

    low: float  # lower edge of the first bin
    width: float  # of a bin
    counts: tuple[Count, ...]
    outside: Count  # elements beyond the bins


@dataclass(frozen=True)
class ChangeRecord:
    """A call beside the same one with one thing changed."""

    bits: Annotated[float, 0]  # share of elements of O, or of a gradient, that have other bits
    difference: Estimate  # signed mean of the changed one less the plain one, in ulps
    before: Estimate  # bias of the plain one
    after: Estimate  # bias of the changed one
    verdict: VerdictName | None = None  # on the difference; None: no bit differs
    lost: Count = 0  # elements that are NaN or Inf in one of both alone
    growth: float | None = None  # mean squared error of one over the other's, where rounding does not explain it


@dataclass(frozen=True)
class SeriesRecord:
    """Readings over the steps of a training run."""

    steps: tuple[Count, ...]  # at which monitors were read
    values: Mapping[str, tuple[float | None, ...]]  # by name, one number a reading


@dataclass(frozen=True)
class RuleReading:
    """One number that an acceptance rule looks at."""

    number: float | None  # None: NaN or infinite, which passes no rule
    limit: float | None  # that it may reach


@dataclass(frozen=True)
class RuleAnswer:
    """What an acceptance rule of another project says of a cell."""

    passed: bool | None  # None: it lacks what it needs
    readings: Mapping[str, RuleReading] = field(default_factory=dict)  # by what it reads
    needs: str = ""  # what it lacks


IDENTITY = "identity"  # evidence: what a search for a kernel's plan came to

# Evidence that something here draws or reads; of any other kind a record carries what JSON has.
EVIDENCE = ByName(
    {
        "trace": TraceRecord,
        "histogram": HistogramRecord,
        "series": SeriesRecord,
        "fits": Mapping[str, FitRecord],  # of a kernel that declares nothing, by known plan
        IDENTITY: Explanation,  # of a kernel that declares nothing: what the search for its plan came to
        "changes": Mapping[str, ChangeRecord],  # of a call compared with itself, by what was changed and put in
        "slips": Mapping[str, float],  # of a wrong kernel: mistakes that explain its O, and their share of bits
        "controls": Mapping[str, float],  # what had to change O there, and the share of its elements that it did
        "backward": Mapping[str, Mapping[str, float]],  # of a user's kernel, by backward pass: bits of dq, dk and dv
        "rules": Mapping[str, RuleAnswer],  # acceptance rules in public use, by name, with --rules
        "paper": str,  # what the paper says of training with the kernel: stable, fails
    }
)
DRAWN = frozenset({"trace", "histogram", "series"})  # evidence that is there to be drawn alone


def record_id(backend: str, kernel: str, case: str, fmt: str) -> str:
    """The name of a cell, and of its record: `backend-kernel-case-format`, as pytest shows it."""
    return f"{backend}-{kernel}-{case}-{fmt}"


@dataclass(frozen=True)
class Record:
    """The result of one cell: backend x kernel x case x format."""

    id: str  # as of record_id
    backend: str
    kernel: str
    case: str
    case_version: Count
    format: str
    seed: Count
    heads: Count  # drawn in all
    experiment: str  # the kind of experiment that the case is
    outcome: OutcomeName
    command: str  # reruns this one cell
    plan: str | None = None  # rule@plan the kernel declares
    verdict: VerdictName | None = None  # on the bias
    tied: bool | None = None  # of a bias: whether it is there since O itself ties; None: not looked at
    in_training: VerdictName | None = None  # whether gradients, or a training run, contain a bias; None: not measured
    shown: Shown | None = None  # what tables show; None: there is no result
    measures: Mapping[str, Value] = field(default_factory=dict)
    answers: Mapping[str, Answer] = field(default_factory=dict)  # by the name of the check
    excused: str | None = None  # the reason why what fell does not fail the run
    skipped: str | None = None  # why it was skipped
    digest: str | None = None  # of the bits of the first batch's O; of a training run, of its losses
    evidence: Annotated[Mapping[str, Any], EVIDENCE] = field(default_factory=dict)

    @property
    def passes(self) -> bool:
        """Whether it does not fail a run: a skip is no pass, and fails none."""
        return self.outcome in PASSING or self.excused is not None

    @property
    def fails(self) -> bool:
        """Whether it makes a run fall: neither a pass, nor excused, nor skipped."""
        return not self.passes and self.outcome != SKIPPED

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why it did not hold, or was not run."""
        if self.skipped is not None:
            return (self.skipped,)
        fell = tuple(answer.why for answer in self.answers.values() if answer.met is False)
        return fell or tuple(answer.why for answer in self.answers.values() if answer.met is None)

    @property
    def shrank(self) -> bool:
        """Whether the output has lost its size, so that a bias in ulps would tell nothing."""
        return self.shown is not None and self.shown.kind == SHRUNK

    def number(self, name: str) -> float | None:
        """The number of a measure; None where there is none."""
        return number_of(self.measures.get(name))

    def met(self, check: str) -> bool | None:
        """Whether a check was asked and met; None: not asked, or the data do not tell."""
        answer = self.answers.get(check)
        return None if answer is None else answer.met

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has (tuples are written as lists), without fields that say nothing."""
        return dict(self._as_dict)

    @cached_property
    def _as_dict(self) -> dict[str, Any]:
        return _plain(self)


@cache
def _defaults(kind: type) -> tuple[tuple[str, Any], ...]:
    """A data class' fields, and what each has unless something is said."""
    return tuple(
        (each.name, each.default_factory() if each.default_factory is not MISSING else each.default)
        for each in fields(kind)
    )


def _plain(value: Any) -> dict[str, Any]:
    """A data class' fields, those at their defaults left out, here and within."""
    parts = ((name, getattr(value, name), default) for name, default in _defaults(value.__class__))
    return {name: _within(part) for name, part, default in parts if part != default}


def _within(part: Any) -> Any:
    if part is None or isinstance(part, (str, float, int)):
        return part
    if isinstance(part, Mapping):
        return {name: _within(value) for name, value in part.items()}
    return _plain(part) if hasattr(part, "__dataclass_fields__") else part


def from_dict(plain: Mapping[str, Any]) -> Record:
    """The record that `as_dict` wrote, after its way through JSON.

    Raises:
        tiebreak.reports.records.decode.FieldError: a field is missing, unknown or of the wrong kind.
    """
    record: Record = decoder(Record)(plain)
    return record


def outcome_of(answers: Mapping[str, Answer], judging: Collection[str]) -> str:
    """What became of a cell that was not skipped.

    Args:
        answers: to all checks that were asked of it.
        judging: names of the checks that are about its rounding.

    Returns:
        `fell` if a check was not met, `inconclusive` if one was not told, `held` if one about the cell's rounding was
        met, `measured` where none of that kind was asked.
    """
    if (runs := answers.get(RUNS)) is not None and runs.met is False:
        return CRASHED
    if (in_time := answers.get(IN_TIME)) is not None and in_time.met is False:
        return TIMED_OUT
    met = {answer.met for answer in answers.values()}
    if False in met:
        return FELL
    if None in met:
        return INCONCLUSIVE
    return HELD if answers.keys() & set(judging) else MEASURED


def verdict_of(record: "Record", measures: Mapping[str, MeasureRecord]) -> str | None:
    """The verdict that a record's own interval comes to; see `tiebreak.cases.verdicts.judge`.

    Args:
        record: of a cell with a result.
        measures: what its measures are; one with a margin is the bias that a verdict is on.

    Returns:
        None where it has no such measure.
    """
    if record.number(NONFINITE):
        return NONFINITE
    for name, measure in measures.items():
        bias = record.measures.get(name)
        if measure.margin is not None and isinstance(bias, Estimate):
            if bias.mean is None or bias.half_width is None:
                return UNDECIDED
            low, high, margin = bias.mean - bias.half_width, bias.mean + bias.half_width, measure.margin
            inside = low >= -margin and high <= margin
            return BIASED if low > margin or high < -margin else UNBIASED if inside else UNDECIDED
    return None


NARROWED = frozenset({"id", "backend", "kernel", "case", "format", "experiment"})  # fields that options narrow a run by


@dataclass(frozen=True)
class Narrowing:
    """What the command line left out of a run: cells of which a field has none of these names."""

    given: tuple[str, ...]  # the options that did, with their values
    field: Annotated[str, NARROWED]  # of a record
    names: tuple[str, ...]  # left in; globs are allowed

    def leaves_in(self, record: Record) -> bool:
        """Whether a record is of a cell that was asked for."""
        value: str = getattr(record, self.field)
        return value in self.names or any(matching(name, [value]) for name in self.names)


@dataclass(frozen=True)
class Run:
    """All records of one run, with what is needed to run it again."""

    platform: Mapping[str, Any]  # tiebreak.backends.platform
    options: Mapping[str, Any]  # of the command line
    records: tuple[Record, ...]
    measures: Mapping[str, MeasureRecord] = field(default_factory=dict)  # those that the records have
    checks: Mapping[str, CheckRecord] = field(default_factory=dict)  # those that were asked
    cases: Mapping[str, CaseRecord] = field(default_factory=dict)  # those that were run
    experiments: Mapping[str, ExperimentRecord] = field(default_factory=dict)  # kinds of them
    narrowing: tuple[Narrowing, ...] = ()  # by its options; a cell that all of them leave in was asked for
    unavailable: Mapping[str, str] = field(default_factory=dict)  # backends that could not run, and why
    seconds: Mapping[str, float] = field(default_factory=dict)  # by cell; this and `run` alone don't repeat to the bit
    explanations: Mapping[str, Explanation] = field(default_factory=dict)  # of undeclared kernels, by backend-kernel
    plans: Mapping[str, PlanRecord] = field(default_factory=dict)  # that records declare, or explanations name
    not_run: tuple[str, ...] = ()  # cells that were asked for and never came to their turn: the run was interrupted
    running: tuple[str, ...] = ()  # cells that were in the middle of it then
    complete: bool = True  # False: the run was interrupted
    schema: int = SCHEMA
    run: str | None = None  # tells this run from every other; None in a baseline

    def backend_text(self, backend: str) -> str:
        """A backend's name, with what was assumed of a device that was not there."""
        assumed = self.platform.get("assumed", {})
        return f"{backend} {assumed[backend]}" if backend in assumed else backend

    def headline(self, record: Record) -> float | None:
        """The number of the measure that a record's kind of experiment is known by; None where there is none."""
        kind = self.experiments.get(record.experiment)
        return None if kind is None or kind.headline is None else record.number(kind.headline)

    @property
    def own(self) -> bool:
        """Whether a kernel of one's own was run."""
        return bool(self.options.get("kernel"))

    @property
    def pooled(self) -> frozenset[str]:
        """Kinds of experiment of which tables put all seeds of a kernel in one place."""
        return frozenset(name for name, kind in self.experiments.items() if kind.pooled)

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has, records in order of their ids."""
        described = ("explanations", "plans", "measures", "checks", "cases", "experiments")
        return {
            "schema": self.schema,
            "run": self.run,
            "complete": self.complete,
            "platform": dict(self.platform),
            "options": dict(self.options),
            "narrowing": [_plain(each) for each in self.narrowing],
            "unavailable": dict(self.unavailable),
            "not_run": list(self.not_run),
            "running": list(self.running),
            **{name: {each: _plain(about) for each, about in getattr(self, name).items()} for name in described},
            "records": [record.as_dict() for record in sorted(self.records, key=lambda record: record.id)],
            "seconds": {name: self.seconds[name] for name in sorted(self.seconds)},
        }
