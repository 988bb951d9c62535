"""The gate: whether a run is worse than a baseline. A missing number, a skip or a cell that is gone never passes.

What counts as worse: a verdict or an outcome further from `unbiased` and `held`; a measure worse by more than its
limit, beyond both intervals; a number that is gone; a check that is no longer met or no longer asked; a cell that
vanished, turned into a skip or has another version of its case.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tiebreak.reports.errors import UsageError
from tiebreak.reports.gate.limits import Limits
from tiebreak.reports.records import store
from tiebreak.reports.records.record import (
    CRASHED,
    DRAWN,
    FARTHER,
    FELL,
    HELD,
    IMPLIED,
    INCONCLUSIVE,
    LESS,
    MEASURED,
    MORE,
    PASSING,
    PREDICTION,
    SKIPPED,
    TIMED_OUT,
    VERDICTS,
    Answer,
    Estimate,
    MeasureRecord,
    Narrowing,
    Record,
    Run,
    Value,
    number_of,
    outcome_of,
)
from tiebreak.reports.tables.rerun import runnable
from tiebreak.reports.tables.run import counted

_SEVERITY = {HELD: 0, MEASURED: 0, INCONCLUSIVE: 1, FELL: 2, CRASHED: 3, TIMED_OUT: 3, SKIPPED: 4}
# A baseline is there to see these change.
_SOFTWARE = (
    *("python", "torch", "numpy", "os", "gpu_driver", "cuda", "hip", "cudnn", "triton"),
    *("torch_npu", "cann", "driver", "commit", "wheel"),
)
_CAPACITY = ("cores", "memory_gib")
_ULP = "ulp"  # the unit of measures that say nothing where the sum cancels
_Judgement = tuple[bool, str]  # whether it is worse, and what changed
_FINGERPRINT = "fingerprint"  # follows from platform and software, so a change of it is told, not refused


@dataclass(frozen=True)
class Change:
    """What changed in one cell."""

    record: Record  # of the new run; of the baseline if the cell vanished
    worse: bool  # or for the better
    text: str


@dataclass(frozen=True)
class Outcome:
    """What the gate found."""

    compared: int  # cells that both runs have
    changes: tuple[Change, ...]
    notes: tuple[str, ...]  # what a reader should know; no reason to fall

    @property
    def worse(self) -> list[Change]:
        """What makes the gate fall."""
        return [change for change in self.changes if change.worse]

    @property
    def better(self) -> list[Change]:
        """Improvements."""
        return [change for change in self.changes if not change.worse]

    @property
    def held(self) -> bool:
        """Whether the gate held; with nothing compared it does not."""
        return self.compared > 0 and not self.worse


def check_comparable(baseline: Run, platform: Mapping[str, Any], options: Mapping[str, Any], *, across: bool) -> None:
    """Refuse, before any work, a baseline that tells nothing about a run of a platform with some options.

    Raises:
        UsageError: an interrupted baseline, other inputs, or another platform without `across`; names the field.
    """
    if not baseline.complete:
        raise UsageError("complete: the baseline's run was interrupted; make it again")
    for name in ("seed", "heads"):
        old, new = (str(options_of.get(name)) for options_of in (baseline.options, options))
        if old != new:
            raise UsageError(f"options.{name}: {old} in the baseline, {new} in the new run; run with --{name} {old}")
    kinds = (baseline.platform.keys() | platform.keys()) - {*_SOFTWARE, *_CAPACITY, _FINGERPRINT}
    for name in sorted(kinds):
        old, new = (_plain(described.get(name)) for described in (baseline.platform, platform))
        if old != new and not across:
            raise UsageError(
                f"platform.{name}: {old!r} in the baseline, {new!r} in the new run: a baseline of another platform;"
                " --across compares all but bits and what has no interval"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def gate(baseline: Run, run: Run, limits: Limits, *, across: bool = False) -> Outcome:
    """Compare a run with a baseline, cell by cell.

    Args:
        baseline: what was kept.
        run: what is judged.
        limits: how much worse a cell may get.
        across: compare outcomes, verdicts, answers and estimates alone, as between platforms.

    Raises:
        UsageError: the two can't be compared; see `check_comparable`.
    """
    check_comparable(baseline, run.platform, run.options, across=across)
    described = {**baseline.measures, **run.measures}
    held_to = {name: limits.of(name, measure) for name, measure in described.items() if measure.worse is not None}
    old, new = ({record.id: record for record in each.records} for each in (baseline, run))
    changes: list[Change] = []
    for name in sorted(old.keys() & new.keys()):
        changes += [Change(new[name], *each) for each in _compare(old[name], new[name], held_to, across)]
    gone = [old[name] for name in sorted(old.keys() - new.keys())]
    asked = [record for record in gone if _asked_for(record, run.narrowing)]
    changes += [Change(record, True, "vanished: the new run lacks it") for record in asked]
    fresh = [new[name] for name in sorted(new.keys() - old.keys())]
    changes += [Change(record, True, f"not in the baseline, and {record.outcome}") for record in fresh if record.fails]
    worse = {change.record.id for change in changes if change.worse}
    changes += [Change(record, *each) for name, record in new.items() if name not in worse
                for each in _contradiction(record, run)]  # fmt: skip
    compared = old.keys() & new.keys()
    first = sum(old[name].outcome == SKIPPED != new[name].outcome for name in compared)
    notes = [*_notes(baseline, run, len(fresh) + first, len(gone) - len(asked))]
    notes += [] if compared else ["no cell is in both"]
    changed = sum(old[name].digest != new[name].digest for name in compared)
    if changed:
        notes.append(f"{counted(changed, 'cell')} with other bits than in the baseline")
    return Outcome(len(compared), tuple(changes), tuple(notes))


def _notes(baseline: Run, run: Run, fresh: int, outside: int) -> Iterator[str]:
    for name in _SOFTWARE[:-1]:
        old, new = baseline.platform.get(name), run.platform.get(name)
        if old != new:
            yield f"{name} {old or 'not known'} in the baseline, {new or 'not known'} in the new run"
    before, after = (each.platform.get(_FINGERPRINT, {}) for each in (baseline, run))
    for backend in before.keys() & after.keys():
        for probe in sorted(before[backend].keys() & after[backend].keys()):
            old, new = before[backend][probe], after[backend][probe]
            if old != new:
                yield f"{backend}, {probe}: {old} in the baseline, {new} in the new run"
    if fresh:
        yield f"{counted(fresh, 'cell')} not in the baseline, or skipped there; --update-baseline adds what is new"
    if outside:
        yield f"{counted(outside, 'cell')} of the baseline NOT compared: outside {_words(run.narrowing)}"
    if not run.complete:
        yield "the new run was interrupted"


def _contradiction(record: Record, run: Run) -> Iterator[_Judgement]:
    """A pass whose answers are none: of a file that was edited, or mangled."""
    comes_to = outcome_of(record.answers, [name for name, check in run.checks.items() if check.judges])
    if record.outcome in PASSING and comes_to not in PASSING:
        yield True, f"says {record.outcome}, and its answers come to {comes_to}: was the file edited?"


def _asked_for(record: Record, narrowing: Collection[Narrowing]) -> bool:
    """Whether a run's command line asked for a cell."""
    return all(each.leaves_in(record) for each in narrowing)


