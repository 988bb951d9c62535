"""The result of an experiment: measures, claims, predictions and evidence, which checks read."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tiebreak.cases.verdicts import MARGIN_ULPS, Interval, Value, heads_to_tell
from tiebreak.kernels.kernel import Declaration
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Answer, Estimate, Shown

Off = tuple[str, float | None]


@dataclass(frozen=True)
class Claimed:
    """A claim about such a kernel: the case's, or what its declared plan predicts on the same inputs."""

    asked: str  # what is expected
    source: str  # who claims it; of a prediction nobody
    passed: bool | None  # None: the data do not tell
    measured: str  # what was measured, in words
    waives: frozenset[str] = frozenset()  # checks that need not pass: it claims that they fail


@dataclass(frozen=True)
class HeldTo:
    """The plan whose errors those of O may not exceed."""

    plan: str  # as reports name it
    declaration: Declaration
    refused: str | None = None  # the plan that it follows, and that is accepted only where it is declared


@dataclass(frozen=True)
class Result:
    """The measures, answers and evidence of an experiment's run."""

    measures: Mapping[str, Value]  # by name, as the kind of experiment describes them
    shown: Shown  # what tables show
    verdict: str | None = None  # on the bias, where that says anything
    tied: bool | None = None  # where it is biased: whether because O itself ties; None: not looked at
    in_training: str | None = None  # a verdict: whether gradients, or a training run, contain a bias; None: unknown
    claims: tuple[Claimed, ...] = ()  # those that speak of the kernel
    prediction: Claimed | None = None  # None: none is made
    answers: Mapping[str, Answer] = field(default_factory=dict)  # that the experiment itself gives, by the check asked
    backward_error: str | None = None  # what a backward pass did wrong, in one line: raised ...
    backward_raised: Exception | None = None  # by it, if it did
    held_to: HeldTo | None = None  # what the errors of O are compared with; None: no such comparison
    backward_held_to: str | None = None  # the backward pass that those of dQ, dK and dV are compared with; None: none
    external: bool = False  # whether the kernel is a user's
    bound_of: str | None = None  # name of the plan whose bounds the errors are shares of
    heads: int = 0  # that were drawn
    gradient_heads: int = 0  # of them: on which gradients were measured
    obstacle: str = ""  # why no more heads can be drawn where the data do not tell, and what to do; empty: they can
    digest: str | None = None  # of what was computed
    #: In words what O, or a gradient, would be off by if it were wrong, and that share of the reference; None: a NaN.
    off: Callable[[bool], Off | None] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)  # for records: see tiebreak.reports.records.record

    @cached_property
    def recorded(self) -> Mapping[str, records.Value]:
        """The measures as records have them."""
        return recorded(self.measures)

    def number(self, name: str) -> float | None:
        """Return the number of a measure, of an interval its mean; None where there is none."""
        value = self.measures.get(name)
        return value.mean if isinstance(value, Interval) else value

    def remedy(self, measure: str = "bias", limit: float = MARGIN_ULPS) -> str:
        """Return the advice where the heads do not settle on which side of a limit a measure is."""
        value = self.measures.get(measure)
        if self.obstacle or not isinstance(value, Interval):
            return self.obstacle or "more heads would do"
        heads = self.gradient_heads if measure.startswith("d") else self.heads
        return f"--heads {heads_to_tell(value, heads, limit)} would do, about"

    def is_waived(self, check: str) -> bool:
        """Return whether a claim replaces a check: that it fails is what is expected."""
        return any(check in claim.waives for claim in self.claims)


def recorded(measures: Mapping[str, Value]) -> Mapping[str, records.Value]:
    """Return measures as records have them: those that there are, None for NaN and Inf."""
    there = {name: value for name, value in measures.items() if value is not None}
    return {
        name: Estimate.of(value.mean, value.half_width) if isinstance(value, Interval) else records.finite(value)
        for name, value in there.items()
    }
