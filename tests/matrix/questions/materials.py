"""What is put in: normal numbers, and rows on which a rounding that a change moves shows as a bias."""

from collections.abc import Callable, Mapping
from functools import partial

from tiebreak.cases.case import ONE_SIGNED, Draw, Scores, Shape, Values, normal_numbers, scripted
from tiebreak.kernels.inputs import AttentionInputs

Material = Callable[[Draw, Shape], AttentionInputs]

_SINK = Values(tail_mean=-0.1)
_NEAR = (16.0, 20.0)  # below the maxima: all of it together is about 2^-16 of one


def _tied(draw: Draw, shape: Shape, *, apart: bool, values: Values = ONE_SIGNED) -> AttentionInputs:
    """Two equal maxima: the last key, and one in the first half or the key before."""
    return scripted(draw, Scores(positions=(_first(shape, apart=apart), shape.keys - 1)), values, shape)


def _first(shape: Shape, *, apart: bool) -> int:
    return shape.keys // 4 if apart else shape.keys - 2


def cancelling(draw: Draw, shape: Shape) -> AttentionInputs:
    """Two equal maxima in different halves whose V cancels.

    What is left of O is about 2^-16 of either: its bf16 bits are the last bits of fp32 sums, and whatever adds these up
    in another order, or divides a part of them, changes most of them, in any plan.
    """
    inputs = scripted(draw, Scores(gap=_NEAR, positions=(_first(shape, apart=True), shape.keys - 1)), shape=shape)
    inputs.v[:, :, -1] = -inputs.v[:, :, _first(shape, apart=True)]
    return inputs


#: What every question of invariance is asked of, by name.
MATERIALS: Mapping[str, Material] = {
    "normal numbers": normal_numbers,
    "ties apart": partial(_tied, apart=True),
    "ties apart on a sink": partial(_tied, apart=True, values=_SINK),
    "ties at the end": partial(_tied, apart=False),
}
