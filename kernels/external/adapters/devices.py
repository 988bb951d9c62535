"""Attention kernels for GPUs and NPUs. None of them was run on one yet: their signatures and documents were read."""

import importlib
import os
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import pad

from tiebreak.kernels.external.adapters.foreign import Foreign
from tiebreak.kernels.external.options import NO_BACKWARD, kernel, needs
from tiebreak.kernels.npu import causal_mask
from tiebreak.kernels.triton.compiling import is_executing

_ALL = -1, -1  # a window of all keys
_CUDA, _BOTH = ("cuda",), ("cuda", "npu")

FLASH_ATTN = Foreign(
    "flash_attn:flash_attn_func", "flash-attn", "2.8", "pip install flash-attn --no-build-isolation", _CUDA
)
FLASH_ATTN_CUTE = Foreign(
    "flash_attn.cute:flash_attn_func", "flash-attn-4", "4.0", "pip install --pre flash-attn-4", ("cuda", "cpu")
)
XFORMERS = Foreign("xformers.ops.fmha:memory_efficient_attention", "xformers", "0.0.35", devices=_CUDA)
XFORMERS_OP = Foreign("xformers.ops.fmha:MemoryEfficientAttentionCutlassOp", "xformers", "0.0.35")
XFORMERS_MASK = Foreign("xformers.ops.fmha.attn_bias:LowerTriangularFromBottomRightMask", "xformers", "0.0.35")
FLASHINFER = Foreign("flashinfer:single_prefill_with_kv_cache", "flashinfer-python", "0.6", devices=_CUDA)
SAGEATTENTION = Foreign("sageattention:sageattn", "sageattention", "2.2", devices=_CUDA)
AITER = Foreign("aiter:flash_attn_func", "amd-aiter", "0.1.20", devices=_CUDA)
TRANSFORMER_ENGINE = Foreign(
    "transformer_engine.pytorch:DotProductAttention",
    "transformer-engine",
    "2.18",
    "pip install --no-build-isolation transformer-engine[pytorch]",
    _CUDA,
)
FLAG_GEMS = Foreign("flag_gems:scaled_dot_product_attention", "flag-gems", "5.3", devices=_BOTH)
LIGER = Foreign(
    "liger_kernel.transformers.functional:liger_fused_neighborhood_attention", "liger-kernel", "0.8", devices=_BOTH
)
FLA = Foreign("fla.ops.attn:parallel_attn", "flash-linear-attention", "0.5", devices=_CUDA)
NPU_FUSION_ATTENTION = Foreign("torch_npu:npu_fusion_attention", "torch-npu", "2.1 to 2.7", devices=("npu",))