def _words(narrowing: Collection[Narrowing]) -> str:
    return " ".join(dict.fromkeys(words for each in narrowing for words in each.given))


def _compare(old: Record, new: Record, held_to: Mapping[str, MeasureRecord], across: bool) -> Iterator[_Judgement]:
    if old.case_version != new.case_version:
        yield True, f"not comparable: version {new.case_version} of the case, not {old.case_version}"
        return
    outcome = list(_outcome(old, new))
    yield from outcome
    if old.outcome == SKIPPED:
        return  # it is as good as new
    if new.shown is None and new.outcome not in PASSING:
        return  # the outcome says it
    reasons = new.reasons if outcome else ()
    for name, asked in old.answers.items():
        answer = new.answers.get(name)
        if answer is None or answer.met is True or answer.why not in reasons:
            yield from _answer(name, asked, answer, replanned=across and old.plan != new.plan)
    # Of another platform's arithmetic, such as subnormals that it flushes, or plan the emulation knows what follows.
    foretold = across and new.met(PREDICTION) is True
    if not foretold:
        yield from _verdict(old.verdict, new.verdict)
    lost = [text for name in old.measures for text in _lost(name, old.measures[name], new.measures.get(name))]
    if lost:
        yield True, f"NaN or missing: {', '.join(lost)}; a number in the baseline"
    # A case without a verdict cancels: its errors in ulps are of any size.
    judged = old.verdict is not None or new.verdict is not None
    for name, measure in held_to.items():
        # What has no interval depends on single bits, which are a platform's own.
        comparable = not across or (not foretold and isinstance(old.measures.get(name), Estimate))
        if measure.portable or (comparable and (judged or measure.unit != _ULP)):
            yield from _measure(name, measure, old, new)


def _lost(name: str, old: Value, new: Value) -> Iterator[str]:
    """The numbers of a measure that the baseline has alone."""
    if number_of(old) is not None and number_of(new) is None:
        yield name
    width = new.half_width if isinstance(new, Estimate) else None
    if isinstance(old, Estimate) and old.half_width is not None and width is None:
        yield f"interval of {name}"


def _outcome(old: Record, new: Record) -> Iterator[_Judgement]:
    if new.outcome == SKIPPED and old.outcome != SKIPPED:
        yield True, f"turned into a skip ({new.skipped}), {old.outcome} in the baseline"
    elif old.outcome == SKIPPED:
        if new.fails:
            yield True, f"{new.outcome}, skipped in the baseline"
    elif _SEVERITY[old.outcome] != _SEVERITY[new.outcome]:
        worse = _SEVERITY[new.outcome] > _SEVERITY[old.outcome]
        why = f": {'; '.join(new.reasons)}" if new.reasons else ""
        yield worse, f"{new.outcome}, {old.outcome} in the baseline{why}"


