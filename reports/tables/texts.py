"""Records in words, as tables show them: a number with a mark of the outcome, the plan, the changes."""

import math
from collections.abc import Mapping

from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Record, Shown

PASSED_MARK = "·"
LEGEND = (
    f"{PASSED_MARK}: passed: as claimed or predicted, or with no larger errors than the plan it follows; without"
    "\na mark: measured, nothing was asked. !..!: a check failed, see below; (..): that is excused;"
    " ?..?: too\nfew heads to tell; skip: can't run there, see below."
)
EXCUSED = "excused"  # instead of an outcome
_LEAST = 0.01  # share of its size from which on what has shrunk is told by a number
_VERDICT: dict[str | None, str] = {records.BIASED: " B", records.UNDECIDED: " ?"}  # the mark after a bias
_EMPTY = {records.SKIPPED: "skip", records.CRASHED: "crash", records.TIMED_OUT: "time"}  # where there is no result
_AROUND = {records.PASSED: f"{{}} {PASSED_MARK}", records.MEASURED: "{}", records.SKIPPED: "{}", EXCUSED: "({})",
           records.UNDECIDED: "?{}?"}  # fmt: skip
_PLANS, _CASES = 4, 3  # of a list that is named: plans that can't be told apart, cases that no plan explains
_BIAS = {records.UNBIASED: "without bias", records.BIASED: "with bias"}


def cell_text(record: Record) -> str:
    """Return one cell of a table, as the legend says."""
    return marked(plain_text(record), mark_of(record))


def plain_text(record: Record) -> str:
    """Return the text of a cell without its mark; a kernel that broke its contract has no result."""
    return _EMPTY.get(record.outcome, "none") if record.shown is None else shown_text(record.shown)


def shown_text(shown: Shown, spec: str = "", half_width: float | None = None) -> str:
    """Return a result in words, as tables show it: `+0.23 B`, `x0.28`, `NaN`, `1.0 deg`.

    `spec` is the number's format, if not its own; `half_width` is that of its interval, if it is shown too.
    """
    if shown.kind == records.NONFINITE:
        return "NaN"
    if shown.kind == records.NO_NUMBER or shown.number is None:
        return "none"
    if shown.kind == records.SHRUNK:
        return f"x{shown.number:.2g}" if shown.number >= _LEAST else "x0"
    width = "" if half_width is None else f"±{half_width:.3f}"
    unit = f" {shown.unit}" if shown.unit else ""
    return f"{shown.number:{spec or shown.spec}}{width}{unit}{_VERDICT.get(shown.verdict, '')}"


def mark_of(record: Record) -> str:
    """Return the meaning of a cell's mark: its outcome, or that its failure is excused."""
    return record.outcome if record.excused is None else EXCUSED


def marked(text: str, mark: str) -> str:
    """Return a text with the mark of an outcome."""
    return _AROUND.get(mark, "!{}!").format(text)


def explanation_texts(run: records.Run) -> dict[str, str]:
    """Return one line on each kernel that declares no plan, by backend-kernel: the plan that explains it."""
    backends = {f"{record.backend}-{record.kernel}": record.backend for record in run.records}
    return {name: explanation_text(plan, run.evidence(backends.get(name, name)))
            for name, plan in run.explanations.items()}  # fmt: skip


def explanation_text(explanation: records.Explanation, bits: str = "bits") -> str:
    """Return one line on the plan that explains a kernel that declares none, and on whose bits that rests."""
    cells = f"{explanation.cells} cell{'' if explanation.cells == 1 else 's'}"
    first, plans = explanation.plans[0] if explanation.plans else "none", explanation.plans
    if explanation.state == records.BEHAVES_LIKE:
        return f"behaves like {' or '.join(plans)} in {cells} (its random bits are its own)"
    worst = [f"{case} {percent(share)}" for case, share in explanation.worst.items()]
    named = ", ".join(worst[:_CASES]) + (", ..." if len(worst) > _CASES else "")
    agreed = f"{percent(explanation.share)} of {bits} in {cells}"
    if explanation.state == records.FOLLOWS:
        return f"follows {first} ({agreed}{f', but not in {named}' if worst else ''})"
    if explanation.state == records.UNEXPLAINED:
        return f"unexplained: no known plan agrees; nearest is {first} with {agreed} ({named})"
    more = f" and {len(plans) - _PLANS} more" if len(plans) > _PLANS else ""
    return f"can't tell apart: {', '.join(plans[:_PLANS])}{more} on these cases ({agreed})"


def percent(share: float | None) -> str:
    """Return a share, rounded down: 100 % is all of them."""
    return "? %" if share is None else f"{math.floor(round(1e4 * share, 6)) / 100:.2f} %"


def changes_text(changes: Mapping[str, records.ChangeRecord]) -> str:
    """Return all changes of a call that was compared with itself, in a line: of those that differ the worst."""
    differing = sum(change.bits > 0 for change in changes.values())
    if not differing:
        return f"bitwise equal in {len(changes)} comparisons"
    name = worst(changes)
    return f"other bits in {differing} of {len(changes)} comparisons, {_change_text(changes[name])} ({name})"


def _change_text(change: records.ChangeRecord) -> str:
    """Return the effect of one change: which way, how many bits, and where that leaves the bias."""
    if change.lost:
        return f"with {change.lost} elements finite in one answer alone"
    if change.growth is not None:
        return f"with mean squared errors {change.growth:.3g} to 1"
    bias = _BIAS.get(change.verdict or "", "not known whether with bias")
    apart = f"{_mean_text(change.difference)} +- {change.difference.half_width or 0.0:.3f} ulp"
    was, now = _mean_text(change.before), _mean_text(change.after)
    return f"{bias}: {apart}, {was} before, {now} after, {change.bits:.2%} of bits"


def _mean_text(estimate: records.Estimate) -> str:
    return "none" if estimate.mean is None else f"{estimate.mean:+.3f}"


def worst(changes: Mapping[str, records.ChangeRecord]) -> str:
    """Return the name of the change that does most harm; of several the one whose signed mean is farthest from 0."""

    def rank(name: str) -> tuple[bool, bool, int, float, float]:
        change = changes[name]
        verdict = -1 if change.verdict is None else records.VERDICTS.index(change.verdict)
        return change.lost > 0, change.growth is not None, verdict, abs(change.difference.mean or 0.0), change.bits

    return max(changes, key=rank)


def answers_of(record: Record) -> dict[str, records.RuleAnswer]:
    """Return the rules' verdicts on a record; empty where none was applied."""
    return dict(record.evidence.get("rules", {}))
