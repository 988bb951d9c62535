"""The gate: whether a run is worse than a baseline. A missing number, a skip or a cell that is gone never passes.

What counts as worse: a verdict or an outcome further from `unbiased` and `held`; |bias| larger by more than a limit,
beyond both intervals; a largest error larger by more than a limit and a share; bits that no longer repeat; a NaN or Inf
that was not there; a claim or prediction that is no longer met or no longer made; a cell that vanished, turned into a
skip or has another version of its case.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from tiebreak.reports import store
from tiebreak.reports.errors import UsageError
from tiebreak.reports.limits import Limits
from tiebreak.reports.names import matching, split
from tiebreak.reports.records import (
    CRASHED,
    FELL,
    HELD,
    INCONCLUSIVE,
    PASSING,
    SKIPPED,
    TIMED_OUT,
    VERDICTS,
    Estimate,
    MeasuresRecord,
    Record,
    Run,
    TrainingRecord,
)
from tiebreak.reports.tables import counted

_SEVERITY = {HELD: 0, INCONCLUSIVE: 1, FELL: 2, CRASHED: 3, TIMED_OUT: 3, SKIPPED: 4}
# A baseline is there to see these change.
_SOFTWARE = (
    *("python", "torch", "numpy", "os", "gpu_driver", "cuda", "hip", "cudnn", "triton"),
    *("torch_npu", "cann", "driver", "commit"),
)
_CAPACITY = ("cores", "memory_gib")
_FINGERPRINT = "fingerprint"  # follows from platform and software, so a change of it is told, not refused
_NARROWING = {"backend": "backend", "kernels": "kernel", "cases": "case", "dtype": "format"}  # option: field


@dataclass(frozen=True)
class Change:
    """What changed in one cell, for the worse or for the better."""

    worse: bool
    text: str


@dataclass(frozen=True)
class CellChange:
    """A change with its cell."""

    record: Record  # of the new run; of the baseline if the cell vanished
    change: Change


@dataclass(frozen=True)
class Outcome:
    """What the gate found."""

    compared: int  # cells that both runs have
    changes: tuple[CellChange, ...]
    notes: tuple[str, ...]  # what a reader should know; no reason to fall

    @property
    def worse(self) -> list[CellChange]:
        """What makes the gate fall."""
        return [found for found in self.changes if found.change.worse]

    @property
    def better(self) -> list[CellChange]:
        """Improvements."""
        return [found for found in self.changes if not found.change.worse]

    @property
    def held(self) -> bool:
        """Whether the gate held; with nothing compared it does not."""
        return self.compared > 0 and not self.worse


def check_comparable(baseline: Run, platform: Mapping[str, Any], options: Mapping[str, Any], *, across: bool) -> None:
    """Refuse, before any work, a baseline that tells nothing about a run.

    Args:
        baseline: the baseline.
        platform: of the new run.
        options: of the new run's command line.
        across: whether a baseline of another platform will do.

    Raises:
        UsageError: an interrupted baseline, other inputs, or another platform without `across`; names the field.
    """
    if not baseline.complete:
        raise UsageError("complete: the baseline's run was interrupted; make it again")
    for name in ("seed", "heads"):
        old, new = (str(found.get(name)) for found in (baseline.options, options))
        if old != new:
            raise UsageError(f"options.{name}: {old} in the baseline, {new} in the new run; run with --{name} {old}")
    kinds = (baseline.platform.keys() | platform.keys()) - {*_SOFTWARE, *_CAPACITY, _FINGERPRINT}
    for name in sorted(kinds):
        old, new = (_plain(found.get(name)) for found in (baseline.platform, platform))
        if old != new and not across:
            raise UsageError(
                f"platform.{name}: {old!r} in the baseline, {new!r} in the new run: a baseline of another platform;"
                " --across compares claims alone"
            )


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def gate(baseline: Run, run: Run, limits: Limits, *, across: bool = False) -> Outcome:
    """Compare a run with a baseline, cell by cell.

    Args:
        baseline: what was kept.
        run: what is judged.
        limits: how much worse a cell may get.
        across: compare claims alone, as between platforms.

    Returns:
        What changed.

    Raises:
        UsageError: the two can't be compared; see `check_comparable`.
    """
    check_comparable(baseline, run.platform, run.options, across=across)
    old, new = ({record.id: record for record in found.records} for found in (baseline, run))
    changes: list[CellChange] = []
    for name in sorted(old.keys() & new.keys()):
        changes += [CellChange(new[name], change) for change in _compare(old[name], new[name], limits, across)]
    gone = [old[name] for name in sorted(old.keys() - new.keys())]
    outside = [record for record in gone if not _selected(record, run.options)]
    changes += [CellChange(record, Change(True, "vanished: the new run lacks it")) for record in gone
                if _selected(record, run.options)]  # fmt: skip
    fresh = [new[name] for name in sorted(new.keys() - old.keys())]
    changes += [CellChange(record, Change(True, f"not in the baseline, and {record.outcome}")) for record in fresh
                if record.outcome not in (*PASSING, SKIPPED)]  # fmt: skip
    compared = old.keys() & new.keys()
    notes = [*_notes(baseline, run, len(fresh), len(outside)), *([] if compared else ["no cell is in both"])]
    changed = sum(old[name].digest != new[name].digest for name in compared)
    if changed:
        notes.append(f"{counted(changed, 'cell')} with other bits than in the baseline")
    return Outcome(len(compared), tuple(changes), tuple(notes))


def _notes(baseline: Run, run: Run, fresh: int, outside: int) -> Iterator[str]:
    for name in _SOFTWARE[:-1]:
        old, new = baseline.platform.get(name), run.platform.get(name)
        if old != new:
            yield f"{name} {old} in the baseline, {new} in the new run"
    before, after = (found.platform.get(_FINGERPRINT, {}) for found in (baseline, run))
    for backend in before.keys() & after.keys():
        for probe in sorted(before[backend].keys() & after[backend].keys()):
            old, new = before[backend][probe], after[backend][probe]
            if old != new:
                yield f"{backend}, {probe}: {old} in the baseline, {new} in the new run"
    if fresh:
        yield f"{counted(fresh, 'cell')} not in the baseline; --update-baseline adds what is new"
    if outside:
        names = [f"--{name} {run.options[name]}" for name in (*_NARROWING, "captured") if run.options.get(name)]
        yield f"{counted(outside, 'cell')} of the baseline NOT compared: outside {' '.join(names)}"
    if not run.complete:
        yield "the new run was interrupted"


def _selected(record: Record, options: Mapping[str, Any]) -> bool:
    """Whether the new run's command line asked for a cell; captured tensors run alone unless cases are named."""
    if options.get("captured") and not options.get("cases") and not record.case.startswith("captured["):
        return False
    return all(
        any(matching(name, [getattr(record, field)]) for name in split(str(options[option])))
        for option, field in _NARROWING.items()
        if options.get(option)
    )