@needs(FLASH_ATTN)
@kernel(layout="bnhd", takes="gqa")
def flash_attn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    window_size: Any = _ALL,
    softcap: float = 0.0,
) -> Any:
    """Call FlashAttention-2. Its mask is aligned at the lower right; a row without a key is 0."""
    options = {"causal": causal, "softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap}
    # Deterministic: its gradients would else be added up in whatever order blocks end.
    return FLASH_ATTN(q, k, v, deterministic=True, **options)


@needs(FLASH_ATTN_CUTE)
@kernel(layout="bnhd", takes="gqa", refuses="blind_rows")
def flash_attn_cute(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float,
    window_size: Any = _ALL,
    softcap: float = 0.0,
) -> Any:
    """Call FlashAttention-4, written in CuTe's Python. Its mask is aligned at the lower right; returns O and the sums.

    Its learned sink is not used: nothing here has shown whether gradients go through it.
    """
    if q.device.type == "cpu" and not is_executing():
        raise NotImplementedError("flash-attn-4 has no kernel for cpu: give --backend cuda or ptx")
    sides = tuple(None if side < 0 else side for side in window_size)
    options = {"causal": causal, "softmax_scale": softmax_scale, "window_size": sides, "softcap": softcap}
    return FLASH_ATTN_CUTE(q, k, v, deterministic=True, **options)


@needs(XFORMERS, XFORMERS_OP, XFORMERS_MASK)
@kernel(layout="bnhd", refuses="gqa blind_rows")
def xformers(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Any:
    """Call memory_efficient_attention by CUTLASS, in both passes: given an operator, it takes no other but raises.

    Grouped heads are left out: they work in its forward pass only.
    """
    mask = XFORMERS_MASK() if causal else None
    return XFORMERS(q, k, v, attn_bias=mask, scale=scale, op=XFORMERS_OP.function)


@needs(FLASHINFER)
@kernel(layout="nhd", takes="gqa", refuses="blind_rows", backward=NO_BACKWARD)
def flashinfer(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, sm_scale: float, logits_soft_cap: float = 0.0) -> Any:
    """Call single_prefill_with_kv_cache, a sequence at a time, by FlashInfer's own FlashAttention-2.

    Its mask is aligned at the lower right; its window has a left side only, and is not used.
    """
    options = {"causal": causal, "sm_scale": sm_scale, "logits_soft_cap": logits_soft_cap}
    return FLASHINFER(q, k, v, kv_layout="NHD", backend="fa2", **options)


@needs(SAGEATTENTION)
@kernel(takes="gqa", backward=NO_BACKWARD)
def sageattention(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, sm_scale: float) -> Any:
    """Call sageattn, Q K^T in int8. It chooses its kernel by the GPU, and does not report which.

    To choose a kernel, name it: `--kernel sageattention:sageattn_qk_int8_pv_fp16_triton --declare takes=gqa --declare
    backward=none`. The mask is for as many queries as keys.
    """
    return SAGEATTENTION(q, k, v, tensor_layout="HND", is_causal=is_causal, sm_scale=sm_scale)


@needs(AITER)
@kernel(layout="bnhd", takes="gqa")
def aiter(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float, how_v3_bf16_cvt: int = 1) -> Any:
    """Call AMD's flash_attn_func. Its mask is aligned at the lower right; a row without a key is 0.

    `--declare options.how_v3_bf16_cvt=0` rounds P-bar to even, 1 away from zero, 2 toward it. The shape and
    the GPU decide whether its assembly or its Composable Kernel runs; it does not report which.
    """
    if not importlib.import_module("aiter.ops.mha").ENABLE_CK:
        raise NotImplementedError("aiter runs Triton in its place: unset ENABLE_CK")
    keywords = {"causal": causal, "softmax_scale": softmax_scale, "how_v3_bf16_cvt": how_v3_bf16_cvt}
    return AITER(q, k, v, deterministic=True, **keywords)


@needs(TRANSFORMER_ENGINE)
@kernel(layout="bnhd", takes="gqa", refuses="blind_rows")
def transformer_engine(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, softmax_scale: float) -> Any:
    """Call DotProductAttention with its cuDNN kernels only: with the other two switched off it raises instead."""
    switches = {"NVTE_FUSED_ATTN": "1", "NVTE_FLASH_ATTN": "0", "NVTE_UNFUSED_ATTN": "0"}
    with patch.dict(os.environ, {**switches, "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"}):
        layer = TRANSFORMER_ENGINE(
            q.shape[2],
            q.shape[3],
            num_gqa_groups=k.shape[2],
            attention_dropout=0.0,
            qkv_format="bshd",
            attn_mask_type="causal_bottom_right" if causal else "no_mask",
            softmax_scale=softmax_scale,
        )
        return layer(q, k, v).unflatten(-1, q.shape[2:])


@needs(FLAG_GEMS)
@kernel()
def flag_gems(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float, enable_gqa: bool) -> Any:
    """Call FlagGems' scaled_dot_product_attention in Triton, by name and not through PyTorch's.

    It gets no bool mask: True hides a key there, and shows it in PyTorch's.
    """
    return FLAG_GEMS(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)


@needs(LIGER)
@kernel(square=True, refuses="gqa")
def liger(q: Tensor, k: Tensor, v: Tensor, *, scale: float) -> Any:
    """Call Liger's only softmax attention, which is of a neighbourhood: here from every token to every other."""
    return LIGER(q, k, v, kernel_size=2 * q.shape[2] - 1, scale=scale)


@needs(FLA)
@kernel(layout="bnhd", takes="gqa")
def fla(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float) -> Any:
    """Call flash-linear-attention's parallel_attn, always causal: without a mask every row is a sequence's last."""
    if is_causal:
        return FLA(q, k, v, scale=scale)
    rows = (pad(row, (0, 0, 0, 0, k.shape[1] - 1, 0)) for row in torch.split(q, 1, 1))
    with torch.no_grad():  # autograd would add up dK and dV in the format of q
        return torch.cat([FLA(row, k, v, scale=scale)[:, -1:] for row in rows], 1)


@needs(NPU_FUSION_ATTENTION)
@kernel(takes="gqa", refuses="blind_rows")
def npu_fusion_attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Any:
    """Call torch-npu's operator, which the backend `ascend` has in every layout (kernels/npu.py).

    Without a mask it has none; its mode 3 aligns a causal one at the lower right.
    """
    masked = causal_mask(q.device) if causal else {}
    return NPU_FUSION_ATTENTION(q, k, v, q.shape[1], "BNSD", scale=scale, **masked)[0]
