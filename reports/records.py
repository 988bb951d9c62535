"""Records: the measured result of every cell of a run, and the file that keeps them.

One JSON object a cell; numbers that are NaN or infinite are written as null, which no comparison takes for a pass.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA = 1

HELD, FELL, INCONCLUSIVE, SKIPPED, CRASHED = "held", "fell", "inconclusive", "skipped", "crashed"
PASSING = frozenset({HELD})


@dataclass(frozen=True)
class Estimate:
    """A mean with the half width of its confidence interval; None where there is no such number."""

    mean: float | None
    half_width: float | None

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
    left_out: int  # elements whose reference is 0
    nonfinite: int  # elements that are NaN or Inf where the reference is finite
    elements: int
    gradients: Mapping[str, float | None] = field(default_factory=dict)  # see tiebreak.cases.gradients


@dataclass(frozen=True)
class Record:
    """The result of one cell: backend x kernel x case x format."""

    id: str
    backend: str
    kernel: str
    case: str
    case_version: int
    format: str
    seed: int
    heads: int  # drawn in all
    outcome: str  # held, fell, inconclusive, skipped, crashed
    reasons: tuple[str, ...]  # why it did not hold
    command: str  # reruns this one cell
    plan: str | None = None  # rule@plan the kernel declares
    verdict: str | None = None  # biased, unbiased, inconclusive, nonfinite
    measures: MeasuresRecord | None = None
    claim: ClaimRecord | None = None
    prediction: PredictionRecord | None = None
    fits: Mapping[str, Estimate] = field(default_factory=dict)  # undeclared kernels: difference to each known plan
    digest: str | None = None  # of the bits of the first batch's O
    trace: Mapping[str, Any] = field(default_factory=dict)  # see tiebreak.cases.trace

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        plain: dict[str, Any] = asdict(self)
        plain["reasons"] = list(self.reasons)
        return plain


def from_dict(plain: Mapping[str, Any]) -> Record:
    """The record that `as_dict` wrote.

    Raises:
        KeyError, TypeError: a field is missing or of the wrong kind.
    """

    def estimate(value: Mapping[str, Any]) -> Estimate:
        return Estimate(value["mean"], value["half_width"])

    measures, prediction, claim = plain["measures"], plain["prediction"], plain["claim"]
    return Record(
        **{
            **plain,
            "reasons": tuple(plain["reasons"]),
            "measures": measures
            and MeasuresRecord(
                **{**measures, "bias": estimate(measures["bias"]), "delta_bias": estimate(measures["delta_bias"])}
            ),
            "claim": claim and ClaimRecord(**claim),
            "prediction": prediction
            and PredictionRecord(
                **{
                    **prediction,
                    "bias": estimate(prediction["bias"]),
                    "difference": estimate(prediction["difference"]),
                }
            ),
            "fits": {name: estimate(value) for name, value in plain["fits"].items()},
        }
    )


@dataclass(frozen=True)
class Run:
    """All records of one run, with what is needed to run it again."""

    platform: Mapping[str, Any]  # tiebreak.backends.platform
    options: Mapping[str, Any]  # of the command line
    records: tuple[Record, ...]
    unavailable: Mapping[str, str] = field(default_factory=dict)  # backends that could not run, and why
    seconds: Mapping[str, float] = field(default_factory=dict)  # by cell; kept apart: all else repeats to the bit
    explanations: Mapping[str, str] = field(default_factory=dict)  # undeclared kernels: the plan that fits best
    complete: bool = True  # False: the run was interrupted
    schema: int = SCHEMA

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, records in order of their ids."""
        return {
            "schema": self.schema,
            "complete": self.complete,
            "platform": dict(self.platform),
            "options": dict(self.options),
            "unavailable": dict(self.unavailable),
            "explanations": dict(self.explanations),
            "records": [record.as_dict() for record in sorted(self.records, key=lambda record: record.id)],
            "seconds": {name: self.seconds[name] for name in sorted(self.seconds)},
        }
