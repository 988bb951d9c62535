"""Why a cell does not hold, in words."""

from tiebreak.cases.measures import Measures
from tiebreak.matrix.looks import Looks


def reasons(looks: Looks) -> list[str]:
    """Why the cell falls; empty if it does not."""
    measures, case = looks.measures, looks.cell.case
    expectation = looks.claim.expectation if looks.claim else None
    found: list[str] = []
    if measures.nonfinite and (expectation is None or expectation.finite):
        found.append(f"{measures.nonfinite} of {measures.elements} elements are NaN or Inf, the reference is not")
    if measures.missed:
        found.append(f"{measures.missed} elements are finite where the reference is NaN or Inf")
    if measures.error_over_bound > 1 and (expectation is None or expectation.accurate):
        found.append(
            f"largest error is {measures.error_over_bound:.3g} times the bound of plan {looks.declaration.plan.name}"
        )
    if looks.claim and looks.claim.expectation.met(measures) is False:
        found.append(f"claim fell: {looks.claim.expectation.name} ({looks.claim.source}); {_found(measures)}")
    if looks.prediction_met() is False:
        _, prediction = looks.prediction()
        told = f"{_found(measures)} measured, {_found(prediction)} emulated"
        found.append(f"not what {looks.declaration.label} predicts: {told}")
    if looks.repeatable is False:
        found.append(f"not repeatable: two runs on the same input of {case.name} differ in bits")
    return found


def unsettled(looks: Looks) -> list[str]:
    """What the heads drawn do not settle; empty if they settle all."""
    measures, heads = looks.measures, looks.heads()
    open_questions: list[str] = []
    if looks.claim and looks.claim.expectation.met(measures) is None:
        told = f"{heads} heads do not settle the claim: {looks.claim.expectation.name}"
        open_questions.append(f"{told} ({looks.claim.source}); {_found(measures)}; {looks.remedy}")
    if looks.prediction_met() is None:
        _, prediction = looks.prediction()
        told = f"{heads} heads do not settle whether it is what {looks.declaration.label} predicts"
        numbers = f"{_found(measures)} measured, {_found(prediction)} emulated"
        open_questions.append(f"{told}: {numbers}; {looks.remedy}")
    return open_questions


def _found(measures: Measures) -> str:
    if measures.nonfinite:
        return f"{measures.nonfinite} elements NaN or Inf"
    return f"bias {measures.bias.mean:+.3f} +- {measures.bias.half_width:.3f} ulp"
