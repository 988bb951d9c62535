"""How every table shows a cell: what its experiment shows, with a mark of the outcome."""

from tiebreak.reports.records import record as records
from tiebreak.reports.records.record import Record, Shown

HELD_MARK = "·"
LEGEND = (
    f"{HELD_MARK}: held: as claimed, as the declared plan predicts, or with no larger errors than the plan it follows;"
    " without\na mark: measured, nothing was asked. !..!: a check was not met, see below; (..): that is excused;"
    " ?..?: too\nfew heads to tell; skip: can't run there, see below."
)
EXCUSED = "excused"  # in the place of an outcome
_LEAST = 0.01  # share of its size from which on what has shrunk is told by a number
_VERDICT: dict[str | None, str] = {records.BIASED: " B", records.UNDECIDED: " ?"}  # what stands behind a bias
_EMPTY = {records.SKIPPED: "skip", records.CRASHED: "crash", records.TIMED_OUT: "time"}  # where there is no result


def cell_text(record: Record) -> str:
    """Return one cell of a table, as the legend says."""
    return marked(plain_text(record), mark_of(record))


def plain_text(record: Record) -> str:
    """Return what a table shows of a cell without its mark; of a kernel that broke its contract there is no result."""
    return _EMPTY.get(record.outcome, "none") if record.shown is None else shown_text(record.shown)


def shown_text(shown: Shown, spec: str = "", half_width: float | None = None) -> str:
    """Return what tables show of a result in words: `+0.23 B`, `x0.28`, `NaN`, `1.0 deg`.

    Args:
        shown: it.
        spec: how the number is written; empty: as it says itself.
        half_width: of the number's interval, where that is to be told too.
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
    """Return what a cell's mark stands for: its outcome, or that its failure is excused."""
    return record.outcome if record.excused is None else EXCUSED


def marked(text: str, mark: str) -> str:
    """Return a text with the mark of an outcome."""
    if mark == records.HELD:
        return f"{text} {HELD_MARK}"
    if mark in (records.MEASURED, records.SKIPPED):
        return text
    if mark == EXCUSED:
        return f"({text})"
    return f"?{text}?" if mark == records.INCONCLUSIVE else f"!{text}!"