def _compare(old: Record, new: Record, limits: Limits, across: bool) -> Iterator[Change]:
    if old.case_version != new.case_version:
        yield Change(True, f"not comparable: version {new.case_version} of the case, not {old.case_version}")
        return
    yield from _outcome(old, new)
    yield from _promises(old, new, across)
    if old.training is not None and new.training is not None:
        yield from _trained(old.training, new.training)
    if old.measures is not None and new.measures is not None:
        yield from _finite(old.measures, new.measures)
        yield from _repeatable(old.measures, new.measures)
        if not across:
            yield from _verdict(old.verdict, new.verdict)
        # A case without a verdict cancels: its errors in ulps are of any size.
        if not across and (old.verdict or new.verdict):
            yield from _bias(old.measures.bias, new.measures.bias, limits)
            yield from _largest(old.measures.max_ulps, new.measures.max_ulps, limits)


def _outcome(old: Record, new: Record) -> Iterator[Change]:
    if new.outcome == SKIPPED and old.outcome != SKIPPED:
        yield Change(True, f"turned into a skip ({'; '.join(new.reasons)}), {old.outcome} in the baseline")
    elif old.outcome == SKIPPED and new.outcome not in (HELD, SKIPPED):
        yield Change(True, f"{new.outcome}, skipped in the baseline")
    elif _SEVERITY[old.outcome] != _SEVERITY[new.outcome]:
        worse = _SEVERITY[new.outcome] > _SEVERITY[old.outcome]
        why = f": {'; '.join(new.reasons)}" if new.reasons else ""
        yield Change(worse, f"{new.outcome}, {old.outcome} in the baseline{why}")


def _promises(old: Record, new: Record, across: bool) -> Iterator[Change]:
    """Claim and prediction: no longer made, or no longer met."""
    if new.measures is None and new.training is None:
        return  # the outcome says it
    # A vendor's kernel may declare another plan on another platform, and a case claims other things of another plan.
    excused = across and old.plan != new.plan and new.claim is not None and new.claim.met is True
    if old.claim and (new.claim is None or new.claim.expectation != old.claim.expectation) and not excused:
        made = new.claim.expectation if new.claim else "nothing"
        yield Change(True, f"claims {made}, {old.claim.expectation} in the baseline")
    elif old.claim and new.claim and old.claim.met is True and new.claim.met is not True:
        yield Change(True, f"the claim {new.claim.expectation} is no longer met")
    if old.prediction and new.prediction is None:
        yield Change(True, f"no longer held to the prediction of {old.prediction.plan}")
    elif old.prediction and new.prediction and old.prediction.met is True and new.prediction.met is not True:
        yield Change(True, f"the prediction of {new.prediction.plan} is no longer met")


