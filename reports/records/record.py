"""Records: the measured result of every cell of a run, and the file that keeps them.

A record is a cell's identity, its measures, the answers to the checks that were asked of it, and evidence to look at.
What a measure, a check, a case or a kind of experiment is, the file says itself, once: nothing here knows their names.
Numbers that are NaN or infinite are written as null, which no comparison takes for a pass.
"""

import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any

from msgspec import Meta, structs

from tiebreak.reports.names import matching
from tiebreak.reports.records.decode import (
    SCHEMA,
    Count,
    Data,
    FieldError,
    FileData,
    Integer,
    Schema,
    Size,
    convert,
    one_of,
)

PASSED, MEASURED, FAILED, SKIPPED = "passed", "measured", "failed", "skipped"
UNDECIDED = "undecided"  # of an outcome and of a bias: too few heads to tell
NO_TIME = "left out: the budget was spent"  # why a cell was skipped that --budget had no time for
CRASHED, TIMED_OUT = "crashed", "timed_out"
OUTCOMES = (PASSED, MEASURED, FAILED, UNDECIDED, CRASHED, TIMED_OUT, SKIPPED)
PASSING = frozenset({PASSED, MEASURED})
PASS, FAIL, INCOMPLETE = "PASS", "FAIL", "INCOMPLETE"  # with UNDECIDED in capitals, the first words of verdicts
RESULTS = (PASS, FAIL, UNDECIDED.upper(), INCOMPLETE)

RUNS, IN_TIME = "runs", "in_time"  # the checks of every cell: that the kernel ran to its end, and in its time
CLAIM, PREDICTION = "claim", "prediction"  # the checks about a cell's rounding that reports know by name
IMPLIED = frozenset({RUNS, IN_TIME})  # checks that a cell with a result has passed, and is not asked

UNBIASED, BIASED, NONFINITE = "unbiased", "biased", "nonfinite"
VERDICTS = (UNBIASED, UNDECIDED, BIASED, NONFINITE)  # from the best to the worst

# Values of Shown.kind: the measure whose number tables show, or one of these instead.
SHRUNK, NO_NUMBER = "shrunk", "none"
REPLACED = frozenset({NONFINITE, SHRUNK, NO_NUMBER})

# Results for a kernel that declares no plan: one plan has its bits; one has its bias, with other random bits; several
# have its bits and can't be told apart; none has.
FOLLOWS, BEHAVES_LIKE, AMBIGUOUS, UNEXPLAINED = "follows", "behaves_like", "ambiguous", "unexplained"
STATES = (FOLLOWS, BEHAVES_LIKE, AMBIGUOUS, UNEXPLAINED)
FOLLOWED = 0.98  # share of equal bits, in every cell, from which on a plan is followed
#: The same of dQ, dK and dV each, of a backward pass. The last bit of a sum turns more of their bits: of sound kernels
#: up to 2 % in bf16 and 10 % in fp16; a cast that is elsewhere turns 23 % and more.
FOLLOWED_BACKWARD = 0.85

MORE, LESS, FARTHER = "more", "less", "farther"  # which way a measure is worse; farther: from 0
WORSE = (MORE, LESS, FARTHER)

Platform = Annotated[Mapping[str, Any], Meta(extra_json_schema={"required": ["cpu", "level"]})]
Spec = Annotated[str, Meta(pattern=r"^\+?\.[0-6][efg](?!\n)$")]
OutcomeName = Annotated[str, one_of(OUTCOMES)]
VerdictName = Annotated[str, one_of(VERDICTS)]
ResultName = Annotated[str, one_of(RESULTS)]


class Estimate(Data, frozen=True):
    """A mean with the half width of its confidence interval; None where there is no such number."""

    mean: float | None  # null: NaN, infinite or not known
    half_width: Size | None  # of the interval

    @classmethod
    def of(cls, mean: float, half_width: float) -> "Estimate":
        """Make an estimate; NaN and Inf become None."""
        return cls(finite(mean), finite(half_width))


class FitRecord(Estimate, frozen=True):
    """The agreement of a known plan with a kernel that declares none: its bias less the plan's, and equal bits."""

    bits: Size | None = None  # share of elements of O that agree to the bit


Number = float | Integer
Value = Estimate | Number | None  # of a measure


def finite(number: float) -> float | None:
    """Return the number, or None if it is NaN or infinite."""
    return number if math.isfinite(number) else None


def number_of(value: Value) -> float | None:
    """Return the number of a value: of an estimate its mean."""
    return value.mean if isinstance(value, Estimate) else value


