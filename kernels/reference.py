"""Attention in fp64: what every kernel is measured against."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tiebreak.kernels.inputs import AttentionInputs, sum_groups


@dataclass(frozen=True)
class Reference:
    """Attention and its gradients in fp64, from the inputs as the kernel gets them."""

    o: Tensor  # (batch, heads, queries, d)
    magnitude: Tensor  # sum over keys of P |V|, (batch, heads, queries, d): the scale of rounding errors in O
    p: Tensor  # (batch, heads, queries, keys)
    s: Tensor  # scores before masking, (batch, heads, queries, keys)
    delta: Tensor  # rowsum(dO * O), (batch, heads, queries, 1)
    pk: Tensor  # P K, (batch, heads, queries, d), of the paper's equation 1


def reference(inputs: AttentionInputs) -> Reference:
    """softmax(alpha Q K^T) V in fp64. A row whose keys are all masked gives zeros.

    Returns:
        The forward pass and the terms of the paper's equation 1.
    """
    entries = [_reference(entry) for entry in _entries(inputs)]  # of which each stays in a core's cache
    parts = {part.name: [getattr(entry, part.name) for entry in entries] for part in fields(Reference)}
    return Reference(**{name: torch.cat(tensors) for name, tensors in parts.items()})


def _entries(inputs: AttentionInputs) -> Iterator[AttentionInputs]:
    """The calls of a batch."""
    for at in range(inputs.q.shape[0]):
        q, k, v, do = (tensor[at : at + 1] for tensor in (inputs.q, inputs.k, inputs.v, inputs.do))
        padding = None if inputs.key_padding is None else inputs.key_padding[at : at + 1]
        yield replace(inputs, q=q, k=k, v=v, do=do, key_padding=padding)


def _reference(inputs: AttentionInputs) -> Reference:
    k, v = inputs.expanded_k().double(), inputs.expanded_v().double()
    s = inputs.q.double() @ k.transpose(-1, -2) * inputs.scale
    hidden = inputs.hidden()
    p = probabilities(s, hidden)
    o = p @ v
    if hidden is not None:
        o = o.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # also where V has Inf or NaN: 0 * Inf is no 0
    return Reference(
        o=o,
        magnitude=p @ v.abs(),
        p=p,
        s=s,
        delta=(inputs.do.double() * o).sum(-1, keepdim=True),
        pk=p @ k,
    )


def probabilities(s: Tensor, hidden: Tensor | None) -> Tensor:
    """Row softmax of fp64 scores (..., queries, keys); a row with every key `hidden` gives zeros."""
    if hidden is None:
        return torch.softmax(s, -1)
    p = torch.softmax(s.masked_fill(hidden, -torch.inf), -1)
    return p.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def reference_gradients(inputs: AttentionInputs, ref: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """dQ, dK and dV in fp64, in the shapes of q, k and v."""
    k, v, do = inputs.expanded_k().double(), inputs.expanded_v().double(), inputs.do.double()
    ds = ref.p * (do @ v.transpose(-1, -2) - ref.delta)
    dq = inputs.scale * (ds @ k)
    dk = inputs.scale * (ds.transpose(-1, -2) @ inputs.q.double())
    dv = ref.p.transpose(-1, -2) @ do
    return dq, sum_groups(dk, inputs.groups), sum_groups(dv, inputs.groups)
