"""Whether the loss of a training run stays a number."""

from tiebreak.matrix.checks import Check, numbers, without_number
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import Answer

_NEEDED = ("finite_steps", "steps")
_ASKED = "a loss that is a number, to the last step"


def _ask(result: Result) -> Answer | None:
    if "finite_steps" not in result.measures or result.waived(CHECK.name):
        return None
    counted = numbers(result, *_NEEDED)
    if counted is None:
        return without_number(_ASKED, *_NEEDED)
    finite, steps = map(int, counted)
    why = "" if finite == steps else f"the loss is not a number at step {finite + 1} of {steps}"
    return Answer(finite == steps, _ASKED, why)


CHECK = Check("loss", "the loss of a training run stays a number", _ask, wrong=True)