class Answer(Data, frozen=True):
    """The answer of a check about a cell."""

    passed: bool | None  # None: the data do not tell
    asked: str  # what had to hold
    why: str = ""  # what was found instead, in one line; empty where it passed
    source: str | None = None  # who claims it, of a claim


class Shown(Data, frozen=True):
    """The result that tables show; `tiebreak.reports.tables.texts` puts it in words."""

    kind: str  # the measure whose number it is, or what there is in its place: one of REPLACED
    number: float | None = None  # of the measure; of what has shrunk the share of its size that is left
    unit: str = ""  # after the number; empty: the table's legend says it
    verdict: VerdictName | None = None  # on a bias
    spec: Spec = "+.2f"  # how the number is written, as Python's format takes it

    @classmethod
    def of(cls, measure: str, number: float, unit: str = "", verdict: str | None = None, spec: str = "+.2f") -> "Shown":
        """Show the number of a measure; where it is NaN or infinite, that."""
        return cls(measure, number, unit, verdict, spec) if math.isfinite(number) else cls(NONFINITE)


class Explanation(Data, frozen=True):
    """The known plan that explains a kernel that declares none; `tiebreak.reports.tables.texts` puts it in words."""

    state: Annotated[str, one_of(STATES)]  # how far it explains it
    plans: tuple[str, ...]  # those that can't be told apart, the plainest first; where none explains it the nearest
    cells: Count  # that were compared
    share: Size | None = None  # of bits that agree with the first of the plans, mean over the cells
    worst: Mapping[str, float] = {}  # cases, or shapes, that it fails, with the share


class PlanRecord(Data, frozen=True):
    """A description of a plan that records and explanations name."""

    rule: str  # by what a row's shift is chosen
    fix: bool = False  # whether that moves the shift away from a maximum that repeats; else it is the row's maximum
    away: tuple[str, ...] = ()  # rounding points whose ties go away from zero


class MeasureRecord(Data, frozen=True):
    """A description of a measure, and of how the gate limits it."""

    about: str  # one line
    unit: str = ""  # ulp; empty: a plain number
    worse: Annotated[str, one_of(WORSE)] | None = None  # None: neither way is
    limit: Size | None = None  # how much worse it may get; None: the gate looks at its being there alone
    margin: Size | None = None  # within this of 0 it is none: the verdict is on it; None: there is none
    share: Size = 0.0  # of itself, that it may get worse by; both have to be passed
    per: str | None = None  # the measure that it is a share of
    portable: bool = False  # whether the gate holds it between platforms too
    column: bool = False  # whether the page's table of all cells has a column of it
    of_biased: bool = False  # whether a cell that is not biased may lack it


class LimitRecord(Data, frozen=True):
    """The limit of a measure that a check requires."""

    measure: str  # by name
    most: float | str | None = None  # what it may reach, or the measure whose number that is; None: any number will do
    size: bool = False  # whether its size counts, whichever side of 0 it is on
    where: tuple[str, ...] = ()  # asked only where there are these measures; else what is missing keeps to no limit
    or_within: str | None = None  # the measure of what rounding leaves open: an interval within that keeps to it, too

    def kept(self, measures: Mapping[str, Value]) -> bool | None:
        """Return whether measures keep to it; None: their interval does not tell. A NaN does not.

        An interval is beyond a limit if all of it is, and keeps to it if all of it does.
        """
        if any(name not in measures for name in self.where):
            return True
        value = measures.get(self.measure)
        most = number_of(measures.get(self.most)) if isinstance(self.most, str) else self.most
        most, number = math.inf if self.most is None else most, number_of(value)
        if number is None or most is None:
            return False
        width = value.half_width if isinstance(value, Estimate) else 0.0
        width, number = math.inf if width is None else width, abs(number) if self.size else number
        if number - width > most:
            return False
        noise = number_of(measures.get(self.or_within)) if self.or_within else None
        return True if number + width <= max(most, noise or 0.0) else None


def kept(limits: Collection[LimitRecord], measures: Mapping[str, Value]) -> bool | None:
    """Return whether measures keep to all limits of a check; None: none is broken, and one is undecided."""
    answers = {limit.kept(measures) for limit in limits}
    return False if False in answers else None if None in answers else True


class CheckRecord(Data, frozen=True):
    """A description of a check's question."""

    about: str  # one line
    judges: bool = False  # whether it is about the cell's rounding: a cell that passed has passed such a one
    wrong: bool = False  # whether a kernel that does not meet it computes something else than attention, or nothing
    limits: tuple[LimitRecord, ...] = ()  # that measures have to keep to for it to pass
    more: bool = False  # whether more than they decides whether it is


