"""Comparison of a new run's statements with its own numbers and with the baseline's descriptions."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import CheckRecord, Record, Run
from tiebreak.reports.tables.run import counted

#: Fields that say something in words, or how it is drawn: nothing is decided by them.
WORDS = frozenset(
    {"about", "source", "unclaimed", "label", "group", "figure", "legend", "column"}  # of a description
    | {"wrong", "needed"}  # the same, for verdicts alone
    | {"command", "excused", "skipped", "why"}  # of a record
)
_OF_OUTPUT = frozenset({"heads", "outcome", "verdict", "tied", "shown.kind", "shown.number", "shown.verdict"})
_CLOSE = 1e-4  # as a share: another order of summation changed up to 3e-5 of a mean, between two makes of processor
_NOISE = 1e-6  # what fp32 sums leave of a number that should be 0


def check_described(baseline: Run, run: Run) -> None:
    """Raise UsageError if a run describes something differently from the baseline, or not how it is narrowed."""
    for each in run.narrowing:
        if not each.given or not each.names:
            raise UsageError(f"narrowing: {each.field}: the new run does not say by what it was narrowed, and to what")
    for table in ("measures", "checks", "experiments", "cases", "plans"):
        old, new = getattr(baseline, table), getattr(run, table)
        for name in sorted(old.keys() & new.keys()):
            for field, before, after in differing(old[name], new[name]):
                rule = "the limits and descriptions of a baseline hold; --update-baseline takes the new ones"
                raise UsageError(f"{table}.{name}{field}: {before} in the baseline, {after} in the new run: {rule}")


def damaged(run: Run) -> Iterator[tuple[str, str]]:
    """Yield the records that contradict themselves, and how; what a baseline was narrowed by decides nothing."""
    whole = replace(run, narrowing=())
    yield from ((record.id, text) for record in run.records for text in contradictions(record, whole))


def differing(old: Any, new: Any, at: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield where two records, or parts of them, differ, and both values, but for words; by the names of the first."""
    if isinstance(old, Struct) and isinstance(new, Struct):
        for name in old.__struct_fields__:
            if name not in WORDS:
                yield from differing(getattr(old, name), getattr(new, name, None), f"{at}.{name}")
    elif isinstance(old, Mapping) and isinstance(new, Mapping):
        for name in old:
            yield from differing(old[name], new.get(name), f"{at}.{name}")
    elif isinstance(old, (tuple, list)) and isinstance(new, (tuple, list)) and len(old) == len(new):
        for place, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from differing(before, after, f"{at}[{place}]")
    elif isinstance(old, float) and isinstance(new, (float, int)):
        yield from [] if math.isclose(old, new, rel_tol=_CLOSE, abs_tol=_NOISE) else [(at, old, new)]
    elif old != new:
        yield at, old, new


def contradictions(record: Record, run: Run) -> Iterator[str]:
    """Yield statements of a record that its own numbers and answers, or the current descriptions, contradict."""
    if outside := [narrowing for narrowing in run.narrowing if not narrowing.leaves_in(record)]:
        yield f"the run has it, and left it out by {' '.join(outside[0].given)}"
    if record.id != (named := records.record_id(record.backend, record.kernel, record.case, record.format)):
        yield f"says that it is of {named}"
    if (record.skipped is not None) is not (record.outcome == records.SKIPPED):
        yield f"says {record.outcome}, and why it was skipped: {record.skipped or 'nothing'}"
    comes_to = records.outcome_of(record.answers, [name for name, check in run.checks.items() if check.judges])
    ran = record.outcome != records.SKIPPED or record.answers or record.shown is not None
    if ran and record.outcome != comes_to:
        yield f"says {record.outcome}, and its answers come to {comes_to}"
    yield from _refuted(record, run.checks)
    yield from _of_verdict(record, run)
    shown = record.shown
    if shown is None and record.outcome in records.PASSING:
        yield f"says {record.outcome}, and has no result"
    if (shown is not None) is not bool(record.measures):
        yield f"shows {'something' if shown else 'nothing'}, and has {counted(len(record.measures), 'measure')}"
    elif shown is not None and shown.kind in records.REPLACED:
        nonfinite = [verdict == records.NONFINITE for verdict in (shown.kind, record.verdict)]
        if record.verdict and nonfinite[0] is not nonfinite[1]:
            yield f"shows {shown.kind}, and says {record.verdict}"
    elif shown is not None:
        number = record.number(shown.kind)
        written = 100 * number if number is not None and shown.unit == "%" else number
        if [*differing(shown.number, written)] or record.verdict not in (None, shown.verdict):
            yield f"shows {shown.number} {shown.verdict or ''}, and has {number} {record.verdict or ''}"


def _of_verdict(record: Record, run: Run) -> Iterator[str]:
    """Yield answers that do not fit the verdict; a claim about one has it as its first word."""
    if record.verdict is None:
        return
    if (verdict := records.verdict_of(record, run.measures)) not in (None, record.verdict):
        yield f"says {record.verdict}, and its interval comes to {verdict}"
    claim = record.answers.get(records.CLAIM)
    words = claim.asked.replace(",", " ").split() if claim is not None and claim.passed else []
    if words and words[0] in {*records.VERDICTS} - {record.verdict}:
        yield f"says {record.verdict}, and that a claim passed: {' '.join(words)}"
    if record.verdict != records.BIASED and (record.tied, record.in_training) != (None, None):
        yield f"says {record.verdict}, and where its bias comes from or goes to"


def _refuted(record: Record, checks: Mapping[str, CheckRecord]) -> Iterator[str]:
    """Yield answers that the limits of their checks contradict, as far as these decide.

    A check that was not asked may have been replaced by a claim.
    """
    words = {True: "passed", False: "failed", None: "undecided"}
    for name, check in checks.items():
        answer, comes_to = record.answers.get(name), records.kept(check.limits, record.measures)
        if not check.limits or (check.more and (record.number(records.NONFINITE) or answer is None)):
            continue
        if answer is None:
            is_asked = check.limits[0].measure in record.measures and records.CLAIM not in record.answers
            if is_asked and comes_to is not True:
                yield f"is not asked {name}, and its measures come to {words[comes_to]}"
        elif answer.passed is not comes_to and (answer.passed or not check.more):
            yield f"says that {name} {words[answer.passed]}, and its measures come to {words[comes_to]}"


def same_bits(old: Record, new: Record, baseline: Run) -> Iterator[str]:
    """Yield where two records have the same bits and not the same numbers.

    A digest is of the bits of the first look, so it decides only where there was no other. A backward pass may add up
    in another order each time, so for a case with one only the numbers of O are compared.
    """
    looks = (str(record.heads) == str(baseline.options.get("heads")) for record in (old, new))
    if old.digest != new.digest or old.plan != new.plan or not any(looks):
        return
    kind = baseline.experiments[old.experiment]
    of_output = {f"measures.{name}" for name in (kind.headline, kind.largest, kind.agreement)} | _OF_OUTPUT
    backward = baseline.cases[old.case].backward
    differs = [each for each in differing(old, new) if not backward or ".".join(each[0].split(".")[1:3]) in of_output]
    for field, before, after in differs[:1]:
        more = f", and {len(differs) - 1} more" if differs[1:] else ""
        yield f"the same bits, and {field[1:]} {after}, {before} in the baseline{more}"
