"""How every table shows a cell: what its experiment shows, with a mark of the outcome."""

from tiebreak.reports.records.record import (
    BIASED,
    CRASHED,
    HELD,
    INCONCLUSIVE,
    MEASURED,
    SKIPPED,
    TIMED_OUT,
    UNDECIDED,
    Record,
)

HELD_MARK = "·"
LEGEND = (
    f"{HELD_MARK}: held: as claimed of such a kernel, or as its declared plan predicts; without a mark: measured,"
    " nothing\nwas asked. !..!: a check was not met, see below; (..): that is excused; ?..?: too few heads to tell;"
    " skip: can't run\nthere, see below."
)
SHRUNK = "x"  # before the share of its size that an output keeps
EXCUSED = "excused"  # in the place of an outcome
_EMPTY = {SKIPPED: "skip", CRASHED: "crash", TIMED_OUT: "time"}  # where there is no result


def cell_text(record: Record) -> str:
    """One cell of a table, as the legend says."""
    return marked(plain_text(record), mark_of(record))


def plain_text(record: Record) -> str:
    """What a table shows of a cell without its mark; of a kernel that broke its contract there is no result."""
    return _EMPTY.get(record.outcome, "none") if record.shown is None else record.shown


def shrank(record: Record) -> bool:
    """Whether a share of its size is shown of an output, in the place of a bias that would tell nothing."""
    return (record.shown or "").startswith(SHRUNK)


def mark_of(record: Record) -> str:
    """What a cell's mark stands for: its outcome, or that its failure is excused."""
    return record.outcome if record.excused is None else EXCUSED


def marked(text: str, mark: str) -> str:
    """A text with the mark of an outcome."""
    if mark == HELD:
        return f"{text} {HELD_MARK}"
    if mark in (MEASURED, SKIPPED):
        return text
    if mark == EXCUSED:
        return f"({text})"
    return f"?{text}?" if mark == INCONCLUSIVE else f"!{text}!"


def verdict_mark(verdict: str | None) -> str:
    """What stands behind a bias: B for biased, ? for not known yet."""
    return {BIASED: " B", UNDECIDED: " ?"}.get(verdict or "", "")