class SeriesFigure(Data, frozen=True):
    """The way in which a page draws one series of a case's cells: those with largest and smallest headline."""

    series: str  # its name in the evidence
    title: str  # of the figure
    note: str  # what to see in it
    y_label: str  # the label of the vertical axis
    summed: bool = False  # whether readings are added up from step to step


class CaseRecord(Data, frozen=True):
    """A description of a case."""

    about: str  # one line
    source: str = ""  # where the input or the claims come from
    label: str | None = None  # a letter or two for headings
    headline: str | None = None  # the measure that tables show
    unclaimed: str | None = None  # why nothing is claimed of the kernels that no claim speaks of
    family: str | None = None  # what varies between cases that belong together
    at: Number | None = None  # the place of the case in its family
    failure: bool = False  # whether it is an input on which rounding is known to fail
    seen: str = ""  # which trained models' attention has met what it scripts, and how often; empty: none is known
    group: str = ""  # the heading of its cases; empty: undecided
    backward: bool = False  # whether the backward pass is run and measured too
    figure: SeriesFigure | None = None  # of its readings


class ExperimentRecord(Data, frozen=True):
    """A description of a kind of experiment."""

    about: str  # one line
    legend: str = ""  # what its tables show
    headline: str | None = None  # the measure, in ulps, that heat maps colour
    largest: str | None = None  # the measure that comparisons add to what tables show: the largest error
    agreement: str | None = None  # the measure that is the share of bits that agree with a prediction
    carried: str | None = None  # the measure that is how much of a bias of O gradients contain, as a share
    pooled: bool = False  # whether tables put all seeds of a kernel in one place, kernels down and cases across


class TraceRecord(Data, frozen=True):
    """The error of one element of O-bar as its sum over the keys proceeds (paper, equation 5)."""

    error: tuple[float | None, ...]  # after each key
    at_one: tuple[Count, ...]  # keys whose P-bar is exactly 1


class HistogramRecord(Data, frozen=True):
    """Signed errors of O in ulps, counted in bins of one width."""

    low: float  # lower edge of the first bin
    width: float  # of a bin
    counts: tuple[Count, ...]  # of elements, bin by bin
    outside: Count  # elements beyond the bins


class ChangeRecord(Data, frozen=True):
    """A call compared with the same one with one thing changed."""

    bits: Size  # share of elements of O, or of a gradient, that have other bits
    difference: Estimate  # signed mean of the changed one less the plain one, in ulps
    before: Estimate  # bias of the plain one
    after: Estimate  # bias of the changed one
    verdict: VerdictName | None = None  # on the difference; None: no bit differs
    lost: Count = 0  # elements that are NaN or Inf in one of both alone
    growth: float | None = None  # mean squared error of one over the other's, where rounding does not explain it


class SeriesRecord(Data, frozen=True):
    """Readings over the steps of a training run."""

    steps: tuple[Count, ...]  # at which monitors were read
    values: Mapping[str, tuple[float | None, ...]]  # by name, one number a reading


class RuleReading(Data, frozen=True):
    """One number that an acceptance rule looks at."""

    number: float | None  # None: NaN or infinite, which passes no rule
    limit: float | None  # that it may reach


class RuleAnswer(Data, frozen=True):
    """The verdict of another project's acceptance rule on a cell."""

    passed: bool | None  # None: it lacks what it needs
    readings: Mapping[str, RuleReading] = {}  # by what it reads
    needs: str = ""  # what it lacks


class NumbersRecord(Data, frozen=True):
    """Numbers that the same inputs give on every machine up to rounding."""

    about: str  # what they are
    unit: str  # of them
    inputs: str  # digest of the inputs: numbers of others are not comparable
    values: tuple[float | None, ...]  # one a place; null: NaN or infinite


IDENTITY = "identity"  # evidence: what a search for a kernel's plan came to
NUMBERS = "numbers"  # evidence: what comparisons of machines take differences of
TRACEBACK, SCRIPT = "traceback", "script"  # evidence: where a cell failed, and how to show it to others
CAPTURED = "captured"  # evidence: what was asked of a captured call

