"""The verdict on a pair of kernels: an object from which the command's lines, tables and JSON are made."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated

from tiebreak.reports.files import FileKind
from tiebreak.reports.names import first_few
from tiebreak.reports.page.svg import section
from tiebreak.reports.pairs import log_probabilities
from tiebreak.reports.pairs.log_probabilities import SIDES, A, B, ModelRecord
from tiebreak.reports.records.decode import Count, Data, FileData, Schema, Size, one_of
from tiebreak.reports.records.record import BIASED, FAIL, PASS, UNDECIDED, Estimate
from tiebreak.reports.tables.grids import Grid, Part, html
from tiebreak.reports.tables.run import counted
from tiebreak.reports.tables.texts import percent

# Severities of a pair, the worst first. A pair fails with either of the first two.
APART, ROUNDINGS, SAME = "apart", "two roundings of one thing", "bitwise equal"
SEVERITIES = (APART, UNDECIDED, ROUNDINGS, SAME)
SeverityName = Annotated[str, one_of(SEVERITIES)]
RESULTS = {APART: FAIL, UNDECIDED: UNDECIDED.upper(), ROUNDINGS: PASS, SAME: PASS}  # first word of a verdict
_WIDTH, _NAMED = 12, 6  # of the names of findings; cases in a list
_TOLD = 0.005  # what is 0 % as it is printed is left to the JSON
NORMAL = "normal numbers"  # inputs that are
_HEADERS = ("case", "verdict", "bits", "B - A", "rms", "predicted", "error A", "error B", "nearer", "dQ dK dV")
_MARKS = {BIASED: " *", UNDECIDED: " ?"}  # the usual B is a side here
_SHORT = {ROUNDINGS: "two roundings"}  # of a severity, in a column
_LEGEND = """bits: share of elements of O with equal bits. B - A: mean difference in ulps, + away from zero, at 99.9 %;
*: biased, ?: not known. rms of the difference, predicted by both plans' emulation; error: rms of each side's, in ulps;
nearer: whose is smaller, -: the heads do not tell. dQ dK dV: equal bits, rms of the difference as a share of the
gradient's own. separated by: what makes A's plan B's, change after change, and what each takes away of the mean square
of the difference."""


class SideRecord(Data, frozen=True, omit_defaults=False):
    """One of the two kernels."""

    name: str  # as it was asked for
    backend: str  # where it runs
    plan: str | None  # that it declares, or follows, or the nearest; None: nothing can be told
    known: bool  # whether it follows that plan
    rests_on: str  # what that rests on, in words


class PointRecord(Data, frozen=True, omit_defaults=False):
    """One point in which the two plans differ; several where one excludes what another is in A."""

    a: str  # what it is in A, as --plan has it
    b: str  # and in B
    on: str  # which inputs: those that the headline names, or normal numbers
    share: float  # of the mean square of the difference on these, that it takes away in its turn


class GradientRecord(Data, frozen=True, omit_defaults=False):
    """The comparison of the two kernels' values of one gradient."""

    bits: Size  # share of elements that are equal
    rms: float | None  # of the difference, as a share of that of the exact gradient


class CallRecord(Data, frozen=True, omit_defaults=False):
    """One case, the same inputs through both; None where a value is unknown."""

    case: str  # its name
    severity: SeverityName | None  # None: it was not compared
    why: str  # for that, in words
    wrong: bool = False  # whether a side is another function, or NaN where the other is not
    slips: tuple[str, ...] = ()  # usual mistakes that explain the outputs of a side that is wrong
    heads: Count = 0  # that were drawn
    bits: Size | None = None  # share of elements of O that are equal
    difference: Estimate | None = None  # of B less A in ulps, away from zero
    verdict: str | None = None  # on that, as of a bias
    rms: Size | None = None  # of the difference, in ulps
    predicted: Size | None = None  # the same of both plans, emulated
    errors: tuple[float | None, float | None] = (None, None)  # rms errors of A and of B, in ulps
    biases: tuple[float | None, float | None] = (None, None)  # mean signed errors of A and of B, in ulps
    nearer: str | None = None  # which of them has the smaller rms error; None: the heads do not tell
    gradients: Mapping[str, GradientRecord] = {}  # by name
    plan_bits: tuple[float | None, float | None] = (None, None)  # share of bits of O that the plans of A and B have
    inputs: Mapping[str, Size] = {}  # rms difference of q, k, v of B to A's, as a share, where each has its own
    lse: Estimate | None = None  # of the log-sum-exp of B less A, less that of the exact ones


