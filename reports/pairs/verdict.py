"""What there is to say of a pair of kernels: an object, from which the command's lines, its tables and JSON are made."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Annotated

from tiebreak.reports.names import first_few
from tiebreak.reports.records.decode import Count, Data, FileData, Schema, Size, one_of
from tiebreak.reports.records.record import BIASED, Estimate
from tiebreak.reports.tables.grids import Grid, Part
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

# What there is to say of two kernels, the worst first. A pair falls with either of the first two.
APART, NOT_TOLD, ROUNDINGS, SAME = "apart", "not told", "two roundings of one thing", "the same bits"
SEVERITIES = (APART, NOT_TOLD, ROUNDINGS, SAME)
A, B = "A", "B"
_SIDES = (A, B)
_WIDTH = 12  # of the names of findings
_NAMED = 6  # cases in a list
SeverityName = Annotated[str, one_of(SEVERITIES)]
LEGEND = (
    "bits: share of elements of O with equal bits. B - A: mean difference in ulps, + away from zero, at 99.9 %; B:"
    " biased, ?: not\nknown yet. rms: of the difference, of what both plans make of it by emulation, and of each side's"
    " error, in ulps. nearer: to the\nexact answer, -: the heads do not tell. dQ dK dV: equal bits, and rms of the"
    " difference as a share of the gradient's own."
)


class SideRecord(Data, frozen=True, omit_defaults=False):
    """One of the two kernels."""

    name: str  # as it was asked for
    backend: str  # where it runs
    plan: str | None  # that it declares, or follows, or the nearest; None: nothing can be told
    known: bool  # whether it follows that plan
    rests_on: str  # what that rests on, in words

    @property
    def line(self) -> str:
        """Its plan in one line."""
        return f"{self.name} on {self.backend}: {self.plan or 'no plan'} ({self.rests_on})"


class PointRecord(Data, frozen=True, omit_defaults=False):
    """One point in which the two plans differ; several where one excludes what another is in A."""

    a: str  # what it is in A, as --plan has it
    b: str  # and in B
    share: float  # of the mean square of the difference, that it takes away in its turn


class GradientRecord(Data, frozen=True, omit_defaults=False):
    """What the two make of one gradient."""

    bits: Size  # share of elements that are equal
    rms: float | None  # of the difference, as a share of that of the exact gradient


class CallRecord(Data, frozen=True, omit_defaults=False):
    """One case, the same inputs through both; what is not known is None."""

    case: str
    severity: SeverityName | None  # None: it was not compared
    why: str  # for that, in words
    wrong: bool = False  # whether a side is another function, or NaN where the other is not
    heads: Count = 0  # that were drawn
    bits: Size | None = None  # share of elements of O that are equal
    difference: Estimate | None = None  # of B less A in ulps, away from zero
    verdict: str | None = None  # on that, as of a bias
    rms: Size | None = None  # of the difference, in ulps
    predicted: Size | None = None  # the same of both plans, emulated
    ratio: float | None = None  # mean square of the difference over what both plans' errors add up to
    errors: tuple[float | None, float | None] = (None, None)  # rms errors of A and of B, in ulps
    nearer: str | None = None  # which of them is nearer to the exact answer; None: the heads do not tell
    gradients: Mapping[str, GradientRecord] = {}  # by name


class InvarianceRecord(Data, frozen=True, omit_defaults=False):
    """One change of a call that leaves a side's bits as they are, or does not; None: it could not be asked."""

    name: str  # of the question
    a: bool | None
    b: bool | None


