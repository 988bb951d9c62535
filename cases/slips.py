"""Usual mistakes in attention kernels, as changes of the inputs: what a wrong kernel has computed exactly.

Those of backward passes are changes of the reference that gradients are made from, or factors of the gradients.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.reference import Reference, log_sum_exp, reference_gradients, scores

_TILES = (16, 32, 64, 128)  # numbers of keys that kernels work in


@dataclass(frozen=True)
class Slip:
    """One mistake."""

    about: str  # what is wrong, as a clause
    inputs: AttentionInputs  # on which sound attention computes what it does
    turned: bool = False  # whether heads and rows have changed places, in O too

    def seen(self, o: Tensor) -> Tensor:
        """Return O as such attention has it, (batch, heads, queries, d)."""
        return o.transpose(1, 2) if self.turned else o


def slips(inputs: AttentionInputs) -> Iterator[Slip]:
    """Yield every mistake that changes the output on some inputs."""
    yield Slip("scores are not scaled", _rescaled(inputs, 1 / inputs.scale))
    yield Slip("scores are scaled twice", _rescaled(inputs, inputs.scale))
    yield Slip("exp2 is taken of scores that log2 e is missing from", _rescaled(inputs, math.log(2)))
    if cap := inputs.softcap:
        # c' tanh(s' / c') with other c' and s': c tanh(s / scale / c) scale, and c tanh(s).
        yield Slip("scores are capped before they are scaled", replace(inputs, softcap=cap * inputs.scale))
        yield Slip("the tanh is of scores that are not divided by the cap", _rescaled(inputs, cap))
        yield Slip("the soft cap is not applied", replace(inputs, softcap=0.0))
        if inputs.added is not None:
            order = "after" if inputs.capped_bias else "before"
            yield Slip(f"the bias is added {order} the soft cap", replace(inputs, capped_bias=not inputs.capped_bias))
    yield from _of_biases(inputs)
    yield from _of_masks(inputs)
    yield from _of_keys(inputs)
    if inputs.groups > 1 and inputs.k.shape[1] > 1 and not inputs.is_rescaled:
        heads = torch.arange(inputs.q.shape[1]) % inputs.k.shape[1]
        k, v = inputs.k[:, heads], inputs.v[:, heads]
        yield Slip("query head h reads key head h mod the number of key heads", replace(inputs, k=k, v=v))
    if inputs.sink is not None:
        yield Slip("the sink is counted twice", replace(inputs, sink=inputs.sink + math.log(2)))
        yield Slip("the sink is left out", replace(inputs, sink=None))
    if inputs.softmax_scale is not None:
        yield Slip("the scale that is given is not taken", replace(inputs, softmax_scale=None))
    if inputs.is_rescaled:
        yield Slip("V is multiplied by K's factors", replace(inputs, v_descale=inputs.k_descale))
    if _is_plain(inputs) and inputs.groups == 1 and inputs.q.shape == inputs.k.shape and not inputs.causal:
        q, k, v, do = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v, inputs.do))
        yield Slip("heads and rows are taken for each other", replace(inputs, q=q, k=k, v=v, do=do), turned=True)


def _of_biases(inputs: AttentionInputs) -> Iterator[Slip]:
    """Yield the mistakes with what is added to scores; ALiBi's distances are counted backwards from a row's own key."""
    if inputs.added is not None:
        yield Slip("the bias is scaled", _biased(inputs, inputs.added * inputs.scale))
    if inputs.alibi is None:
        return
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    behind = torch.arange(queries)[:, None] + (0.0 if inputs.lengths else keys - queries) - torch.arange(keys)
    others = {
        "the slopes of ALiBi are left out": 0.0 * behind,
        "ALiBi raises the scores of keys far away": -behind.abs(),
        "ALiBi raises the scores of keys ahead of a row's own": behind,
        "ALiBi's distances are counted from row i to key i": (behind + queries - keys).abs(),
    }
    for about, distance in others.items():
        alibi = -inputs.alibi.view(-1, inputs.q.shape[1], 1, 1) * distance
        yield Slip(about, _biased(inputs, alibi if inputs.bias is None else inputs.bias + alibi))


def _biased(inputs: AttentionInputs, bias: Tensor) -> AttentionInputs:
    """Return inputs with one bias instead of all."""
    return replace(inputs, bias=bias, alibi=None)


@dataclass(frozen=True)
class GradientSlip:
    """One mistake of a backward pass after a sound forward pass."""

    about: str  # what is wrong, as a clause
    gradients: tuple[Tensor, ...]  # dQ, dK and dV that it makes, fp64


def gradient_slips(inputs: AttentionInputs, ref: Reference) -> Iterator[GradientSlip]:
    """Yield every mistake that changes some gradient of some inputs."""
    exact, groups, lse = reference_gradients(inputs, ref), inputs.groups, log_sum_exp(inputs, ref)
    default_scale = inputs.q.shape[-1] ** -0.5
    factors = {
        "the scale is missing": 1 / inputs.scale,
        "the scale is applied twice": inputs.scale,
        "1 / scale is taken for the scale": inputs.scale**-2,
        "the scale that is given is not taken": default_scale / inputs.scale,
        "a factor log2 e is left": 1 / math.log(2),
        "a factor ln 2 is left": math.log(2),
        "everything is counted twice": 2.0,
        "the sign is wrong": -1.0,
        "the mean of a group of heads is taken for their sum": 1 / groups,
    }
    for about, factor in factors.items():
        if not math.isclose(factor, 1.0):
            yield GradientSlip(about, tuple(factor * gradient for gradient in exact))
    if groups > 1:
        of_heads = reference_gradients(replace(inputs, k=inputs.expanded_k(), v=inputs.expanded_v()), ref)
        for at, which in ((0, "first"), (groups - 1, "last")):
            dk, dv = (gradient[:, at::groups] for gradient in of_heads[1:])
            yield GradientSlip(f"the {which} head of a group is taken for their sum", (exact[0], dk, dv))
    unnormalised = replace(ref, p=ref.p / ref.p.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny))
    references = {
        "delta is missing": replace(ref, delta=torch.zeros_like(ref.delta)),
        "delta is added": replace(ref, delta=-ref.delta),
        "P is not divided by its row sum": unnormalised,
    }
    if inputs.softcap:
        yield GradientSlip("the soft cap's slope is left out", reference_gradients(replace(inputs, softcap=0.0), ref))
    for slip in (*_of_masks(inputs), *_of_biases(inputs)):
        p, hidden = (scores(slip.inputs) - lse).exp(), slip.inputs.hidden()
        references[slip.about] = replace(ref, p=p if hidden is None else p.masked_fill(hidden, 0.0))
    for about, changed in references.items():
        yield GradientSlip(about, reference_gradients(inputs, changed))


def _rescaled(inputs: AttentionInputs, factor: float) -> AttentionInputs:
    return replace(inputs, softmax_scale=inputs.scale * factor)


def _is_plain(inputs: AttentionInputs) -> bool:
    """Return whether the inputs are nothing but q, k, v and a causal mask."""
    return len(inputs.required_features()) <= int(inputs.causal) + (inputs.groups > 1) and inputs.softcap == 0.0


def _of_masks(inputs: AttentionInputs) -> Iterator[Slip]:
    """Yield the mistakes with masks: ignored, inverted, or aligned wrongly."""
    hidden = inputs.hidden()
    if hidden is None or inputs.lengths is not None:
        return
    queries, keys = inputs.q.shape[2], inputs.k.shape[2]
    none = torch.zeros(1, 1, queries, keys, dtype=torch.bool)
    yield Slip("the mask is not applied", _masked(inputs, none))
    yield Slip("the mask is inverted", _masked(inputs, ~hidden | none))
    unlimited = replace(inputs, window=(None, None)).hidden()
    if inputs.window != (None, None) and unlimited is not None:
        yield Slip("the window is not applied", _masked(inputs, unlimited | none))
    if not inputs.causal:
        return
    others, ahead = replace(inputs, causal=False).hidden(), none.logical_not()
    rest = none if others is None else others | none
    for about, diagonal in {
        "the causal mask is aligned to the upper left": 1,
        "the causal mask hides a row's own key": keys - queries,
        "the causal mask shows a row the key behind its own": keys - queries + 2,
        "the causal mask ends with the last keys, not a sequence's own": keys - queries + 1,
    }.items():
        if diagonal != keys - queries + 1 or inputs.own_ends:
            yield Slip(about, _masked(inputs, ahead.triu(diagonal) | rest))
    yield Slip("the causal mask is not applied", _masked(inputs, rest))


def _masked(inputs: AttentionInputs, hidden: Tensor) -> AttentionInputs:
    """Return inputs with one mask instead of all."""
    return replace(inputs, causal=False, window=(None, None), key_padding=None, block_mask=~hidden, block_size=(1, 1))


def _of_keys(inputs: AttentionInputs) -> Iterator[Slip]:
    """Yield the mistakes of leaving keys out at the end, or of counting past it."""
    keys = inputs.k.shape[2]
    if not _is_plain(inputs) or inputs.causal:
        return
    for tile in _TILES:
        beyond = keys % tile
        if beyond and keys > tile:
            about = f"the last {beyond} keys are left out, beyond a multiple of {tile}"
            yield Slip(about, _with_keys(inputs, -beyond))
        if beyond:
            about = f"keys of 0 are counted past the end, up to a multiple of {tile}"
            yield Slip(about, _with_keys(inputs, tile - beyond))
    if keys > 1:
        yield Slip("the last key is left out", _with_keys(inputs, -1))


def _with_keys(inputs: AttentionInputs, more: int) -> AttentionInputs:
    """Return inputs with `more` keys of 0 at the end or, below 0, without as many of the last."""
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, more)) for x in (inputs.k, inputs.v))
    return replace(inputs, k=k, v=v)
