"""Records: the measured result of every cell of a run, and the file that keeps them.

One JSON object a cell; numbers that are NaN or infinite are written as null, which no comparison takes for a pass.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

from tiebreak.reports.decode import decoder

SCHEMA = 3  # see tiebreak.reports.migrations for what changed

HELD, FELL, INCONCLUSIVE, SKIPPED = "held", "fell", "inconclusive", "skipped"
CRASHED, TIMED_OUT = "crashed", "timed_out"
OUTCOMES = (HELD, FELL, INCONCLUSIVE, CRASHED, TIMED_OUT, SKIPPED)
PASSING = frozenset({HELD})

UNBIASED, UNDECIDED, BIASED, NONFINITE = "unbiased", "inconclusive", "biased", "nonfinite"
VERDICTS = (UNBIASED, UNDECIDED, BIASED, NONFINITE)  # from the best to the worst

Outcome = Annotated[str, frozenset(OUTCOMES)]
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


def finite(number: float) -> float | None:
    """The number, or None if it is NaN or infinite."""
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class ClaimRecord:
    """What the case claims about the kernel, and whether it held."""

    expectation: str  # what is expected
    source: str  # who claims it
    met: bool | None  # None: the data do not tell


@dataclass(frozen=True)
class PredictionRecord:
    """What the emulation predicts from the kernel's declared plan, on the same inputs."""

    plan: str  # rule@plan that was emulated
    bias: Estimate  # its bias in ulps
    difference: Estimate  # bias measured less bias predicted, paired head by head
    equal_bits: float  # share of elements of O that agree to the bit
    met: bool | None  # whether the difference lies inside the margin; None: the data do not tell


@dataclass(frozen=True)
class MeasuresRecord:
    """The numbers of a cell."""

    bias: Estimate  # mean signed error of O in ulps; positive: away from zero
    rms_ulps: float | None
    max_ulps: float | None
    error_over_bound: float | None  # largest error as a share of the plan's rounding-error bound
    gain: float | None  # sum |O| / sum |reference|
    delta_bias: Estimate  # mean of delta_lp - delta_hp, relative to mean |delta_hp|
    left_out: Count  # elements whose reference is 0; of captured tensors those that cancelled too
    nonfinite: Count  # elements that are NaN or Inf where the reference is finite
    elements: Count
    gradients: Mapping[str, float | None] = field(default_factory=dict)  # see tiebreak.cases.gradients
    repeatable: bool | None = None  # whether two runs on the same input agree to the bit; None: not known


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
class TrainingRecord:
    """What a short training run measured."""

    label: str  # a letter or two for headings
    about: str  # the run in one line
    amplified: bool  # whether it takes a narrower format than anyone trains with to show the effect
    headline: str  # the measure that tables show
    shown: str  # as they print it
    stable: bool | None  # whether the paper says that training is stable with the kernel; None: it says nothing
    measures: Mapping[str, float | None]  # see tiebreak.cases.gpt2.snippets
    claims: tuple[ClaimRecord, ...]  # one a bound; the record's own claim is all of them
    steps: tuple[Count, ...]  # at which monitors were read
    series: Mapping[str, tuple[float | None, ...]]  # of the scripted head, one number a reading


@dataclass(frozen=True)
class Record:
    """The result of one cell: backend x kernel x case x format."""

    id: str
    backend: str
    kernel: str
    case: str
    case_version: Count
    format: str
    seed: Count
    heads: Count  # drawn in all
    outcome: Outcome
    reasons: tuple[str, ...]  # why it did not hold
    command: str  # reruns this one cell
    plan: str | None = None  # rule@plan the kernel declares
    verdict: VerdictName | None = None
    measures: MeasuresRecord | None = None
    claim: ClaimRecord | None = None
    prediction: PredictionRecord | None = None
    fits: Mapping[str, Estimate] = field(default_factory=dict)  # undeclared kernels: difference to each known plan
    digest: str | None = None  # of the bits of the first batch's O; of a training run, of its losses
    trace: TraceRecord | None = None  # of a traced case under emulation
    histogram: HistogramRecord | None = None  # of a traced case
    training: TrainingRecord | None = None  # of a short training run, which has no measures of O

    @property
    def trained(self) -> bool:
        """Whether the cell is a short training run, whatever became of it: their cases are called train_something."""
        return self.case.startswith("train_")

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has (tuples are written as lists)."""
        return asdict(self)


def from_dict(plain: Mapping[str, Any]) -> Record:
    """The record that `as_dict` wrote, after its way through JSON.

    Raises:
        tiebreak.reports.decode.FieldError: a field is missing, unknown or of the wrong kind.
    """
    record: Record = decoder(Record)(plain)
    return record


@dataclass(frozen=True)
class Run:
    """All records of one run, with what is needed to run it again."""

    platform: Mapping[str, Any]  # tiebreak.backends.platform
    options: Mapping[str, Any]  # of the command line
    records: tuple[Record, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)  # backends that could not run, and why
    seconds: Mapping[str, float] = field(default_factory=dict)  # by cell; this and `run` alone don't repeat to the bit
    explanations: Mapping[str, str] = field(default_factory=dict)  # undeclared kernels: the plan that fits best
    complete: bool = True  # False: the run was interrupted
    schema: int = SCHEMA
    run: str | None = None  # tells this run from every other; None in a baseline

    def as_dict(self) -> dict[str, Any]:
        """Plain values that JSON has, records in order of their ids."""
        return {
            "schema": self.schema,
            "run": self.run,
            "complete": self.complete,
            "platform": dict(self.platform),
            "options": dict(self.options),
            "unavailable": dict(self.unavailable),
            "explanations": dict(self.explanations),
            "records": [record.as_dict() for record in sorted(self.records, key=lambda record: record.id)],
            "seconds": {name: self.seconds[name] for name in sorted(self.seconds)},
        }
