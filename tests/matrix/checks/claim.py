"""Whether what the case claims about such a kernel is so."""

from tiebreak.matrix.checks import Check
from tiebreak.matrix.result import Result
from tiebreak.reports.records.record import CLAIM, Answer


def _ask(result: Result) -> Answer | None:
    claims = result.claims
    if not claims:
        return None
    fell = [f"claim fell: {one.asked} ({one.source}); {one.found}" for one in claims if one.met is False]
    untold = [
        f"{result.heads} heads do not settle the claim: {one.asked} ({one.source}); {one.found}; {result.remedy}"
        for one in claims
        if one.met is None
    ]
    asked = ", ".join(one.asked for one in claims)
    source = "; ".join(dict.fromkeys(one.source for one in claims))
    met = False if fell else None if untold else True
    return Answer(met, asked, "; ".join(fell or untold), source)


CHECK = Check(CLAIM, "what the case claims about such a kernel", _ask, judges=True, term="expected result")
