"""What is expected of a cell, and whether its heads were enough to tell: a claim, a prediction, a verdict."""

from tiebreak.cases.verdicts import Verdict
from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import CLAIM, PREDICTION, Answer

_DECIDED = "heads enough to tell whether it is biased"


def _claim(result: Result) -> Answer | None:
    claims = result.claims
    if not claims:
        return None
    fell = [f"claim fell: {claim.asked} ({claim.source}); {claim.measured}" for claim in claims if claim.met is False]
    untold = [
        f"{result.heads} heads do not settle the claim: {claim.asked} ({claim.source}); {claim.measured};"
        f" {result.remedy}"
        for claim in claims
        if claim.met is None
    ]
    asked = ", ".join(claim.asked for claim in claims)
    source = "; ".join(dict.fromkeys(claim.source for claim in claims))
    met = False if fell else None if untold else True
    return Answer(met, asked, "; ".join(fell or untold), source)


def _prediction(result: Result) -> Answer | None:
    prediction = result.prediction
    if prediction is None:
        return None
    asked = f"what {prediction.plan} predicts"
    if prediction.met is None:
        why = f"{result.heads} heads do not settle whether it is {asked}: {prediction.measured}; {result.remedy}"
    else:
        why = "" if prediction.met else f"not {asked}: {prediction.measured}"
    return Answer(prediction.met, asked, why)


def _decided(result: Result) -> Answer | None:
    if not (result.contract and result.failure) or result.verdict is None:
        return None
    if result.verdict != Verdict.INCONCLUSIVE.value:
        return Answer(True, _DECIDED)
    return Answer(None, _DECIDED, f"{result.heads} heads do not tell whether it is biased; {result.remedy}")


CLAIMED = Check(CLAIM, "what the case claims about such a kernel", _claim, judges=True)
PREDICTED = Check(PREDICTION, "what its declared plan predicts on the same inputs, emulated", _prediction, judges=True)
DECIDED = Check("decided", "there were heads enough to tell whether a user's kernel is biased", _decided)