def _answer(name: str, old: Answer, new: Answer | None, *, replanned: bool) -> Iterator[_Judgement]:
    """A check: no longer asked (None), of other words, or no longer met.

    Args:
        replanned: whether the kernels differ: a vendor's may declare another plan on another platform, a case claims
            other things of another plan, and what is met there is no worse.
    """
    if new is None:
        if name not in IMPLIED:
            yield True, f"{name} no longer asked: {old.asked}, in the baseline"
    elif old.asked != new.asked and old.source is not None and not (replanned and new.met is True):
        yield True, f"{name}: asks {new.asked}, {old.asked} in the baseline"
    elif old.met is True and new.met is not True:
        yield True, f"{name} no longer met: {new.why or new.asked}"
    elif old.met is False and new.met is True:
        yield False, f"{name} is met now: {new.asked}"


def _verdict(old: str | None, new: str | None) -> Iterator[_Judgement]:
    if old == new or old is None:
        return
    worse = new is None or VERDICTS.index(new) > VERDICTS.index(old)
    yield worse, f"verdict {new or 'none'}, {old} in the baseline"


def _measure(name: str, measure: MeasureRecord, old: Record, new: Record) -> Iterator[_Judgement]:
    """Whether a measure got worse, or better, by more than its limits; a number that is missing `_compare` has told."""
    before, after = old.number(name), new.number(name)
    if before is None or after is None or measure.limit is None:
        return
    was, now = _badness(measure, before) / _whole(measure, old), _badness(measure, after) / _whole(measure, new)
    widths = sum(_half_width(record.measures[name]) / _whole(measure, record) for record in (old, new))
    if abs(now - was) - widths > measure.limit and abs(now - was) > measure.share * min(abs(was), abs(now)):
        texts = [_text(record.measures[name]) + _of_whole(measure, record) for record in (new, old)]
        unit = f" {measure.unit}" if measure.unit else ""
        yield now > was, f"{name} {texts[0]}{unit}, {texts[1]} in the baseline"


def _whole(measure: MeasureRecord, record: Record) -> float:
    """What a measure is held as a share of."""
    return (record.number(measure.per) if measure.per else None) or 1.0


def _of_whole(measure: MeasureRecord, record: Record) -> str:
    return f" of {_whole(measure, record):.15g} {measure.per}" if measure.per else ""


def _badness(measure: MeasureRecord, value: float) -> float:
    """A number that is larger where the measure is worse."""
    return {MORE: value, LESS: -value, FARTHER: abs(value)}[measure.worse or MORE]


def _half_width(value: Value) -> float:
    """Of an interval that is not known, Inf: nothing lies beyond it."""
    if not isinstance(value, Estimate):
        return 0.0
    return math.inf if value.half_width is None else value.half_width


def _text(value: Value) -> str:
    if isinstance(value, Estimate):
        return f"{value.mean:+.4f} ±{value.half_width:.4f}"
    return f"{value:.4g}"


def report(outcome: Outcome, baseline: Path) -> str:
    """What the gate found, as text: a line for the whole, then what is worse, what is better, and notes."""
    word = "held" if outcome.held else "FELL"
    lines = [
        f"gate {word}: {counted(outcome.compared, 'cell')} compared with {baseline}:"
        f" {len(outcome.worse)} worse, {len(outcome.better)} better"
    ]
    for name, changes in groupby(outcome.worse, lambda change: change.record.id):
        cell = list(changes)
        lines += [f"worse   {name}: {'; '.join(change.text for change in cell)}"]
        lines += [f"        rerun: {runnable(cell[0].record.command)}"]
    lines += [f"better  {better.record.id}: {better.text}" for better in outcome.better]
    return "\n".join([*lines, *(f"note    {note}" for note in outcome.notes)])


def update(run: Run, path: Path) -> None:
    """Make a run the baseline: what differs from run to run is left out, so that its diff shows what changed.

    Raises:
        UsageError: the run was interrupted, or is narrower than the baseline that it would replace.
        tiebreak.reports.records.store.UnreadableRecordsError: there is a file at `path` that is no file of records.
        tiebreak.reports.records.store.UnwritableFolderError: it can't be written; the old one stays.
    """
    if not run.complete:
        raise UsageError(f"{path}: not updated: the run was interrupted")
    if path.exists():
        check_update(store.read(path), path, run.narrowing)
    store.write(replace(run, records=tuple(map(_compact, run.records)), run=None, seconds={}), path)


def check_update(baseline: Run, path: Path, narrowing: Collection[Narrowing]) -> None:
    """Refuse to replace a baseline by the records of a narrower run.

    Raises:
        UsageError: some of its cells were not asked for.
    """
    outside = [record for record in baseline.records if not _asked_for(record, narrowing)]
    if outside:
        lost = f"{len(outside)} of its cells lie outside this run's {_words(narrowing)}"
        raise UsageError(f"{path}: not updated: {lost}; run all of them, or delete the file to begin anew")


def _compact(record: Record) -> Record:
    """Without what is there to be drawn alone."""
    return replace(record, evidence={name: part for name, part in record.evidence.items() if name not in DRAWN})
