"""Attention out of libraries of models, in PyTorch."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.adapters.foreign import Foreign, needs
from tiebreak.kernels.external.options import kernel

HF_EAGER = Foreign(
    "transformers.models.llama.modeling_llama:eager_attention_forward", "transformers", "4.48 to 5.23", ("scaling",)
)
HF_SDPA = Foreign(
    "transformers.integrations.sdpa_attention:sdpa_attention_forward",
    "transformers",
    "4.48 to 5.23",
    ("scaling", "is_causal"),
)
X_TRANSFORMERS = Foreign("x_transformers.attend:Attend", "x-transformers", "2.31", ("causal", "scale", "flash"))


def _module(q: Tensor, k: Tensor) -> SimpleNamespace:
    """What of a model's layer Hugging Face's functions look at."""
    return SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, is_causal=False)


@needs(HF_EAGER)
@kernel(name="hf_eager", takes="gqa", refuses="blind_rows")
def hf_eager(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scaling: float) -> Any:
    """Hugging Face's eager attention, Llama's copy of it, with the mask that it is given there.

    The mask is added to the scores, the lowest number where a key is hidden: a row without a key is a mean of all.
    """
    added = None
    if attn_mask is not None:
        added = q.new_zeros(attn_mask.shape).masked_fill(~attn_mask, torch.finfo(q.dtype).min)
    o, _ = HF_EAGER(_module(q, k), q, k, v, added, scaling=scaling)
    return o.transpose(1, 2)


@needs(HF_SDPA)
@kernel(name="hf_sdpa", takes="gqa")
def hf_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scaling: float
) -> Any:
    """Hugging Face's SDPA attention, never its eager one. Which kernel of PyTorch's it ends in, PyTorch chooses."""
    o, _ = HF_SDPA(_module(q, k), q, k, v, attn_mask, scaling=scaling, is_causal=is_causal)
    return o.transpose(1, 2)


@needs(X_TRANSFORMERS)
@kernel(takes="gqa")
def x_transformers(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float
) -> Any:
    """lucidrains' Attend, without PyTorch's SDPA.

    Its query head h goes with the key head h % key heads, so the heads change their places before and after.
    """
    places = torch.arange(q.shape[1], device=q.device).view(k.shape[1], -1).T.flatten()
    attend = X_TRANSFORMERS(causal=is_causal, scale=scale, flash=False)
    o, _ = attend(q[:, places], k, v, mask=attn_mask)
    return o[:, places.argsort()]