class PairVerdict(FileData, frozen=True):
    """The verdict of `tiebreak pair` on two kernels."""

    schema: Schema  # version of this layout
    headline: str  # PASS, FAIL or UNDECIDED, the names, and the most serious finding, in one line
    severity: SeverityName  # of it
    ok: bool  # as the exit code
    sides: tuple[SideRecord, SideRecord]  # A and B
    format: str  # of q, k, v and O
    seed: Count  # of all inputs
    calls: tuple[CallRecord, ...]  # one a case
    separation: tuple[PointRecord, ...] = ()  # the fewest changes of A's plan that make it B's
    invariant: Mapping[str, tuple[bool | None, bool | None]] = {}  # changes of a call: whether A and B keep their bits
    model: ModelRecord | None = None  # log-probabilities; None: not asked
    left_out: tuple[str, ...] = ()  # what was not asked since it takes long, and how to ask for it
    command: str = ""  # runs all of it again

    def __str__(self) -> str:
        """Return the first lines that the command prints: the headline, and a line for each finding."""
        return "\n".join([self.headline, *(f"  {name:{_WIDTH}} {text}" for name, text in self._findings())])

    def _findings(self) -> Iterator[tuple[str, str]]:
        for name, side in zip(SIDES, self.sides, strict=True):
            yield name, f"{side.name} on {side.backend}: {side.plan or 'no plan'} ({side.rests_on})"
        sure = "" if all(side.known for side in self.sides) else ", if these were the plans: one is not known"
        for each in (point for point in self.separation if abs(point.share) >= _TOLD):
            yield (
                "separated by",
                f"{each.a} in {A}, {each.b} in {B}: {100 * each.share:.0f} % of the difference on {each.on}{sure}",
            )
        if other := [call for call in self.calls if call.inputs]:
            most = {part: max(call.inputs.get(part, 0.0) for call in other) for part in "qkv"}
            shares = ", ".join(f"{part} {share:.1e}" for part, share in most.items() if share)
            theirs = f"each has its own in {counted(len(other), 'case')}, apart by up to {shares} of {A}'s (rms)"
            yield "inputs", f"{theirs}; what exact attention makes of that is left out"
        if lse := {call.case: call.lse for call in self.calls if call.lse is not None and call.lse.mean is not None}:
            case = max(lse, key=lambda name: abs(lse[name].mean or 0.0))
            yield "log-sum-exp", f"B - A up to {lse[case].mean:+.2e} +- {lse[case].half_width or 0.0:.1e}, in {case}"
        if self.model is not None:
            yield "in nats", "; ".join(map(log_probabilities.in_brief, self.model.formats))
        for name, kept in ((A, (True, False)), (B, (False, True))):
            if names := [question for question, both in self.invariant.items() if both == kept]:
                yield f"only {name}", f"keeps its bits: {', '.join(names)}"
        skipped = [call for call in self.calls if call.severity is None]
        for why in dict.fromkeys(call.why for call in skipped):
            yield "not compared", f"{first_few([call.case for call in skipped if call.why == why], _NAMED)}: {why}"
        yield from (("not asked", text) for text in self.left_out)

    def grid(self) -> Grid:
        """Return the table of all cases that were compared."""
        rows = [_row(call) for call in self.calls if call.severity is not None]
        shown = len(_HEADERS) if any(row[-1] for row in rows) else -1  # perhaps without gradients, the last
        return Grid(_HEADERS[:shown], [row[:shown] for row in rows])

    def parts(self) -> list[Part]:
        """Return all parts that the command prints."""
        model_parts = [] if self.model is None else log_probabilities.parts(self.model)
        return [str(self), self.grid(), _LEGEND, *model_parts]