class PairVerdict(FileData, frozen=True):
    """What `tiebreak pair` says of two kernels."""

    schema: Schema  # version of this layout
    headline: str  # the worst that there is to say, in one line; a word in capitals where `ok` is False
    severity: SeverityName  # of it
    ok: bool  # as the exit code
    sides: tuple[SideRecord, SideRecord]  # A and B
    format: str  # of q, k, v and O
    seed: Count  # of all inputs
    calls: tuple[CallRecord, ...]  # one a case
    separation: tuple[PointRecord, ...] = ()  # the fewest changes of A's plan that make it B's
    invariances: tuple[InvarianceRecord, ...] = ()
    command: str = ""  # runs all of it again

    def __str__(self) -> str:
        """As the command prints it first: the headline, and a line for each finding."""
        return "\n".join([self.headline, *(f"  {name:{_WIDTH}} {text}" for name, text in self._findings())])

    def _findings(self) -> Iterator[tuple[str, str]]:
        yield from ((name, side.line) for name, side in zip(_SIDES, self.sides, strict=True))
        sure = "" if all(side.known for side in self.sides) else " (of the nearest plans: an assumption)"
        for each in self.separation:
            yield "separated by", f"{each.a} in {A}, {each.b} in {B}: {100 * each.share:.0f} % of the difference{sure}"
        for name, names in ((A, self._only(a=True)), (B, self._only(a=False))):
            if names:
                yield f"only {name} is", f"the same to the bit under {', '.join(names)}"
        skipped = sorted((call.why, call.case) for call in self.calls if call.severity is None)
        for why, alike in groupby(skipped, lambda each: each[0]):
            yield "not compared", f"{first_few([case for _, case in alike], _NAMED)}: {why}"

    def _only(self, *, a: bool) -> list[str]:
        """Return what leaves one side's bits alone as they are."""
        return [each.name for each in self.invariances if (each.a, each.b) == (a, not a)]

    def parts(self) -> list[Part]:
        """Return all that the command prints."""
        return [str(self), Grid(_HEADERS, [_row(call) for call in self.calls if call.severity is not None]), LEGEND]


_HEADERS = ("case", "bits", "B - A", "rms", "predicted", "rms error A", "rms error B", "nearer", "dQ dK dV", "verdict")


def difference_text(call: CallRecord) -> str:
    """Return the signed difference of a call, with its interval."""
    difference = call.difference
    if difference is None or difference.mean is None:
        return ""
    return f"{difference.mean:+.3f} +- {difference.half_width or 0.0:.3f} ulp"


def _row(call: CallRecord) -> list[str]:
    mark = {BIASED: " B", "inconclusive": " ?"}.get(call.verdict or "", "")
    gradients = [f"{percent(each.bits)} {_number(each.rms, '.1e')}" for each in call.gradients.values()]
    return [
        call.case,
        percent(call.bits),
        f"{difference_text(call).removesuffix(' ulp')}{mark}",
        *(_number(each, ".3f") for each in (call.rms, call.predicted, *call.errors)),
        call.nearer or "-",
        " / ".join(gradients),
        call.severity or "",
    ]


def _number(number: float | None, spec: str) -> str:
    return "" if number is None else f"{number:{spec}}"


def worst(calls: Sequence[CallRecord]) -> list[CallRecord]:
    """Return the calls of the worst severity, the one that says most first: wrong, then farthest apart."""

    def rank(call: CallRecord) -> tuple[bool, bool, float]:
        return call.wrong, call.verdict == BIASED, abs((call.difference and call.difference.mean) or 0.0)

    severity = min((call.severity for call in calls if call.severity), key=SEVERITIES.index)
    return sorted((call for call in calls if call.severity == severity), key=rank, reverse=True)


def statement(calls: Sequence[CallRecord]) -> tuple[str, str]:
    """Return the severity of all calls, and the sentence that says it."""
    compared = [call for call in calls if call.severity is not None]
    said = worst(compared)
    first, inputs = said[0], counted(len(compared), "input")
    if first.severity in (APART, NOT_TOLD):
        return first.severity, f"{first.severity.upper()} on {len(said)} of {inputs} ({first.case}: {first.why})"
    if first.severity == SAME:
        return SAME, f"{SAME} on {inputs}"
    farthest = max(compared, key=lambda call: call.rms or 0.0)
    detail = f"no bias; rms of the difference up to {farthest.rms or 0.0:.3g} ulp, in {farthest.case}"
    return ROUNDINGS, f"{ROUNDINGS} on {inputs} ({detail})"
