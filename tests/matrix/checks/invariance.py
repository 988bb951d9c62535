"""Whether a call that is changed has the same bits, or others without a bias."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.invariance.comparison import Effect
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer
from tiebreak.reports.tables.changes import changes_text

_ASKED, _DECLARED = "no bias that comes of the change", "the same bits, as the kernel declares"


def _ask(result: Result) -> Answer | None:
    """Other bits without a bias are measured: nobody has said that there are none."""
    found = result.invariance
    if found is None:
        return None
    asked, differs = _DECLARED if found.declared else _ASKED, found.effects != {Effect.NONE}
    if found.effects & {Effect.BIASED, Effect.HARMFUL} or (found.declared and differs):
        return Answer(False, asked, changes_text(found.changes))
    if found.dead:
        return Answer(None, asked, f"the knob did nothing: no bit changed by {', '.join(found.dead)}")
    if Effect.UNKNOWN in found.effects:
        return Answer(
            None, asked, f"{result.heads} heads do not settle it: {changes_text(found.changes)}; {result.remedy}"
        )
    return None if differs else Answer(True, asked)


CHECK = Check(
    "invariance",
    "a call that is changed in what should not matter has the same bits, or others without a bias",
    _ask,
    judges=True,
    term="batch invariance",
)
