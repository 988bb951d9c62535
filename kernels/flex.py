"""PyTorch's FlexAttention, compiled: a kernel that torch.compile generates from the mask it is given.

Not run on a GPU yet. On a CPU it compiles too, but has no backward pass.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.features import BIAS, CAUSAL, COMMON, LENGTHS, MASKS, SINK, SOFTCAP, VALUE_DIM, WINDOW
from tiebreak.kernels.flash import Block
from tiebreak.kernels.inputs import AttentionInputs
from tiebreak.kernels.kernel import Kernel
from tiebreak.kernels.plans import SinkEntry
from tiebreak.kernels.triton.loading import missing
from tiebreak.kernels.vendor import empty, fused_on_gpu, through_autograd

SMALLEST_HEAD = 16  # head dimension: torch/_inductor/kernel/flex/flex_attention.py
# Hopper's default at a head dimension of 64: torch/_inductor/template_heuristics/triton.py.
_BLOCK = Block(queries=128, keys=128)
# The kernel for long rows for short ones too, whose own kernel splits the keys.
_OPTIONS = {"FORCE_USE_FLEX_ATTENTION": True}
_SHAPES = 256  # that one process may compile for; PyTorch's own limit is 8

_TAKES = COMMON | MASKS | {VALUE_DIM, SOFTCAP, SINK, BIAS}
_OF_DISTANCE = frozenset({CAUSAL, WINDOW})  # masks that are a comparison of two places, in one sequence


def flex() -> Kernel:
    """Return FlexAttention through torch.compile, forward and backward."""
    declared = fused_on_gpu(_BLOCK)
    return Kernel(
        "flex",
        partial(through_autograd, _call),
        replace(declared, plan=replace(declared.plan, sink=SinkEntry.AFTERWARDS)),
        takes=_TAKES,
        missing_requirement=_missing_requirement,
    )


def flex_elsewhere() -> Kernel:
    """Return FlexAttention on a device for which torch.compile's code is unknown: tried first on a small call."""
    return replace(flex(), declaration=None, undeclared=lambda inputs: "torch.compile")


def _missing_requirement(inputs: AttentionInputs) -> str | None:
    from torch._dynamo import config

    narrowest = min(inputs.q.shape[3], inputs.v.shape[3])
    if narrowest < SMALLEST_HEAD:
        return f"FlexAttention takes head dimensions from {SMALLEST_HEAD} on, not {narrowest}"
    if (reason := empty(inputs)) is not None:
        return reason
    if config.disable:  # without compiling it, torch.compile would run another implementation
        return "torch.compile is switched off: unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE"
    return missing() if inputs.q.device.type in ("cuda", "cpu") else None


@cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # fullgraph: what can't be compiled is an error. Without dynamic shapes a kernel does not depend on those before it.
    return torch.compile(flex_attention, fullgraph=True, dynamic=False)  # type: ignore[no-any-return, unused-ignore]


def _mask(inputs: AttentionInputs) -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None:
    """Return whether a key is visible, of (batch, head, query, key), irregular masks looked up; None where all are."""
    masks = inputs.masks()
    if not masks:
        return None
    ahead = inputs.k.shape[2] - inputs.q.shape[2]
    (left, right), computed = inputs.window, _OF_DISTANCE - (masks.keys() if LENGTHS in masks else set())
    limits = {WINDOW: right, CAUSAL: 0 if inputs.causal else None}
    sides = [side for feature, side in limits.items() if feature in computed and side is not None]
    others = [mask for feature, mask in masks.items() if feature not in computed]
    hidden = reduce(or_, others) if others else None

    def visible_key(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        visible = key <= query + ahead + min(sides) if sides else key >= 0
        if left is not None and WINDOW in computed:
            visible = visible & (key >= query + ahead - left)
        return visible if hidden is None else visible & ~_element(hidden, batch, head, query, key)

    return visible_key


def _element(x: Tensor, *places: Tensor) -> Tensor:
    """Return an element of a tensor in which a dimension of 1 broadcasts."""
    return x[tuple(place if n > 1 else 0 for place, n in zip(places, x.shape, strict=True))]


def _score(inputs: AttentionInputs) -> Callable[..., Tensor] | None:
    """Return the function of (score, batch, head, query, key) that changes scores before softmax; None for none."""
    cap, bias = inputs.softcap, inputs.bias

    def changed(score: Tensor, *places: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        return score if bias is None else score + _element(bias, *places)

    return changed if cap or bias is not None else None


def _block_mask(inputs: AttentionInputs) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    mask, queries, keys = _mask(inputs), inputs.q.shape[2], inputs.k.shape[2]
    if mask is None:
        return None
    batch, heads = inputs.hidden().shape[:2]  # type: ignore[union-attr]
    return create_block_mask(mask, batch, heads, queries, keys, device=str(inputs.q.device))


def _call(inputs: AttentionInputs, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Call FlexAttention, compiled; the weight of a sink, which it does not take, is applied afterwards."""
    from torch._dynamo import config
    from torch.nn.attention import flex_attention

    request = getattr(flex_attention, "AuxRequest", None)  # from PyTorch 2.9 on
    log_sum_exp = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    with config.patch(recompile_limit=_SHAPES):
        returned = _compiled()(
            q,
            k,
            v,
            score_mod=_score(inputs),
            block_mask=_block_mask(inputs),
            scale=inputs.scale,
            enable_gqa=inputs.groups > 1,
            kernel_options=_OPTIONS,
            **({} if inputs.sink is None else log_sum_exp),
        )
    if inputs.sink is None:
        return returned  # type: ignore[no-any-return]
    o, lse = returned
    return _with_sink(o, lse, inputs.sink)


def _with_sink(o: Tensor, lse: Any, sink: Tensor) -> Tensor:
    """Return O times its keys' share of the weight with the sink, as TorchTitan, vLLM and HF's gpt-oss compute it."""
    weight = torch.sigmoid(getattr(lse, "lse", lse) - sink[:, None])
    return (o * weight[..., None]).to(o.dtype)