def _trained(old: TrainingRecord, new: TrainingRecord) -> Iterator[Change]:
    lost = [name for name, value in old.measures.items() if value is not None and new.measures.get(name) is None]
    if lost:
        yield Change(True, f"NaN or missing: {', '.join(lost)}; a number in the baseline")


def _finite(old: MeasuresRecord, new: MeasuresRecord) -> Iterator[Change]:
    if new.nonfinite and (not old.nonfinite or new.nonfinite * old.elements > old.nonfinite * new.elements):
        yield Change(True, f"{new.nonfinite} of {new.elements} elements NaN or Inf, {old.nonfinite} in the baseline")
    elif old.nonfinite and not new.nonfinite:
        yield Change(False, f"no element is NaN or Inf, {old.nonfinite} in the baseline")
    before, after = _numbers(old), _numbers(new)
    lost = [name for name, value in before.items() if value is not None and after.get(name) is None]
    if lost:
        yield Change(True, f"NaN or missing: {', '.join(lost)}; a number in the baseline")


def _numbers(measures: MeasuresRecord) -> dict[str, float | None]:
    return {
        "bias": measures.bias.mean,
        "interval of bias": measures.bias.half_width,
        "rms_ulps": measures.rms_ulps,
        "max_ulps": measures.max_ulps,
        "error_over_bound": measures.error_over_bound,
        "gain": measures.gain,
        "delta_bias": measures.delta_bias.mean,
        **measures.gradients,
    }


def _repeatable(old: MeasuresRecord, new: MeasuresRecord) -> Iterator[Change]:
    if new.repeatable is not True and old.repeatable is True:
        yield Change(True, "two runs on the same input no longer give the same bits")
    elif new.repeatable is False and old.repeatable is None:
        yield Change(True, "two runs on the same input give different bits; not known in the baseline")
    elif new.repeatable is True and old.repeatable is False:
        yield Change(False, "two runs on the same input now give the same bits")


def _verdict(old: str | None, new: str | None) -> Iterator[Change]:
    if old == new or old is None:
        return
    worse = new is None or VERDICTS.index(new) > VERDICTS.index(old)
    yield Change(worse, f"verdict {new or 'none'}, {old} in the baseline")


def _bias(old: Estimate, new: Estimate, limits: Limits) -> Iterator[Change]:
    """The gap between the intervals of |bias|; where a number is missing, `_finite` has said so."""
    if old.mean is None or old.half_width is None or new.mean is None or new.half_width is None:
        return
    apart = abs(abs(new.mean) - abs(old.mean)) - old.half_width - new.half_width
    if apart > limits.bias:
        text = f"bias {_estimate(new)} ulp, {_estimate(old)} in the baseline"
        yield Change(abs(new.mean) > abs(old.mean), text)


def _estimate(found: Estimate) -> str:
    return f"{found.mean:+.4f} ±{found.half_width:.4f}"


def _largest(old: float | None, new: float | None, limits: Limits) -> Iterator[Change]:
    if old is None or new is None:
        return
    low, high = min(old, new), max(old, new)
    if high - low > limits.max and high - low > limits.share * low:
        yield Change(new > old, f"largest error {new:.4g} ulp, {old:.4g} in the baseline")


def report(outcome: Outcome, baseline: Path) -> str:
    """What the gate found, as text: a line for the whole, then what is worse, what is better, and notes."""
    word = "held" if outcome.held else "FELL"
    lines = [
        f"gate {word}: {counted(outcome.compared, 'cell')} compared with {baseline}:"
        f" {len(outcome.worse)} worse, {len(outcome.better)} better"
    ]
    for name, found in groupby(outcome.worse, lambda change: change.record.id):
        cell = list(found)
        lines += [f"worse   {name}: {'; '.join(one.change.text for one in cell)}"]
        lines += [f"        rerun: {cell[0].record.command}"]
    lines += [f"better  {found.record.id}: {found.change.text}" for found in outcome.better]
    return "\n".join([*lines, *(f"note    {note}" for note in outcome.notes)])


def update(run: Run, path: Path) -> None:
    """Make a run the baseline: what differs from run to run is left out, so that its diff shows what changed.

    Raises:
        UsageError: the run was interrupted, or is narrower than the baseline that it would replace.
        tiebreak.reports.store.UnreadableRecordsError: there is a file at `path` that is no file of records.
        tiebreak.reports.store.UnwritableFolderError: it can't be written; the old one stays.
    """
    if not run.complete:
        raise UsageError(f"{path}: not updated: the run was interrupted")
    if path.exists():
        outside = [record for record in store.read(path).records if not _selected(record, run.options)]
        if outside:
            raise UsageError(f"{path}: not updated: {len(outside)} of its cells lie outside this run's options")
    store.write(replace(run, records=tuple(map(_compact, run.records)), run=None, seconds={}), path)


def _compact(record: Record) -> Record:
    """Without what is there to be drawn alone."""
    training = record.training and replace(record.training, steps=(), series={})
    return replace(record, trace=None, histogram=None, training=training)