# Evidence that something here draws or reads; of any other kind a record carries what JSON has.
EVIDENCE: Mapping[str, Any] = {
    "trace": TraceRecord,
    "histogram": HistogramRecord,
    "series": SeriesRecord,
    "fits": Mapping[str, FitRecord],  # of a kernel that declares nothing, by known plan
    IDENTITY: Explanation,  # of a kernel that declares nothing: what the search for its plan came to
    "changes": Mapping[str, ChangeRecord],  # of a call compared with itself, by what was changed and put in
    "slips": Mapping[str, float],  # of a wrong kernel: mistakes that explain O, or a gradient, and what share of it
    "wrong where": str,  # of calls: what those that are wrong have in common, and no other
    "off": Mapping[str, float | None],  # of a wrong kernel: what is off, and by what share of the reference; null: NaN
    "controls": Mapping[str, float],  # what had to change O there, and the share of its elements that it did
    "backward": Mapping[str, Mapping[str, float]],  # of a user's kernel, by backward pass: bits of dq, dk and dv
    "rules": Mapping[str, RuleAnswer],  # acceptance rules in public use, by name, with --rules
    NUMBERS: NumbersRecord,
    "paper": str,  # what the paper says of training with the kernel: stable, fails
    "assumed": str,  # what was assumed, as the kernel ran, of a device that was not there
    TRACEBACK: str,  # of what a user's kernel raised, from the first frame of the user's on
    SCRIPT: str,  # the command that writes a script of a wrong call
    CAPTURED: str,  # what was asked of a captured call, and what was not
}
OF_A_RUN = frozenset({"trace", "histogram", "series", TRACEBACK, SCRIPT})  # evidence that no baseline keeps


def record_id(backend: str, kernel: str, case: str, fmt: str) -> str:
    """Return the name of a cell, and of its record: `backend-kernel-case-format`, as pytest shows it."""
    return f"{backend}-{kernel}-{case}-{fmt}"


class Record(Data, frozen=True):
    """The result of one cell: backend x kernel x case x format."""

    id: str  # as of record_id
    backend: str  # where it ran
    kernel: str  # what was run
    case: str  # on what input
    case_version: Count  # another one has other inputs or claims
    format: str  # of q, k, v and O
    seed: Count  # of the inputs
    heads: Count  # drawn in all
    experiment: str  # the kind of experiment that the case is
    outcome: OutcomeName  # what became of it
    command: str  # reruns this one cell
    plan: str | None = None  # rule@plan the kernel declares
    verdict: VerdictName | None = None  # on the bias
    tied: bool | None = None  # of a bias: whether it is there since O itself ties; None: not looked at
    in_training: VerdictName | None = None  # whether gradients, or a training run, contain a bias; None: not measured
    shown: Shown | None = None  # what tables show; None: there is no result
    measures: Mapping[str, Value] = {}  # by name; null: NaN or infinite, which passes nothing
    answers: Mapping[str, Answer] = {}  # by the name of the check
    excused: str | None = None  # the reason why what failed does not fail the run
    skipped: str | None = None  # why it was skipped
    digest: str | None = None  # of the bits of the first batch's O; of a training run, of its losses
    evidence: Mapping[str, Any] = {}  # to look at; of a name that is not in EVIDENCE what JSON has

    def __post_init__(self) -> None:
        for name in EVIDENCE.keys() & self.evidence.keys():
            value = convert(self.evidence[name], EVIDENCE[name], f"evidence.{name}")
            structs.force_setattr(self, "evidence", {**self.evidence, name: value})

    @property
    def passes(self) -> bool:
        """True if it passes, or is excused; a skip is no pass."""
        return self.outcome in PASSING or self.excused is not None

    @property
    def fails(self) -> bool:
        """True if it makes a run fail: neither passed, nor excused, nor skipped."""
        return not self.passes and self.outcome != SKIPPED

    @property
    def reasons(self) -> tuple[str, ...]:
        """The reasons why it did not pass, or was not run."""
        if self.skipped is not None:
            return (self.skipped,)
        failed = tuple(answer.why for answer in self.answers.values() if answer.passed is False)
        return failed or tuple(answer.why for answer in self.answers.values() if answer.passed is None)

    @property
    def not_passed(self) -> list[str]:
        """The checks that it does not meet, or that the data do not decide."""
        return [name for name, answer in self.answers.items() if answer.passed is not True]

    def number(self, name: str) -> float | None:
        """Return the number of a measure; None where there is none."""
        return number_of(self.measures.get(name))

    def passed(self, check: str) -> bool | None:
        """Return whether a check passed; None: not asked, or the data do not tell."""
        answer = self.answers.get(check)
        return None if answer is None else answer.passed


def outcome_of(answers: Mapping[str, Answer], judging: Collection[str]) -> str:
    """Return the outcome of a cell that was not skipped, by its answers and the checks that judge its rounding."""
    failed = {name for name, answer in answers.items() if answer.passed is False}
    if failed:
        return CRASHED if RUNS in failed else TIMED_OUT if IN_TIME in failed else FAILED
    if any(answer.passed is None for answer in answers.values()):
        return UNDECIDED
    return PASSED if answers.keys() & set(judging) else MEASURED


