"""The gate: whether a run is worse than a baseline. A missing number, a skip or a cell that is gone never passes.

What counts as worse: a verdict or an outcome further from `unbiased` and `passed`; a measure worse by more than its
limit, beyond both intervals; a number that is gone, or whose interval does not tell; a check that no longer passes or
no longer asked; another declared plan; a cell that vanished, turned into a skip or has other inputs.

The baseline rules: limits and descriptions are its own. What either run says of itself is recomputed where its numbers
tell, and the same bits have to come with the same numbers. What a record says of its excuse counts for nothing here.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.consistency import check_described, contradictions, damaged, same_bits
from tiebreak.reports.gate.expected import PLAN, Expected, Limits
from tiebreak.reports.records import record as records
from tiebreak.reports.records import store
from tiebreak.reports.records.record import Answer, Estimate, MeasureRecord, Narrowing, Record, Run, Value, number_of
from tiebreak.reports.tables.run import counted

_SEVERITY = {
    **dict.fromkeys(records.PASSING, 0),
    records.UNDECIDED: 1,
    records.FAILED: 2,
    **dict.fromkeys((records.CRASHED, records.TIMED_OUT), 3),
}
# A baseline is there to see these change; of all but the wheel it is told.
_TOLD = ("python", "torch", "numpy", "os", "gpu_driver", "cuda", "hip", "cudnn", "triton", "contraction",
         "torch_npu", "cann", "driver", "commit")  # fmt: skip
_ULP = "ulp"  # the unit of measures that say nothing where the sum cancels
_Judgement = tuple[bool, str]  # whether it is worse, and what changed
_FINGERPRINT = "fingerprint"  # follows from platform and software, so a change of it is told, not refused
_INPUTS = ("backend", "kernel", "case", "format", "experiment", "case_version", "seed")  # of a cell: else it is another
_WIDER = 2.0  # times the baseline's: what a cell with the same noise may have that was settled on fewer heads


@dataclass(frozen=True)
class CellChange:
    """A change in one cell."""

    record: Record  # of the new run; of the baseline if the cell vanished
    worse: bool  # or for the better
    text: str


@dataclass(frozen=True)
class Outcome:
    """The result of a gate."""

    compared: int  # cells that both runs have
    changes: tuple[CellChange, ...]
    notes: tuple[str, ...]  # what a reader should know; no reason to fall
    complete: bool = True  # whether the new run came to its end

    @property
    def worse(self) -> list[CellChange]:
        """The changes that make the gate fail."""
        return [change for change in self.changes if change.worse]

    @property
    def better(self) -> list[CellChange]:
        """The improvements."""
        return [change for change in self.changes if not change.worse]

    @property
    def passed(self) -> bool:
        """True if the gate passed; with nothing compared, or for a run that was interrupted, it does not."""
        return self.compared > 0 and self.complete and not self.worse


def check_comparable(baseline: Run, platform: Mapping[str, Any], options: Mapping[str, Any], *, across: bool) -> None:
    """Refuse a baseline that is interrupted, contradicts itself, or is of other inputs or (see `across`) platforms."""
    if not baseline.complete:
        raise UsageError("complete: the baseline's run was interrupted; make it again")
    for name, text in damaged(baseline):
        raise UsageError(f"{name}: {text}: damaged, or edited: make the baseline anew")
    for name in ("seed", "heads"):
        old, new = (str(options_of.get(name)) for options_of in (baseline.options, options))
        if old != new:
            raise UsageError(f"options.{name}: {old} in the baseline, {new} in the new run; run with --{name} {old}")
    kinds = (baseline.platform.keys() | platform.keys()) - {*_TOLD, "wheel", "cores", "memory_gib", _FINGERPRINT}
    for name in sorted(kinds) if not across else ():
        before, after = (msgspec.to_builtins(each.get(name)) for each in (baseline.platform, platform))
        if before != after:
            advice = "a baseline of another platform; --across compares all but bits and what has no interval"
            raise UsageError(f"platform.{name}: {before!r} in the baseline, {after!r} in the new run: {advice}")


def gate(
    baseline: Run, run: Run, limits: Limits, *, across: bool = False, expected: Sequence[Expected] = ()
) -> Outcome:
    """Compare a run with a baseline, cell by cell; raise UsageError where the two can't be compared.

    `across` compares only outcomes, verdicts, answers and estimates, as between platforms. Expected entries accept
    another declared plan; one that accepts a plan which no cell declares is a UsageError, too.
    """
    check_comparable(baseline, run.platform, run.options, across=across)
    check_described(baseline, run)
    described = replace(run, measures={**run.measures, **baseline.measures}, checks={**run.checks, **baseline.checks})
    worsening = {name: measure for name, measure in described.measures.items() if measure.worse is not None}
    held_to = {name: limits.held_to(name, measure) for name, measure in worsening.items()}
    of_biased = {name for name, measure in described.measures.items() if measure.of_biased}
    old, new = ({record.id: record for record in each.records} for each in (baseline, run))
    pairs = [(old[name], new[name]) for name in sorted(old.keys() & new.keys())]
    changes: list[CellChange] = []
    for before, after in pairs:
        findings = list(_compare(before, after, held_to, of_biased, across))
        if not any(worse for worse, _ in findings):
            findings += [(True, text) for text in same_bits(before, after, baseline)]
        changes += [CellChange(after, *finding) for finding in findings]
    plans, notes = _plans(pairs, expected, across=across)
    changes += plans
    gone = [old[name] for name in sorted(old.keys() - new.keys())]
    missing = [record for record in gone if all(narrowing.leaves_in(record) for narrowing in run.narrowing)]
    changes += [CellChange(record, True, "vanished: the new run lacks it") for record in missing]
    fresh = [new[name] for name in sorted(new.keys() - old.keys())]
    changes += [CellChange(record, True, f"not in the baseline, and {record.outcome}")
                for record in fresh if _SEVERITY.get(record.outcome)]  # fmt: skip
    worse = {change.record.id for change in changes if change.worse}
    changes += [CellChange(record, True, f"{text}: was the file edited?") for name, record in new.items()
                if name not in worse for text in contradictions(record, described)]  # fmt: skip
    notes += _other_software(baseline, run)
    if first := len(fresh) + sum(before.outcome == records.SKIPPED != after.outcome for before, after in pairs):
        advice = "not in the baseline, or skipped there; --update-baseline adds what is new"
        notes.append(f"{counted(first, 'cell')} {advice}")
    if outside := len(gone) - len(missing):
        notes.append(f"{counted(outside, 'cell')} of the baseline NOT compared: outside {_options(run.narrowing)}")
    if not run.ended:
        notes.append("the new run was interrupted: it does not hold")
    if not pairs:
        notes.append("no cell is in both")
    if changed := sum(before.digest != after.digest for before, after in pairs):
        notes.append(f"{counted(changed, 'cell')} with other bits than in the baseline")
    return Outcome(len(pairs), tuple(changes), tuple(notes), run.ended)


def _plans(
    pairs: Sequence[tuple[Record, Record]], expected: Sequence[Expected], *, across: bool
) -> tuple[list[CellChange], list[str]]:
    """Return cells whose kernel declares another plan than it did, and what to note of those that are accepted.

    Across platforms the bias counts: another plan is worse where it is biased, or where that is not known.
    """
    skipped = records.SKIPPED
    changed = [(old, new) for old, new in pairs if old.plan != new.plan and not old.outcome == skipped != new.outcome]
    entries = [entry for entry in expected if entry.check == PLAN]
    for entry in entries:
        if any(entry.concerns(new.id) for _, new in pairs) and not any(entry.concerns(new.id) for _, new in changed):
            raise UsageError(f"{entry.where}: no plan of {entry.cells} has changed: remove the entry")
    worse: list[CellChange] = []
    notes = Counter[str]()
    for old, new in changed:
        text = f"declares {new.plan or 'no plan'}, {old.plan or 'no plan'} in the baseline"
        accepted = next((entry.reason for entry in entries if entry.concerns(new.id)), None)
        if accepted is None and not (across and new.verdict in (records.UNBIASED, None)):
            worse.append(CellChange(new, True, text))
        else:
            notes[f"{new.backend}-{new.kernel} {text}" + (f": accepted: {accepted}" if accepted else "")] += 1
    return worse, [f"{note} ({counted(number, 'cell')})" for note, number in notes.items()]


def _other_software(baseline: Run, run: Run) -> Iterator[str]:
    there = [each.platform.get(_FINGERPRINT, {}) for each in (baseline, run)]
    probes = [(backend, probe) for backend in there[0].keys() & there[1].keys()
              for probe in sorted(there[0][backend].keys() & there[1][backend].keys())]  # fmt: skip
    described = [(name, *(each.platform.get(name) or "not known" for each in (baseline, run))) for name in _TOLD]
    described += [(f"{backend}, {probe}:", *(each[backend][probe] for each in there)) for backend, probe in probes]
    yield from (f"{name} {old} in the baseline, {new} in the new run" for name, old, new in described if old != new)


def _options(narrowing: Collection[Narrowing]) -> str:
    return " ".join(dict.fromkeys(words for each in narrowing for words in each.given))


def _compare(
    old: Record, new: Record, held_to: Mapping[str, MeasureRecord], of_biased: Collection[str], across: bool
) -> Iterator[_Judgement]:
    """Yield the changes of one cell, and whether each makes it worse."""
    if other := list(_other_inputs(old, new)):
        yield True, f"not comparable: {', '.join(other)}"
        return
    outcome = _outcome(old, new)
    yield from outcome
    if old.outcome == records.SKIPPED or (new.shown is None and new.outcome not in records.PASSING):
        return  # it is as good as new, or the outcome says it
    reasons = new.reasons if outcome else ()
    for name, before in old.answers.items():
        answer = new.answers.get(name)
        if answer is None or answer.passed is True or answer.why not in reasons:
            yield from _answer(name, before, answer, replanned=across and old.plan != new.plan)
    # Of another platform's arithmetic, such as subnormals that it flushes, or plan the emulation knows what follows.
    predicted = all(each.passed(records.PREDICTION) is True for each in (old, new))
    foretold = across and old.plan == new.plan and predicted
    yield from _verdicts(old, new, foretold=foretold)
    if lost := [name for name in _lost(old, new) if not (_is_mended(old, new) and name in of_biased)]:
        yield True, f"NaN or missing: {', '.join(lost)}; a number in the baseline"
    # A case without a verdict cancels: its errors in ulps are of any size.
    judged = old.verdict is not None or new.verdict is not None
    for name, measure in held_to.items():
        # A measure without an interval depends on single bits, which differ between platforms.
        comparable = not across or isinstance(old.measures.get(name), Estimate)
        if measure.portable or (comparable and (judged or measure.unit != _ULP)):
            yield from _measure(name, measure, old, new, foretold=foretold and not measure.portable)


def _other_inputs(old: Record, new: Record) -> Iterator[str]:
    for field in _INPUTS:
        before, after = getattr(old, field), getattr(new, field)
        if before != after:
            yield f"{field} {after}, {before} in the baseline"
    few, many = sorted((old.heads, new.heads))
    drawn = few and many % few == 0 and (many // few).bit_count() == 1  # a look draws as many again
    if few != many and not drawn and old.shown is not None and new.shown is not None:
        yield f"{new.heads} heads, {old.heads} in the baseline"


def _is_mended(old: Record, new: Record) -> bool:
    """Return whether a bias is gone."""
    return old.verdict == records.BIASED and new.verdict in (records.UNBIASED, records.UNDECIDED)


def _lost(old: Record, new: Record) -> Iterator[str]:
    """Yield the measures, and intervals, that the baseline has alone."""
    yield from (name for name in old.measures if name not in new.measures)
    for name, value in new.measures.items():
        before = old.measures.get(name)
        if number_of(before) is not None and number_of(value) is None:
            yield name
        width = value.half_width if isinstance(value, Estimate) else None
        if isinstance(before, Estimate) and before.half_width is not None and width is None:
            yield f"interval of {name}"


def _outcome(old: Record, new: Record) -> list[_Judgement]:
    if old.outcome == records.SKIPPED:
        return [(True, f"{new.outcome}, skipped in the baseline")] if _SEVERITY.get(new.outcome) else []
    if new.outcome == records.SKIPPED:
        return [(True, f"turned into a skip ({new.skipped}), {old.outcome} in the baseline")]
    worse = _SEVERITY[new.outcome] - _SEVERITY[old.outcome]
    why = f": {'; '.join(new.reasons)}" if new.reasons else ""
    return [(worse > 0, f"{new.outcome}, {old.outcome} in the baseline{why}")] if worse else []


def _answer(name: str, old: Answer, new: Answer | None, *, replanned: bool) -> Iterator[_Judgement]:
    """Judge a check that is no longer asked (None), of other words, or no longer passed.

    If a kernel declares another plan on another platform (`replanned`), a check that passed there is no worse.
    """
    if new is None:
        if name not in records.IMPLIED:
            yield True, f"{name} no longer asked: {old.asked}, in the baseline"
    elif old.asked != new.asked and old.source is not None and not (replanned and new.passed is True):
        yield True, f"{name}: asks {new.asked}, {old.asked} in the baseline"
    elif old.passed is True and new.passed is not True:
        yield True, f"{name} no longer passed: {new.why or new.asked}"
    elif old.passed is False and new.passed is True:
        yield False, f"{name} passes now: {new.asked}"


def _verdicts(old: Record, new: Record, *, foretold: bool) -> Iterator[_Judgement]:
    """Judge the verdicts on the bias, and on whether gradients contain it; of foretold ones only that there is one."""
    measured = old.shown is not None and new.in_training is not None
    contained = old.in_training or (records.UNBIASED if measured else None)
    for what, before, after in (("", old.verdict, new.verdict), ("in training ", contained, new.in_training)):
        if what and after is None and _is_mended(old, new):
            continue  # gradients can contain no bias that is gone
        if before is not None and before != after and not (foretold and after is not None):
            worse = after is None or records.VERDICTS.index(after) > records.VERDICTS.index(before)
            yield worse, f"{what}verdict {after or 'none'}, {before} in the baseline"
    kinds = [record.shown.kind for record in (old, new) if record.shown is not None]
    if not foretold and len(set(kinds)) > 1 and kinds[1] in records.REPLACED:
        yield True, f"shows {kinds[1]}, {kinds[0]} in the baseline"


def _measure(name: str, measure: MeasureRecord, old: Record, new: Record, *, foretold: bool) -> Iterator[_Judgement]:
    """Return whether a measure got worse, or better, by more than its limits; of a missing number `_compare` tells."""
    if old.number(name) is None or new.number(name) is None or measure.limit is None:
        return
    (was, narrow, before), (now, wide, after) = (_badness(name, measure, record) for record in (old, new))
    if math.inf > wide > max(measure.limit, _WIDER * narrow):
        yield True, f"{name} {_text(new.measures[name])} undecided, {_text(old.measures[name])} in the baseline"
    by, share = abs(now - was), measure.share * min(abs(was), abs(now))
    if not foretold and by - narrow - wide > measure.limit and by > share:
        unit = f" {measure.unit}" if measure.unit else ""
        yield now > was, f"{name} {after}{unit}, {before} in the baseline"


def _badness(name: str, measure: MeasureRecord, record: Record) -> tuple[float, float, str]:
    """Return a number that is larger where a measure is worse, the half width of its interval, and its text.

    Both are shares, if the measure is limited as one. Nothing is beyond an interval that is not known.
    """
    value, number = record.measures[name], record.number(name) or 0.0
    whole = (record.number(measure.per) if measure.per else None) or 1.0
    badness = {records.MORE: number, records.LESS: -number, records.FARTHER: abs(number)}[measure.worse or records.MORE]
    width = value.half_width if isinstance(value, Estimate) else 0.0
    of = f" of {whole:.15g} {measure.per}" if measure.per else ""
    return badness / whole, math.inf if width is None else width / whole, f"{_text(value)}{of}"


def _text(value: Value) -> str:
    if isinstance(value, Estimate):
        width = "not known" if value.half_width is None else f"{value.half_width:.4f}"
        return f"{value.mean:+.4f} ±{width}"
    return f"{value:.4g}"


def update(run: Run, path: Path) -> None:
    """Make a run the baseline: what differs from run to run is left out, so that its diff shows what changed.

    Raises UsageError: the run was interrupted, or is narrower than the baseline that it would replace.
    """
    if not run.complete:
        raise UsageError(f"{path}: not updated: the run was interrupted")
    for name, text in damaged(run):
        raise UsageError(f"{path}: not updated: {name}: {text}: was the file edited?")
    if path.exists():
        check_update(store.read(path), path, run.narrowing)
    kept = (
        {name: part for name, part in each.evidence.items() if name not in records.OF_A_RUN} for each in run.records
    )
    compact = tuple(replace(record, evidence=part) for record, part in zip(run.records, kept, strict=True))
    store.write(replace(run, records=compact, run=None, seconds={}), path)


def check_kept(path: Path) -> None:
    """Raise UsageError if there is no baseline yet."""
    if not path.exists():
        raise UsageError(f"{path}: no such file; with --update-baseline the run makes it")


def check_update(baseline: Run, path: Path, narrowing: Collection[Narrowing]) -> None:
    """Raise UsageError if some cells of a baseline lie outside the narrower run that would replace it."""
    outside = [record for record in baseline.records if not all(each.leaves_in(record) for each in narrowing)]
    if outside:
        lost = f"{len(outside)} of its cells lie outside this run's {_options(narrowing)}"
        raise UsageError(f"{path}: not updated: {lost}; run all of them, or delete the file to begin anew")
