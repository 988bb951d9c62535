"""Whether what the case claims about such a kernel is so."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import CLAIM, Answer


def _ask(result: Result) -> Answer | None:
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


CHECK = Check(CLAIM, "what the case claims about such a kernel", _ask, judges=True)
