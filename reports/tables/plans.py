"""Which plan explains a kernel, in words."""

import math

from tiebreak.reports.records.record import BEHAVES_LIKE, FOLLOWS, UNEXPLAINED, Explanation

_PLANS = 4  # plans that can't be told apart that are named
_NAMED = 3  # cases that no plan explains that are named


def explanation_text(explanation: Explanation) -> str:
    """Return one line on the plan that explains a kernel that declares none."""
    cells = f"{explanation.cells} cell{'' if explanation.cells == 1 else 's'}"
    first, plans = explanation.plans[0] if explanation.plans else "none", explanation.plans
    if explanation.state == BEHAVES_LIKE:
        return f"behaves like {' or '.join(plans)} in {cells} (its random bits are its own)"
    worst = [f"{case} {percent(share)}" for case, share in explanation.worst.items()]
    named = ", ".join(worst[:_NAMED]) + (", ..." if len(worst) > _NAMED else "")
    agreed = f"{percent(explanation.share)} of bits in {cells}"
    if explanation.state == FOLLOWS:
        return f"follows {first} ({agreed}{f', but not in {named}' if worst else ''})"
    if explanation.state == UNEXPLAINED:
        return f"unexplained: no known plan agrees; nearest is {first} with {agreed} ({named})"
    more = f" and {len(plans) - _PLANS} more" if len(plans) > _PLANS else ""
    return f"can't tell apart: {', '.join(plans[:_PLANS])}{more} on these cases ({agreed})"


def percent(share: float | None) -> str:
    """Return a share, rounded down: 100 % is all of them."""
    return "? %" if share is None else f"{math.floor(round(1e4 * share, 6)) / 100:.2f} %"
