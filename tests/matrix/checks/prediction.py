"""Whether the kernel does what its declared plan predicts on the same inputs."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import PREDICTION, Answer


def _ask(result: Result) -> Answer | None:
    prediction = result.prediction
    if prediction is None:
        return None
    asked = f"what {prediction.plan} predicts"
    if prediction.met is None:
        unsettled = f"{result.heads} heads do not settle whether it is what {prediction.plan} predicts"
        return Answer(None, asked, f"{unsettled}: {prediction.measured}; {result.remedy}")
    why = "" if prediction.met else f"not what {prediction.plan} predicts: {prediction.measured}"
    return Answer(prediction.met, asked, why)


CHECK = Check(PREDICTION, "what its declared plan predicts on the same inputs, emulated", _ask, judges=True)
