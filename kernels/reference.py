"""Attention in fp64: what every kernel is measured against."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from tiebreak.kernels.inputs import AttentionInputs, sum_groups

_LARGE = 2**24  # elements of K of all query heads of an entry, beyond which its heads are computed one by one


@dataclass(frozen=True)
class Reference:
    """Attention and its gradients in fp64, from the inputs as the kernel gets them."""

    o: Tensor  # (batch, heads, queries, d of V)
    magnitude: Tensor  # sum over keys of P |V|, (batch, heads, queries, d of V): the scale of rounding errors in O
    p: Tensor  # (batch, heads, queries, keys); a sink's is what a row lacks to 1
    s: Tensor  # scores before masking, softly capped and with their bias, (batch, heads, queries, keys)
    delta: Tensor  # rowsum(dO * O), less the gradient of the log-sum-exp, (batch, heads, queries, 1)
    pk: Tensor  # P K, (batch, heads, queries, d), of the paper's equation 1; of capped scores, P times their slope


def reference(inputs: AttentionInputs) -> Reference:
    """Return softmax(alpha Q K^T) V in fp64, and the terms of the paper's equation 1; 0 where all keys are masked."""
    groups, entries = inputs.groups, []
    for at in range(inputs.q.shape[0]):  # each entry of a batch stays in a core's cache
        entry = inputs.part(slice(at, at + 1))
        parts = [entry]
        if entry.k.numel() * groups > _LARGE:  # each head of long sequences stays in memory
            pairs = ((h, h // groups) for h in range(entry.q.shape[1]))
            parts = [entry.part(heads=slice(h, h + 1), key_heads=slice(g, g + 1)) for h, g in pairs]
        entries.append(_combined([_reference(part) for part in parts], 1))
    return _combined(entries, 0)


def _combined(parts: list[Reference], dimension: int) -> Reference:
    if len(parts) == 1:
        return parts[0]
    tensors = {field.name: [getattr(part, field.name) for part in parts] for field in fields(Reference)}
    return Reference(**{name: torch.cat(each, dimension) for name, each in tensors.items()})


def _reference(inputs: AttentionInputs) -> Reference:
    k, v = inputs.expanded_k().double(), inputs.expanded_v().double()
    s, hidden = scores(inputs), inputs.hidden()
    p = probabilities(s, hidden, inputs.sink)
    o = p @ v
    if hidden is not None:
        o = o.masked_fill(hidden.all(-1, keepdim=True), 0.0)  # also where V has Inf or NaN: 0 * Inf is no 0
    delta = (inputs.do.double() * o).sum(-1, keepdim=True)
    return Reference(
        o=o,
        magnitude=p @ v.abs(),
        p=p,
        s=s,
        delta=delta if inputs.dlse is None else delta - inputs.dlse,
        pk=(p * slope(inputs, s) if inputs.softcap else p) @ k,
    )


def products(inputs: AttentionInputs) -> Tensor:
    """Return alpha Q K^T in fp64, (batch, heads, queries, keys)."""
    s: Tensor = inputs.q.double() @ inputs.expanded_k().double().mT * inputs.scale
    return s


def scores(inputs: AttentionInputs) -> Tensor:
    """Return the argument of softmax, before masking, likewise: the products, softly capped, and the bias."""
    s, added = products(inputs), inputs.added
    s = s.add_(added) if added is not None and inputs.capped_bias else s
    if inputs.softcap:
        s = s.div_(inputs.softcap).tanh_().mul_(inputs.softcap)
    return s if added is None or inputs.capped_bias else s + added.double()


def slope(inputs: AttentionInputs, s: Tensor) -> Tensor:
    """Return the derivative of softly capped scores by the uncapped ones: 1 - (s / c)^2, s without a later bias."""
    added = None if inputs.capped_bias else inputs.added
    capped = s if added is None else s - added.double()
    return 1.0 - (capped / inputs.softcap).square()


def probabilities(s: Tensor, hidden: Tensor | None, sink: Tensor | None = None) -> Tensor:
    """Return the row softmax of fp64 scores (..., heads, queries, keys); a row with every key `hidden` gives zeros.

    Args:
        s: scores.
        hidden: True where a key takes no part; None: nowhere.
        sink: a logit of every head, (heads,), that takes part and is left out of the result.
    """
    masked = s if hidden is None else s.masked_fill(hidden, -torch.inf)
    if sink is not None:
        return torch.softmax(torch.cat([masked, _column(s, sink)], -1), -1)[..., :-1]
    p = torch.softmax(masked, -1)
    return p if hidden is None else p.masked_fill(hidden.all(-1, keepdim=True), 0.0)


def _column(s: Tensor, sink: Tensor) -> Tensor:
    return sink.double()[:, None, None].expand(*s.shape[:-1], 1)


def log_sum_exp(inputs: AttentionInputs, ref: Reference) -> Tensor:
    """Return the log-sum-exp of every row with its sink, fp64 (batch, heads, queries, 1); -Inf where it sees no key."""
    lse = inputs.visible(ref.s).logsumexp(-1, keepdim=True)
    return lse if inputs.sink is None else torch.logaddexp(lse, _column(ref.s, inputs.sink))


def sink_gradient(inputs: AttentionInputs, ref: Reference) -> Tensor | None:
    """Return dSink in fp64, (heads,): minus the sum over rows of P of the sink times delta; None without a sink."""
    if inputs.sink is None:
        return None
    p = (_column(ref.s, inputs.sink) - log_sum_exp(inputs, ref)).exp()
    return -(p * ref.delta).sum((0, 2, 3))


def reference_gradients(inputs: AttentionInputs, ref: Reference) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV in fp64, in the shapes of q, k and v."""
    k, v, do = inputs.expanded_k().double(), inputs.expanded_v().double(), inputs.do.double()
    ds = ref.p * (do @ v.transpose(-1, -2) - ref.delta)
    if inputs.softcap:
        ds *= slope(inputs, ref.s)
    dq = inputs.scale * (ds @ k)
    dk = inputs.scale * (ds.transpose(-1, -2) @ inputs.q.double())
    dv = ref.p.transpose(-1, -2) @ do
    return dq, *inputs.gradients_as_stored(sum_groups(dk, inputs.groups), sum_groups(dv, inputs.groups))