def _row(call: CallRecord) -> list[str]:
    mean = call.difference or Estimate(None, None)
    apart = "" if mean.mean is None else f"{mean.mean:+.3f} +- {mean.half_width or 0.0:.3f}"
    numbers = ("" if each is None else f"{each:.3f}" for each in (call.rms, call.predicted, *call.errors))
    gradients = (f"{percent(x.bits)} {'NaN' if x.rms is None else f'{x.rms:.1e}'}" for x in call.gradients.values())
    bits, severity = "" if call.bits is None else percent(call.bits), call.severity or ""
    mark = _MARKS.get(call.verdict or "", "")
    return [
        call.case,
        _SHORT.get(severity, severity),
        bits,
        f"{apart}{mark}",
        *numbers,
        call.nearer or "-",
        " / ".join(gradients),
    ]


def headlined(calls: Sequence[CallRecord]) -> CallRecord:
    """Return the call that the headline names: of the worst severity, and of these the plainest, or the farthest.

    For biases it is the largest that is certain.
    """
    compared = [call for call in calls if call.severity is not None]
    severity = min((str(call.severity) for call in compared), key=SEVERITIES.index)
    worst = [call for call in compared if call.severity == severity]
    return max(worst, key=lambda call: (call.wrong, call.slips != (), _certain(call), call.rms or 0.0))


def _bias_of_each(call: CallRecord) -> str:
    """Return how far each is from the exact answer, where a bias between them leaves open which one has it."""
    if call.wrong or call.verdict != BIASED or None in call.biases:
        return ""
    return f"; from the exact answer {A} is {call.biases[0]:+.3f} off, {B} {call.biases[1]:+.3f}"


def _certain(call: CallRecord) -> float:
    """Return how large a bias is at least, in ulps; 0 where there is none."""
    of = call.difference or Estimate(None, None)
    return abs(of.mean or 0.0) - (of.half_width or 0.0) if call.verdict == BIASED else 0.0


def statement(calls: Sequence[CallRecord], model: ModelRecord | None) -> tuple[str, str]:
    """Return the worst severity of all calls, one of which was compared, and the sentence that says it."""
    severities, named = [call.severity for call in calls if call.severity is not None], headlined(calls)
    inputs, severity = counted(len(severities), "input"), str(named.severity)
    if severity in (APART, UNDECIDED):
        worst = severities.count(severity)
        return severity, f"{severity} on {worst} of {inputs} ({named.case}: {named.why}{_bias_of_each(named)})"
    pairs = [each.pair for each in model.formats] if model else []
    if any(each.difference is not None and each.difference.rms is None for each in pairs):
        return UNDECIDED, f"{severity} on {inputs}, and through the model what is NaN or Inf"
    if severity == SAME:
        if any(each.difference is None or each.difference.equal < 1.0 for each in pairs):
            return UNDECIDED, f"{SAME} on {inputs}, and not through the model, which calls otherwise"
        return SAME, f"{SAME} on {inputs}{' and through the model' if pairs else ''}"
    detail = f"no bias; rms of the difference up to {named.rms or 0.0:.3g} ulp, in {named.case}"
    return ROUNDINGS, f"{ROUNDINGS} on {inputs} ({detail})"


def _on_page(files: Mapping[Path, PairVerdict]) -> str:
    parts = []
    for pair in files.values():
        by_position = log_probabilities.figures(pair.model) if pair.model else []
        parts.append(section(by_position, f'<h2 class="pair">A pair</h2>\n{html(pair.parts())}'))
    return "\n".join(parts)


KIND = FileKind(PairVerdict, "a pair", told_by="calls", parts=PairVerdict.parts, grid=PairVerdict.grid, page=_on_page)
