"""A call compared with itself, in words."""

from collections.abc import Mapping

from tiebreak.reports.records.record import BIASED, UNBIASED, VERDICTS, ChangeRecord, Estimate, Record

_BIAS = {UNBIASED: "without bias", BIASED: "with bias"}


def changes_text(changes: Mapping[str, ChangeRecord]) -> str:
    """Return all changes of a cell in a line: of those that differ the worst."""
    differing = [name for name, change in changes.items() if change.bits]
    if not differing:
        return f"the same bits in {len(changes)} comparisons"
    name = worst(changes)
    return f"other bits in {len(differing)} of {len(changes)} comparisons, {_how(changes[name])} ({name})"


def _how(change: ChangeRecord) -> str:
    """Return what one change does: which way, how many bits, and where that leaves the bias."""
    if change.lost:
        return f"with {change.lost} elements finite in one answer alone"
    if change.growth is not None:
        return f"with mean squared errors {change.growth:.3g} to 1"
    bias = _BIAS.get(change.verdict or "", "not known whether with bias")
    apart = f"{_number(change.difference)} +- {change.difference.half_width or 0.0:.3f} ulp"
    return f"{bias}: {apart}, {_number(change.before)} before, {_number(change.after)} after, {change.bits:.2%} of bits"


def _number(estimate: Estimate) -> str:
    return "none" if estimate.mean is None else f"{estimate.mean:+.3f}"


def worst(changes: Mapping[str, ChangeRecord]) -> str:
    """Return the name of the change that does most harm; of several the one whose signed mean is farthest from 0."""

    def rank(name: str) -> tuple[bool, bool, int, float, float]:
        change = changes[name]
        verdict = -1 if change.verdict is None else VERDICTS.index(change.verdict)
        grown = change.growth is not None
        return change.lost > 0, grown, verdict, abs(change.difference.mean or 0.0), change.bits

    return max(changes, key=rank)


def finding_text(record: Record) -> str:
    """Return what a kernel's author reads of such a cell; empty for a cell of another kind."""
    changes = record.evidence.get("changes")
    untold = [answer.why for answer in record.answers.values() if answer.met is None]
    return "" if not changes else f"not known: {untold[0]}" if untold else changes_text(changes)
