"""Whether the kernel does what its declared plan predicts on the same inputs."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import PREDICTION, Answer


def _ask(result: Result) -> Answer | None:
    found = result.prediction
    if found is None:
        return None
    asked = f"what {found.plan} predicts"
    if found.met is None:
        told = f"{result.heads} heads do not settle whether it is what {found.plan} predicts"
        return Answer(None, asked, f"{told}: {found.found}; {result.remedy}")
    return Answer(found.met, asked, "" if found.met else f"not what {found.plan} predicts: {found.found}")


CHECK = Check(
    PREDICTION,
    "what its declared plan predicts on the same inputs, emulated",
    _ask,
    judges=True,
    term="differential testing",
)
