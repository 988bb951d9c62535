"""What is expected of a cell: contract, calls that agree, a claim, a prediction."""

from tiebreak.cases.measures.accuracy import WORSE
from tiebreak.cases.verdicts import MARGIN_ULPS
from tiebreak.matrix.checks import Check
from tiebreak.matrix.questions import comparison
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import CLAIM, PREDICTION, Answer, LimitRecord

_CONTRACT = "shape, format and device of O; inputs and process left as they were"


def _contract(result: Result) -> Answer | None:
    """A kernel that breaks its contract gives no result: `contract_broken` answers for it."""
    if not result.contract:
        return None
    return Answer(True, _CONTRACT) if result.leaks is None else contract_broken(f"leaks: {result.leaks}")


def contract_broken(why: str) -> Answer:
    return Answer(False, _CONTRACT, why)


def _repeatable(result: Result) -> Answer | None:
    why = "" if result.repeatable else "not repeatable: two runs on the same input differ in bits"
    return None if result.repeatable is None else Answer(result.repeatable, "the same bits twice", why)


def _claim(result: Result) -> Answer | None:
    claims = result.claims
    if not claims:
        return None
    said = {claim: f"{claim.asked} ({claim.source}); {claim.measured}" for claim in claims}
    fell = [f"claim fell: {said[claim]}" for claim in claims if claim.met is False]
    untold = [
        f"{result.heads} heads do not settle the claim: {said[claim]}; {result.remedy()}"
        for claim in claims
        if claim.met is None
    ]
    asked, source = ", ".join(claim.asked for claim in claims), "; ".join(dict.fromkeys(each.source for each in claims))
    return Answer(False if fell else None if untold else True, asked, "; ".join(fell or untold), source)


def _prediction(result: Result) -> Answer | None:
    prediction = result.prediction
    if prediction is None:
        return None
    asked = f"what {prediction.plan} predicts"
    if prediction.met is None:
        why = f"{result.heads} heads do not settle whether it is {asked}: {prediction.measured}; {result.remedy()}"
    else:
        why = "" if prediction.met else f"not {asked}: {prediction.measured}"
    return Answer(prediction.met, asked, why)


CONTRACT = Check(
    "contract", "a user's kernel returns what it must and leaves inputs and process as they were", _contract, wrong=True
)
REPEATABLE = Check("repeatable", "two runs on the same input give the same bits", _repeatable)
USAGE = Check(
    comparison.USAGE,
    "the same numbers have the same answer in other strides, after other calls and beside what is not to be read",
    lambda result: result.agreement.get(comparison.USAGE),
    wrong=True,
    limits=(
        LimitRecord("error_ratio", WORSE, where=("error_ratio",)),
        LimitRecord("lse_error_over_bound", 1.0, where=("lse_error_over_bound",)),
    ),
    more=True,
)
INVARIANCE = Check(
    comparison.INVARIANCE,
    "a call that is changed in what should not matter has the same bits, or others without a bias",
    lambda result: result.agreement.get(comparison.INVARIANCE),
    judges=True,
    limits=(LimitRecord("differing_bits", 0.0),),
    more=True,
)
CLAIMED = Check(CLAIM, "what the case claims about such a kernel", _claim, judges=True)
PREDICTED = Check(
    PREDICTION,
    "what its declared plan predicts on the same inputs, emulated",
    _prediction,
    judges=True,
    limits=(LimitRecord("prediction_difference", MARGIN_ULPS, size=True),),
    more=True,  # NaN and Inf are counted on both sides, and no record has those of the emulation
)
