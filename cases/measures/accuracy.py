"""How large errors are beside those of the plan that a kernel is held to, and which way gradients err."""

from functools import partial

from tiebreak.cases.accuracy import bias_apart, gain_error, ratio_of_means, square_ratio
from tiebreak.cases.measures import CallMeasure, Observed, Value

_GRADIENTS = ("dq", "dk", "dv")


def _ratio(observed: Observed) -> Value:
    return None if observed.held_to is None else square_ratio(*observed.held_to)


def _bias(observed: Observed) -> Value:
    return bias_apart(*observed.held_to) if observed.held_to is not None and observed.normal else None


def _backward_ratio(name: str, observed: Observed) -> Value:
    ratios = [ratio_of_means(*squares[name]) for squares in observed.backward_squares]
    return max((ratio for ratio in ratios if ratio is not None), key=lambda ratio: ratio.low, default=None)


def _gain(at: int, observed: Observed) -> Value:
    errors = observed.gradient_errors
    if errors is None or observed.held_to is None or not observed.normal:
        return None
    batch = observed.batches[0]
    groups = 1 if at else batch.inputs.groups  # K and V have key heads alone
    return gain_error(errors.each[at].along, batch.gradients.squares[at], groups)


MEASURES = (
    CallMeasure(
        "square_ratio", "mean squared error of O over that of the plan it is held to, on the same heads", of=_ratio
    ),
    CallMeasure("bias_apart", "bias of O less that of the plan it is held to, on normal numbers", "ulp", of=_bias),
    *(
        CallMeasure(
            f"{name}_square_ratio",
            f"mean squared error of d{name[1].upper()} over that of the backward pass it is held to, on normal numbers",
            of=partial(_backward_ratio, name),
        )
        for name in _GRADIENTS
    ),
    *(
        CallMeasure(
            f"{name}_gain_error",
            f"how much too large d{name[1].upper()} is on the whole, as a share, on normal numbers",
            of=partial(_gain, at),
        )
        for at, name in enumerate(_GRADIENTS)
    ),
)
