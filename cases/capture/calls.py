"""A model's call of attention in the captured format's words; or why the format can't hold it."""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_AS_DEFAULT = 1e-12  # relative: d**-0.5 and 1/sqrt(d) differ in their last bit
# What Hugging Face's attention functions take beside q, k, v, mask, dropout, scale and is_causal.
_UNHELD_WORDS = {
    "softcap": "a soft cap",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a position bias",
    "head_mask": "a head mask",
    "cu_seq_lens_q": "packed sequences",
}


class NotHeldError(Exception):
    """A call that the captured format has no place for; the message names the part, after "calls with"."""


@dataclass(frozen=True)
class AttentionCall:
    """softmax(scale q k^T) v, as the kernel was given it. The tensors are the model's own, detached."""

    q: Tensor  # (batch, heads, queries, d)
    k: Tensor  # (batch, key heads, keys, d)
    v: Tensor  # (batch, key heads, keys, d)
    causal: bool  # query i sees keys 0 .. i + keys - queries
    scale: float | None  # None: 1/sqrt(d)
    factor: float = 1.0  # a power of two that belongs into q: what folds another scale into 1/sqrt(d)
    sure: bool = False  # whether the function defines it so, or its arguments most likely mean it

    @property
    def alpha(self) -> float:
        """The factor of q k^T as the model has q."""
        return (1 / math.sqrt(self.q.shape[-1]) if self.scale is None else self.scale) * self.factor


@dataclass
class Masks:
    """What masks turned out to be. Finding out waits for the device, and all layers of a step mostly share one."""

    _known: dict[tuple[object, ...], tuple[Tensor, bool | None]] = field(default_factory=dict)

    def causal(self, mask: Tensor, queries: int, keys: int) -> bool:
        """Whether a mask is causal; False where it hides nothing. NotHeldError: it is any other mask."""
        key = (mask.data_ptr(), mask.shape, mask.stride(), mask._version, queries, keys)
        if key not in self._known:
            self._known[key] = (mask, _causal(mask.detach(), queries, keys))  # held: its address is not given away
        causal = self._known[key][1]
        if causal is None:
            raise NotHeldError("a mask that is not causal")
        return causal


def _causal(mask: Tensor, queries: int, keys: int) -> bool | None:
    if mask.dtype == torch.bool:
        hidden, plain = ~mask, torch.ones((), dtype=torch.bool, device=mask.device)
    else:
        hidden = mask <= torch.finfo(mask.dtype).min / 2
        plain = ((mask == 0) | hidden).all()
    later = torch.ones(queries, keys, dtype=torch.bool, device=mask.device).triu(keys - queries + 1)
    zeros = nothing = causal = False
    with suppress(RuntimeError):  # of a shape that does not go with the scores: packed, or of blocks
        zeros, nothing, causal = torch.stack([plain, ~hidden.any(), (hidden == later).all()]).tolist()
    return not nothing if zeros and (nothing or causal) else None


def sdpa_call(
    masks: Masks,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    **more: Any,
) -> AttentionCall:
    """A call of `torch.nn.functional.scaled_dot_product_attention`; NotHeldError: the format can't hold it."""
    del enable_gqa  # the shapes say it
    if more:
        raise NotHeldError(f"{', '.join(more)}")
    if dropout_p > 0:
        raise NotHeldError("dropout")
    q, k, v = _as_the_kernel_takes(query, key, value)
    if attn_mask is not None:
        is_causal = masks.causal(attn_mask, q.shape[2], k.shape[2])
    elif is_causal:  # PyTorch's flag lets query i see keys 0 .. i: the later ones take no part
        k, v = k[:, :, : q.shape[2]], v[:, :, : q.shape[2]]
    return plain_call(q, k, v, is_causal, scale, sure=True)


def hugging_face_call(
    name: str,
    masks: Masks,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any = None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **more: Any,
) -> AttentionCall:
    """A call of one of Hugging Face's attention functions; NotHeldError: the format can't hold it.

    Called `eager` it gets a causal mask as a mask alone; all others have a flag too, the module's if the call has none.
    """
    for word, reason in _UNHELD_WORDS.items():
        if more.get(word) is not None:
            raise NotHeldError(reason)
    if dropout > 0:
        raise NotHeldError("dropout")
    q, k, v = _as_the_kernel_takes(query, key, value)
    window, mask = more.get("sliding_window"), attention_mask
    if name != "eager" and window is not None and window < k.shape[2]:
        raise NotHeldError("a sliding window")
    if mask is not None and not isinstance(mask, Tensor):
        raise NotHeldError(f"a {type(mask).__name__}")
    if mask is not None and (name == "eager" or mask.dim() != 2):
        causal = masks.causal(mask, q.shape[2], k.shape[2])
    elif mask is not None and not bool(mask.all()):
        raise NotHeldError("padding")
    else:
        flag = getattr(module, "is_causal", True) if is_causal is None else is_causal
        causal = name != "eager" and bool(flag)
    return plain_call(q, k, v, causal, scaling)


def plain_call(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, *, sure: bool = False
) -> AttentionCall:
    """A call whose mask is known, tensors (batch, heads, tokens, d); NotHeldError: the format can't hold it."""
    q, k, v = _as_the_kernel_takes(q, k, v)
    if k.shape != v.shape or q.shape[-1] != k.shape[-1]:
        raise NotHeldError("V of another shape than K" if k.shape != v.shape else "K of another width than Q")
    if q.shape[0] != k.shape[0] or not k.shape[1] or q.shape[1] % k.shape[1] or 0 in q.shape or 0 in k.shape:
        raise NotHeldError("tensors that are empty, or whose batches or heads do not go together")
    if causal and q.shape[2] > k.shape[2]:
        raise NotHeldError("a causal mask of more queries than keys")
    if scale is not None and not 0 < scale < math.inf:
        raise NotHeldError("a scale that is not positive")
    ratio = 1.0 if scale is None else scale * math.sqrt(q.shape[-1])
    power = 2.0 ** round(math.log2(ratio))
    if abs(ratio / power - 1) < _AS_DEFAULT:
        return AttentionCall(q, k, v, causal, None, power, sure)  # exact in q, so that every kernel can run it
    return AttentionCall(q, k, v, causal, scale, sure=sure)


def _as_the_kernel_takes(*given: Tensor) -> list[Tensor]:
    """q, k and v, detached; under autocast in its format."""
    for tensor in given:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_nested:
            raise NotHeldError("nested tensors" if tensor.is_nested else f"tensors of class {type(tensor).__name__}")
        if tensor.dim() not in (3, 4):
            raise NotHeldError(f"tensors of {tensor.dim()} dimensions")
    tensors, device = [tensor.detach() for tensor in given], given[0].device.type
    if torch.is_autocast_enabled(device):
        tensors = [tensor.to(torch.get_autocast_dtype(device)) for tensor in tensors]
    if len({tensor.dtype for tensor in tensors}) > 1 or tensors[0].dtype not in _DTYPES:
        raise NotHeldError(f"tensors in {', '.join(str(tensor.dtype).removeprefix('torch.') for tensor in tensors)}")
    return [tensor if tensor.dim() == 4 else tensor[:, None] for tensor in tensors]