def verdict_of(record: "Record", measures: Mapping[str, MeasureRecord]) -> str | None:
    """Return the verdict that the interval of a record's bias comes to; see `tiebreak.cases.verdicts.judge`.

    The bias is the measure that has a margin; None if no measure has one.
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


NARROWED = ("id", "backend", "kernel", "case", "format", "experiment")  # fields that options narrow a run by


class Narrowing(Data, frozen=True):
    """The cells that the command line left out of a run: those of which a field has none of these names."""

    given: tuple[str, ...]  # the options that did, with their values
    field: Annotated[str, one_of(NARROWED)]  # of a record
    names: tuple[str, ...]  # left in; globs are allowed

    def leaves_in(self, record: Record) -> bool:
        """Return whether a record is of a cell that was asked for."""
        value: str = getattr(record, self.field)
        return value in self.names or any(matching(name, [value]) for name in self.names)


class Run(FileData, frozen=True):
    """All records of one run, with what is needed to run it again."""

    platform: Platform  # tiebreak.backends.platform
    options: Mapping[str, Any]  # of the command line
    records: tuple[Record, ...]  # one a cell
    measures: Mapping[str, MeasureRecord] = {}  # those that the records have
    checks: Mapping[str, CheckRecord] = {}  # those that were asked
    cases: Mapping[str, CaseRecord] = {}  # those that were run
    experiments: Mapping[str, ExperimentRecord] = {}  # kinds of them
    narrowing: tuple[Narrowing, ...] = ()  # by its options; a cell that all of them leave in was asked for
    unavailable: Mapping[str, str] = {}  # backends that could not run, and why
    seconds: Mapping[str, float] = {}  # by cell; this and `run` alone don't repeat to the bit
    explanations: Mapping[str, Explanation] = {}  # of undeclared kernels, by backend-kernel
    plans: Mapping[str, PlanRecord] = {}  # that records declare, or explanations name
    not_run: tuple[str, ...] = ()  # cells that were asked for and never came to their turn: the run was interrupted
    running: tuple[str, ...] = ()  # cells that were in the middle of it then
    complete: bool = True  # False: the run was interrupted
    schema: Schema = SCHEMA  # version of this layout
    run: str | None = None  # tells this run from every other; None in a baseline

    def backend_text(self, backend: str) -> str:
        """Return a backend's name, with what was assumed of a device that was not there."""
        assumed = self.platform.get("assumed", {})
        return f"{backend} {assumed[backend]}" if backend in assumed else backend

    def evidence(self, backend: str) -> str:
        """Return the evidence for plans that a kernel's bits give on a backend; a baseline has it for none."""
        return str(self.platform.get("evidence", {}).get(backend, "bits"))

    def number(self, record: Record, role: str) -> float | None:
        """Return the number of the measure that has a role in a record's kind of experiment, such as `headline`."""
        name: str | None = getattr(self.experiments.get(record.experiment), role, None)
        return record.number(name) if name else None

    @property
    def ended(self) -> bool:
        """True if it came to its end, with nothing left to do."""
        return self.complete and not self.not_run and not self.running

    @property
    def has_users_kernel(self) -> bool:
        """True if a user's own kernel was run."""
        return bool(self.options.get("kernel"))

    @property
    def pooled(self) -> frozenset[str]:
        """The kinds of experiment of which tables put all seeds of a kernel in one place."""
        return frozenset(name for name, kind in self.experiments.items() if kind.pooled)

    def check(self) -> None:
        """Raise FieldError for a second record of a cell, what the file does not describe, a platform without name."""
        for name in ("cpu", "level"):
            convert(self.platform.get(name), str, f"platform.{name}")
        probed, texts = Mapping[str, Mapping[str, str | Number]], Mapping[str, str]
        for name, kind in (("fingerprint", probed), ("evidence", texts), ("assumed", texts)):
            convert(self.platform.get(name, {}), kind, f"platform.{name}")
        seen: set[str] = set()
        for number, record in enumerate(self.records):
            if record.id in seen:
                raise FieldError(f"a second record of {record.id}", f"records[{number}].id")
            seen.add(record.id)
            used = (record.measures, record.answers, (record.case,), (record.experiment,))
            for table, names in zip(("measures", "checks", "cases", "experiments"), used, strict=True):
                if missing := [name for name in names if name not in getattr(self, table)]:
                    raise FieldError(f"{missing[0]}: not described in {table}", f"records[{number}]")
