"""How inputs of more than one module are made."""

from dataclasses import replace

from tiebreak.cases.case import Draw, Scores, Shape, as_inputs, scripted
from tiebreak.kernels.inputs import AttentionInputs


def normal_numbers(
    draw: Draw, shape: Shape, *, causal: bool = False, size: float = 1.0, v_mean: float = 1.0, v_std: float = 0.25
) -> AttentionInputs:
    """Normally distributed q, k and v, scores of about `size`.

    V is normal about 1: where it is about 0, O cancels and an error in ulps of O tells by how much, not how the kernel
    rounds.
    """
    batch, heads = draw.batch_and_heads
    key_heads = 1 if heads % shape.groups else heads // shape.groups  # few heads: all share one
    q = size * draw.normal(batch, heads, shape.queries, shape.d)
    k = draw.normal(batch, key_heads, shape.keys, shape.d)
    v = v_mean + v_std * draw.normal(batch, key_heads, shape.keys, shape.d)
    return as_inputs(draw, q, k, v, causal=causal, scale=shape.scale)


def growing(draw: Draw, growth: tuple[float, float]) -> AttentionInputs:
    """Two maxima in one block of 32, 64 or 128 keys, but the first; one key of the first lies `growth` below them."""
    inputs = scripted(draw, Scores(positions=(145, 155)), shape=Shape(keys=256))
    k = inputs.k.clone()
    k[..., 17, 1] = -draw.uniform(*growth, *k.shape[:2]).bfloat16().float()
    return replace(inputs, k=k)
