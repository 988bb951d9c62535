"""Attention of libraries that have it on a CPU too: models in PyTorch, and OpenVINO, forward alone."""

import importlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tiebreak.kernels.external.adapters.foreign import Foreign
from tiebreak.kernels.external.options import NO_BACKWARD, kernel, needs

HF_EAGER = Foreign("transformers.models.llama.modeling_llama:eager_attention_forward", "transformers", "4.48 to 5.23")
HF_SDPA = Foreign("transformers.integrations.sdpa_attention:sdpa_attention_forward", "transformers", "4.48 to 5.23")
X_TRANSFORMERS = Foreign("x_transformers.attend:Attend", "x-transformers", "2.31")
OPENVINO = Foreign("openvino.opset13:scaled_dot_product_attention", "openvino", "2024.1 to 2026.4")

_ELEMENTS = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
_BITS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
_NUMPY = {2: "int16", 4: "int32"}


def _layer(q: Tensor, k: Tensor) -> SimpleNamespace:
    """Return a stand-in for a model's layer, with the attributes that Hugging Face's functions read."""
    return SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], training=False, is_causal=False)


@needs(HF_EAGER)
@kernel(name="hf_eager", takes="gqa", refuses="blind_rows")
def hf_eager(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, scaling: float) -> Any:
    """Call Hugging Face's eager attention, Llama's copy of it, with the mask that it is given there.

    The mask is added to the scores, the lowest number where a key is hidden: a row without a key is a mean of all.
    """
    added = None
    if attn_mask is not None:
        added = q.new_zeros(attn_mask.shape).masked_fill(~attn_mask, torch.finfo(q.dtype).min)
    o, _ = HF_EAGER(_layer(q, k), q, k, v, added, scaling=scaling)
    return o.transpose(1, 2)


@needs(HF_SDPA)
@kernel(name="hf_sdpa", takes="gqa")
def hf_sdpa(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scaling: float
) -> Any:
    """Call Hugging Face's SDPA attention, never its eager one. PyTorch chooses the kernel."""
    o, _ = HF_SDPA(_layer(q, k), q, k, v, attn_mask, scaling=scaling, is_causal=is_causal)
    return o.transpose(1, 2)


@needs(X_TRANSFORMERS)
@kernel(takes="gqa")
def x_transformers(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float
) -> Any:
    """Call lucidrains' Attend, without PyTorch's SDPA.

    Its query head h uses the key head h % key heads, so the heads are reordered before and after.
    """
    places = torch.arange(q.shape[1], device=q.device).view(k.shape[1], -1).T.flatten()
    attend = X_TRANSFORMERS(causal=is_causal, scale=scale, flash=False)
    o, _ = attend(q[:, places], k, v, mask=attn_mask)
    return o[:, places.argsort()]


@cache
def _compiled(dtype: torch.dtype, d: int, scale: float | None, is_causal: bool, masked: bool) -> Any:
    """Return a model that is one ScaledDotProductAttention, set to compute in the format of its inputs."""
    library = importlib.import_module("openvino")
    operators, kind = library.opset13, getattr(library.Type, _ELEMENTS[dtype])
    parameters = [operators.parameter([-1, -1, -1, d], kind) for _ in "qkv"]
    if masked:
        parameters.append(operators.parameter([-1] * 4, library.Type.boolean))
    factor = None if scale is None else operators.convert_like(operators.constant(scale), parameters[0])
    mask = parameters[3] if masked else None
    node = OPENVINO(*parameters[:3], attention_mask=mask, scale=factor, causal=is_causal)
    settings = {"INFERENCE_PRECISION_HINT": kind}
    return library.Core().compile_model(library.Model([node], parameters, "attention"), "CPU", settings)


@needs(OPENVINO)
@kernel(refuses="gqa blind_rows", backward=NO_BACKWARD)
def openvino(
    q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None = None, is_causal: bool, scale: float
) -> Tensor:
    """Call OpenVINO's operator on a CPU, set to compute in the inputs' format, or in fp32 where the CPU lacks it.

    Its causal mask is aligned at the upper left, and its scale is a number of the inputs' format.
    """
    library, default = importlib.import_module("openvino"), scale == q.shape[3] ** -0.5
    if not default and torch.tensor(scale, dtype=q.dtype).item() != scale:
        raise NotImplementedError(f"openvino's scale is a number of the inputs' format, as {scale:g} is none")
    attend = _compiled(q.dtype, q.shape[3], None if default else scale, is_causal, attn_mask is not None)
    # NumPy knows no bf16: the bits go over as they are.
    kind = getattr(library.Type, _ELEMENTS[q.dtype])
    tensors = [library.Tensor(tensor.view(_BITS[q.dtype]).numpy(), list(tensor.shape), kind) for tensor in (q, k, v)]
    masks = [] if attn_mask is None else [library.Tensor(attn_mask.contiguous().numpy())]
    o = attend([*tensors, *masks])[0]
    return torch.from_numpy(o.view(_NUMPY[q.element_size()])).view(q.dtype).clone()
